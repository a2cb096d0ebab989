"""The environment variables of the pipeline: what changes no output is said here, not in a knob.

A knob that says how a stage is watched would make DVC train everything again for another value.
"""

import os

TRACK = "RLHF_TRACK"


def words(variable: str) -> list[str]:
    """The words of a variable, parted by commas or spaces; none where it is not set."""
    return os.environ.get(variable, "").replace(",", " ").split()
