"""The environment variables of the pipeline: what changes no output is said here, not in a knob.

A knob that says how a stage is watched would make DVC train everything again for another value.

RLHF_TRACK         trackers that get the figures of a training: tensorboard, wandb, mlflow, trackio
RLHF_SAVE_MINUTES  how often a training saves its state (10); 0: never
RLHF_SCRATCH       the folder of those states (.scratch); best on a disk that outlives the machine
RLHF_VLLM          for `sampler: vllm`: a python that has vLLM, or a server's address
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
VLLM = "RLHF_VLLM"
LAUNCH = "RLHF_LAUNCH"

# How a launcher tells processes of each other: an engine beside them is none of them.
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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


def vllm() -> str:
    """Where vLLM is: the path of an interpreter, or an address."""
    where = os.environ.get(VLLM, "").strip()
    if not where:
        raise InputError(
            f"{VLLM}: not set, but the knob sampler is vllm; expected the python of an environment"
            " that has vLLM (`make vllm` makes one), or the address of a server"
        )
    return where


def engine_variables(threads: int, gpu: int | None) -> dict[str, str]:
    """The environment of a process that runs vLLM, on one of the GPUs that this process sees."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    if gpu is not None:
        seen = [name for name in kept.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        kept["CUDA_VISIBLE_DEVICES"] = seen[gpu] if seen else str(gpu)
    return kept | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with 1 the same seeds give other rows each time
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


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
