"""The one error that a person can mend: what came in is not what was asked for."""


class InputError(Exception):
    """Bad input. The message names the file, row or key, what was found and what was expected.

    Scripts turn it into a one-line message and exit code 1, and say in one more line what to do
    next; anything else is a fault of the code.
    """

    advice = "mend that, then `dvc repro`: stages that ended well are not run again"


class BadKnob(InputError):
    """A knob whose value cannot be used here: `key` is its dotted name in params.yaml."""

    def __init__(self, key: str, problem: str):
        super().__init__(f"params.yaml: {key}: {problem}")


class Ended(InputError):
    """A process of a stage that a signal ended."""

    advice = (
        "`dvc repro` goes on from the state saved last; where the machine ran out of memory, half"
        " the train_batch_size with twice the batch_acc gives the same update"
    )


class Lost(Exception):
    """Another process of this stage cannot be reached: it has ended, and the cause is told there.

    Ends this one without a word.
    """


class MissingFile(InputError):
    """A file that another stage writes is not there, as in a clone that fetched not all."""

    advice = "`dvc repro --pull` fetches what stages that do not run made before, and goes on"

    def __init__(self, path: object, expected: str):
        super().__init__(f"{path}: missing; expected {expected}")
