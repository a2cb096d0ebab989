"""SIGKILL at random moments: nothing half written is ever taken for a result, and no orphan writes.

Two halves of the pipeline run side by side. Each stage that writes a model or a table is killed
twice, once while it writes and once at any moment; the stage itself, DVC and the group of both take
turns. What is asked for after each kill stands in `survive`.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from random import Random
from textwrap import dedent

import pytest

from tests.helpers.clone import ENVIRONMENT
from tests.helpers.tiny import plain, write
from tests.pipeline.running import ALL, content, duplicate, dvc, lock_entries, outputs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel"),
]

# Stages in their order, and one that reads what each of them writes.
HALVES = [
    {
        "prepare_model": "tokenize_sft",
        "tokenize_sft": "train_sft",
        "train_sft": "evaluate_sft",
        "tokenize_preferences": "split_preferences",
        "split_preferences": "train_rm",
        "train_rm": "score@1",
    },
    {
        "rollout@1": "score@1",
        "score@1": "optimize@1",
        "optimize@1": "evaluate@1",
        "evaluate@1": "report",
        "evaluate_sft": "report",
    },
]

# Writing a tiny model takes milliseconds; on this disk it takes long enough to be hit.
FLUSH = 0.1
TRIES = 4
SLOW_DISK = f"""
    import os, time

    def fsync(file, really=os.fsync):
        time.sleep({FLUSH})
        really(file)

    os.fsync = fsync
"""


def test_no_kill_at_any_moment_leaves_anything_that_is_taken_for_a_result(first, tmp_path):
    reference, _ = first
    (tmp_path / "sitecustomize.py").write_text(dedent(SLOW_DISK))
    with ThreadPoolExecutor() as pool:
        halves = [
            pool.submit(survive, reference, tmp_path / str(number), half, Random(number))
            for number, half in enumerate(HALVES)
        ]
        kills = sum(half.result() for half in halves)
    print(f"{kills} kills survived")
    assert kills >= 20


def survive(reference: Path, folder: Path, stages: dict[str, str], random: Random) -> int:
    """Kill each stage twice on the way to the undisturbed hashes; the number of kills."""
    duplicate(reference, folder)
    forget(folder, ALL if "prepare_model" in stages else ALL - HALVES[0].keys() - {"prepare_task"})
    targets, kills = cycle(["stage", "dvc", "group"]), 0
    for stage, reader in stages.items():
        seconds = None
        for _ in range(TRIES):
            seconds = seconds or kill(folder, reference, stage, next(targets), random)
        assert seconds, f"{stage} came to its end {TRIES} times"
        moment = random.uniform(0, seconds)
        hit = kill(folder, reference, stage, next(targets), random, moment)
        kills += 2 if hit else 1
        nothing_half_is_accepted(folder, reference, stage, reader)
    dvc(folder, "repro", *stages)
    undisturbed, now = lock_entries(reference), lock_entries(folder)
    assert {name: now[name] for name in stages} == {name: undisturbed[name] for name in stages}
    return kills


def forget(folder: Path, stages: set[str]) -> None:
    """Make a repository one in which these stages have never run."""
    document = plain(folder / "dvc.lock")
    for stage in stages:
        for path in outputs(folder, stage):
            remove = ["rm", "-rf", path]
            subprocess.run(remove, cwd=folder, check=True)
    for stage in stages:
        del document["stages"][stage]
    write(folder / "dvc.lock", document)
    subprocess.run(["rm", "-rf", ".dvc/cache/runs"], cwd=folder, check=True)


def kill(folder, reference, stage, target, random, delay=None) -> float | None:
    """Run a stage and kill it `delay` seconds after its start, or while it writes.

    Returns the seconds that it lived, None where it came to its end first.
    """
    log = folder.with_suffix(".log")
    environment = ENVIRONMENT | {"PYTHONPATH": str(folder.parent), "PYTHONHASHSEED": "1"}
    again = ["--force", "--single-item"] if stage in lock_entries(folder) else []
    command = ["dvc", "repro", *again, stage]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        wait_until(lambda: f"Running stage '{stage}'" in log.read_text(), process, log)
        victims = []
        wait_until(lambda: victims.extend(running(folder, stage)) or victims, process, log)
        started = time.monotonic()
        if delay is None:
            wait_until(lambda: writes(folder, reference, stage), process, log, pause=0.0005)
            time.sleep(random.uniform(0, 2 * FLUSH))
        else:
            time.sleep(delay)
        lived = time.monotonic() - started
        end = {"stage": (os.kill, victims[0]), "dvc": (os.kill, process.pid)}
        function, pid = end.get(target, (os.killpg, process.pid))
        function(pid, signal.SIGKILL)
    except ProcessLookupError:
        lived = None
    killed = process.wait(60) != 0
    wait_until(lambda: not running(folder, "stages."), None, log)
    for path in outputs(reference, stage):
        assert content(folder / path) in (None, content(reference / path)), (path, target, delay)
    return lived if killed else None


def wait_until(condition, process, log, pause=0.01, seconds=120):
    """Poll a condition; ProcessLookupError where the process ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            raise ProcessLookupError
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(pause)


def writes(folder: Path, reference: Path, stage: str) -> bool:
    """Whether a stage is writing one of its outputs."""
    paths = map(Path, outputs(reference, stage))
    return any((folder / p.parent / f".{p.name}.partial").exists() for p in paths)


def running(folder: Path, stage: str) -> list[int]:
    """Processes in a folder that run a stage (not DVC, which names it too)."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            inside = (process / "cwd").resolve() == folder
        except OSError:
            continue
        script = stage.split("@")[0].replace("evaluate_sft", "evaluate")
        if inside and b"-m" in words and any(script.encode() in word for word in words):
            found.append(int(process.name))
    return found


def nothing_half_is_accepted(folder, reference, stage, reader) -> None:
    """Neither the next stage alone nor a forced commit takes what a killed stage left."""
    whole = all((folder / path).exists() for path in outputs(reference, stage))
    done = [
        dvc(folder, "repro", "--single-item", reader, check=False),
        dvc(folder, "commit", "--force", stage, check=False),
    ]
    for answer in done if not whole else []:
        assert answer.returncode != 0, answer.stdout
    undisturbed, now = lock_entries(reference), lock_entries(folder)
    for name in (stage, reader):
        assert now.get(name) in (None, undisturbed[name]), name
    for path in outputs(reference, reader):
        assert content(folder / path) in (None, content(reference / path)), path
