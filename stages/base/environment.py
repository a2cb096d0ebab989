"""The environment variables of the pipeline: what changes no output is said here, not in a knob.

A knob that says how a stage is watched would make DVC train everything again for another value.

RLHF_TRACK         trackers that get the figures of a training: tensorboard, wandb, mlflow, trackio
RLHF_SAVE_MINUTES  how often a training saves its state (10); 0: never
RLHF_SCRATCH       the folder of those states (.scratch); best on a disk that outlives the machine
RLHF_LAUNCH        what starts the processes of a stage in place of torch's own launcher

What a launcher tells its processes (RANK, WORLD_SIZE) is read here too.
"""

import math
import os
import shlex
from pathlib import Path

from stages.base.errors import InputError

TRACK = "RLHF_TRACK"
SAVE_MINUTES = "RLHF_SAVE_MINUTES"
SCRATCH = "RLHF_SCRATCH"
LAUNCH = "RLHF_LAUNCH"


def words(variable: str) -> list[str]:
    """The words of a variable, parted by commas or spaces; none where it is not set."""
    return os.environ.get(variable, "").replace(",", " ").split()


def save_seconds() -> float | None:
    """Seconds between two saved states; None where nothing is saved."""
    text = os.environ.get(SAVE_MINUTES, "").strip() or "10"
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 <= minutes < math.inf:
        raise InputError(f"{SAVE_MINUTES}: found {text!r}, expected minutes, 0 for never")
    return 60 * minutes or None


def scratch_folder() -> Path:
    """Where the states of stages under way lie."""
    return Path(os.environ.get(SCRATCH, "").strip() or ".scratch")


def launcher() -> list[str]:
    """The words of a command that starts the processes of a stage; none for torch's own."""
    return shlex.split(os.environ.get(LAUNCH, ""))


def world_size() -> int | None:
    """How many processes a launcher started for this stage; None where none did."""
    return _number("WORLD_SIZE")


def local_world_size() -> int:
    """How many of them run on this machine."""
    return _number("LOCAL_WORLD_SIZE") or 1


def rank() -> int:
    """Which of them this one is; 0 without a launcher."""
    return _number("RANK") or 0


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    if text and not text.isdecimal():
        raise InputError(f"{variable}: found {text!r}, expected a number, as launchers set it")
    return int(text) if text else None
