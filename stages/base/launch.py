"""A stage that several processes run together, and who of them speaks.

Torch's elastic launcher starts them, on this machine, with the command line of the stage itself; so
a command of dvc.yaml stays the same for any number. RLHF_LAUNCH names another launcher. Each
process runs the whole script; the first one writes and prints. An error is told once, by the
process that met it first.
"""

import io
import logging
import os
import shutil
import signal
import sys
import uuid
import warnings
from datetime import timedelta

from stages.base.environment import LAUNCH, launcher, rank, world_size
from stages.base.errors import BadKnob, Ended, InputError

LOST = 3  # exit code of a process that lost the others


def launch(stage: str, words: list[str], processes: int, threads: int) -> bool:
    """Run `python -m stages.<stage>` with these words in so many processes, and wait for them.

    False, and nothing done, where this is the only process or one of those that were started.
    Under a launcher from outside BadKnob unless it started as many. `SystemExit` where a process
    failed, which has said why; `Ended` where one was killed.
    """
    found = world_size()
    if found is not None and found != processes:
        raise BadKnob(
            "processes", f"found {processes}, but a launcher started {found}; expected the same"
        )
    if found is not None or processes == 1:
        return False
    command = ["-m", f"stages.{stage}", *words]
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # or the launcher's children warn
    if other := launcher():
        if shutil.which(other[0]) is None:
            raise InputError(f"{LAUNCH}: found {other[0]!r}, expected a command of this machine")
        sys.stdout.flush()
        os.execvp(other[0], [*other, *command])  # it hears DVC's signals itself
    run_elastic(command, processes)
    return True


def run_elastic(command: list[str], processes: int) -> None:
    """Run a Python command in several processes of this machine by torch's elastic launcher."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(os.devnull),
    )
    logging.disable()  # the launcher's lines on what the processes say themselves
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        codes = {number: failure.exitcode for number, failure in error.failures.items()}
        raise end_of(codes, processes) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None


def end_of(codes: dict[int, int], processes: int) -> BaseException:
    """Exit codes by process -> how the stage ends. The launcher itself ends others by SIGTERM."""
    for number, code in codes.items():
        if code < 0 and code != -signal.SIGTERM:
            name = signal.Signals(-code).name
            return Ended(f"process {number} of {processes} was ended by {name}")
    if set(codes.values()) <= {LOST, -signal.SIGTERM}:
        return Ended(f"the {processes} processes lost each other")
    return SystemExit(1)  # one of them has said why


class Silent(io.TextIOBase):
    """A file that keeps nothing of what is written to it."""

    def write(self, text: str) -> int:
        return len(text)


def quieten() -> None:
    """Let a process that is not the first print nothing but errors."""
    if rank():
        sys.stdout = Silent()
        warnings.simplefilter("ignore")


def first_to_say() -> bool:
    """Whether no other process of this stage has told an error yet; the launcher's store knows."""
    from torch.distributed import DistStoreError, TCPStore

    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        return rank() == 0
    try:
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=5))
        return store.add("rlhf/errors", 1) == 1
    except (DistStoreError, RuntimeError):
        return rank() == 0
