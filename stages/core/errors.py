"""The one error that a person can mend: what came in is not what was asked for."""


class InputError(Exception):
    """Bad input. The message names the file, row or key, what was found and what was expected.

    Scripts turn it into a one-line message and exit code 1; anything else is a fault of the code.
    """
