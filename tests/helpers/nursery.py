"""Stages as processes that start at once, forked off one that has imported what they need.

A line on stdin, JSON: {"folder", "log", "stage", "words", "pause"}. The answer is the process id,
and in a second line its exit status. A stage started so notes under `notes` in its folder when the
first interval and each later one begins (ready, saved), when a step or batch was finished, and when
its outputs were written.
`pause` seconds stand for the computing of each step or batch, and for each flush of a slow disk.
"""

import json
import os
import sys
import time
from importlib import import_module

import stages
from stages.base import kept, scratch
from stages.rows import inputs
from stages.training import saving
from tests.helpers.long_stages import STAGES


def main() -> None:
    for stage in STAGES:
        import_module(f"stages.{stage}")
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            be_stage(**json.loads(line))
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def be_stage(folder: str, log: str, stage: str, words: list[str], pause: float) -> None:
    """Run a stage to its end in this process, which ends with it."""
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    stages.PARENT = os.getppid()
    inputs.BATCH = 4
    slow_down(pause)
    status = 1
    try:
        getattr(import_module(f"stages.{stage}"), stage).main(words, prog_name=stage)
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def note(what: str) -> None:
    with open("notes", "a") as file:
        file.write(f"{time.monotonic()} {what}\n")


def slow_down(pause: float) -> None:
    write_part, fsync, parts = scratch.write_part, os.fsync, []

    def ready(function):
        def begin(*arguments):
            function(*arguments)
            note("ready")

        return begin

    def finished(function):
        def slow(*arguments):
            time.sleep(pause)
            note("unit")
            function(*arguments)

        return slow

    def saving_by(function):
        def save(*arguments):
            parts.clear()
            function(*arguments)
            if any(parts):
                note("saved")

        return save

    def written(*arguments):
        parts.append(write_part(*arguments))
        return parts[-1]

    def flush(file):
        time.sleep(pause)
        fsync(file)

    def done(work):
        note("done")
        scratch.drop(work)

    for keeper in (saving.Saver, kept.Kept):
        keeper.__init__ = ready(keeper.__init__)
    saving.Saver.after_step = finished(saving_by(saving.Saver.after_step))
    kept.Kept._add, kept.Kept._write = finished(kept.Kept._add), saving_by(kept.Kept._write)
    kept.write_part = scratch.write_part = written
    kept.drop = saving.drop = done
    os.fsync = flush


if __name__ == "__main__":
    main()
