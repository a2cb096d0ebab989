"""The stages of the pipeline; `python -m stages.<name>` runs one.

Importing torch and transformers makes objects by the million that live to the end. Looking for
garbage among them meanwhile is a sixth of a stage's start, so that it waits until the command runs
(base/command.py). Where the package is only imported nothing is switched off.

PARENT is noted before those seconds too: a DVC killed meanwhile is missed when they are over.

`.venv/bin/dvc repro` without the environment activated runs the stages with whatever `python` the
shell finds. One without torch hands over to the interpreter that runs DVC, where it can tell which.
"""

import gc
import os
import sys
from importlib.util import find_spec

PARENT = os.getppid()


def of_process(process, name):
    """A file of the kernel on a running process, as bytes; empty where there is none."""
    try:
        with open(f"/proc/{process}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def python_above():
    """Path of the Python that runs the process above, or the one above its shell; None without."""
    process = str(PARENT)
    for _ in range(2):
        path = os.fsdecode(of_process(process, "cmdline").split(b"\0")[0])
        if os.path.isabs(path) and os.path.basename(path).startswith("python"):
            return path
        process = of_process(process, "stat").rpartition(b")")[2].split()[1:2]
        process = os.fsdecode(process[0]) if process else ""
    return None


def hand_over():
    """Go on under the Python that runs DVC, this one having no torch; else say what to do."""
    python, own = python_above(), of_process("self", "cmdline").split(b"\0")[1:-1]
    if python not in (None, sys.executable) and own[:1] == [b"-m"]:
        os.execv(python, [python, *map(os.fsdecode, own)])
    raise SystemExit(
        f"This python ({sys.executable}) has no torch, so it is not the environment of the"
        " pipeline: run `source .venv/bin/activate` first (`make repro` makes it)"
    )


if sys.argv[:1] == ["-m"]:
    if find_spec("torch") is None:
        hand_over()
    gc.disable()
