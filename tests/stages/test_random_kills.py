"""Every long stage killed at random moments: it ends at the bytes of an undisturbed run.

`--kills 60` makes sixty runs, and at other moments than another number of them. They take turns:
SIGKILL, SIGTERM, SIGINT; at any moment, or while the scratch is written to; once, or twice in a
row.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random

import pytest

from stages.base.environment import SAVE_MINUTES, SCRATCH
from tests.helpers.long_stages import STAGES, copy, make, set_knobs, words
from tests.helpers.tiny import ROOT
from tests.pipeline.running import content

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks stages off a process"),
]

INTERVAL, PAUSE = 0.2, 0.03  # seconds
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
SPARSE = {"sft__epochs": 8, "rm__epochs": 6, "direct__epochs": 6, "ppo_epochs": 4}


@dataclass
class Nursery:
    """The process that stages are forked off."""

    process: subprocess.Popen

    def start(self, folder: Path, stage: str, pause: float) -> int:
        line = {"folder": str(folder), "log": str(folder / "log"), "stage": stage}
        line |= {"words": words(stage, "out"), "pause": pause}
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def status(self) -> int:
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def nursery():
    """The environment of the stages: an interval that is short, the scratch in their folder."""
    environment = os.environ | {SAVE_MINUTES: str(INTERVAL / 60), "PYTHONPATH": str(ROOT)}
    environment.pop(SCRATCH, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.nursery"],
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    yield Nursery(process)
    process.stdin.close()
    assert process.wait(30) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = make(tmp_path_factory.mktemp("made"))
    set_knobs(folder, **SPARSE)
    return folder


@dataclass
class Life:
    """What one run of a stage left: its notes, what it printed, how it ended."""

    folder: Path
    status: int
    notes: list[tuple[float, str]] = field(default_factory=list)
    printed: str = ""

    def __post_init__(self):
        lines = [line.split() for line in (self.folder / "notes").read_text().splitlines()]
        self.notes = [(float(moment), what) for moment, what in lines]
        self.printed = (self.folder / "log").read_text()
        (self.folder / "notes").unlink()
        (self.folder / "log").unlink()

    @property
    def units(self) -> int:
        """Steps or batches that it finished."""
        return sum(what == "unit" for _, what in self.notes)

    @property
    def gone_on_after(self) -> int:
        """Steps or batches that it found done."""
        found = re.findall(r"goes on after (?:step|batch) (\d+)", self.printed)
        return sum(map(int, found))

    def unsaved(self) -> tuple[float, float]:
        """Seconds of finished work that the scratch does not hold, and of the last step of it."""
        begun = [i for i, (_, what) in enumerate(self.notes) if what != "unit"][-1]
        moments = [moment for moment, _ in self.notes[begun:]]
        return moments[-1] - moments[0], moments[-1] - moments[-2:][0]


def one_life(nursery, folder: Path, stage: str, number=None, moment=0.0, saving=False) -> Life:
    """Run a stage; where a signal is given it comes after so many seconds, or amid a save."""
    (folder / "log").touch()
    (folder / "notes").write_text(f"{time.monotonic()} start\n")
    process = nursery.start(folder, stage, PAUSE if number else 0.0)
    if number:
        time.sleep(moment)
        deadline = time.monotonic() + 2
        while saving and time.monotonic() < deadline and alive(process):
            if list(folder.glob(".scratch/*/.*.partial")):
                break
            time.sleep(0.001)
        if alive(process):
            os.kill(process, number)
    return Life(folder, nursery.status())


def alive(process: int) -> bool:
    """Whether a process runs; one that has ended is reaped by the nursery, or waits for it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def undisturbed(nursery, made, tmp_path_factory):
    """Stage -> the bytes of its outputs, and the seconds that a run with pauses takes."""
    found = {}
    for stage in STAGES:
        folder = copy(made, tmp_path_factory.mktemp(stage) / "run")
        life = one_life(nursery, folder, stage)
        assert life.status == 0, life.printed
        found[stage] = content(folder / "out"), 0.2 + 1.5 * PAUSE * life.units
    return found


def test_a_stage_killed_anywhere_goes_on_and_ends_at_the_same_bytes(
    nursery, made, undisturbed, tmp_path, request
):
    kills, hits, amid, repeated = request.config.getoption("--kills"), 0, 0, 0.0
    kinds, random = list(product(SIGNALS, (False, True))), Random(kills)
    for number in range(kills):
        stage = list(STAGES)[number % len(STAGES)]
        kind, saving = kinds[(number + number // len(STAGES)) % len(kinds)]
        folder = copy(made, tmp_path / str(number))
        wanted, seconds = undisturbed[stage]
        kept = 0
        for _ in range(2 if number % 4 == 3 else 1):
            moment = random.uniform(0, seconds / 2 if saving else seconds)
            life = one_life(nursery, folder, stage, kind, moment, saving)
            hits, amid = hits + (life.status != 0), amid + (life.status != 0 and saving)
            kept = check(life, kept, kind)
            repeated = max(repeated, life.unsaved()[0] if life.status < 0 else 0.0)
        life = one_life(nursery, folder, stage)
        assert life.status == 0, life.printed
        assert kept is None or life.gone_on_after >= kept - 1, life.printed
        assert content(folder / "out") == wanted, (stage, kind, saving)
        assert not list(folder.glob(".scratch/*"))
    print(f"{hits} kills in {kills} runs, {amid} of them once a save was under way")
    print(f"an interval of {INTERVAL} s; at most {repeated:.2f} s of finished work done again")
    assert hits > 0.6 * kills


def check(life: Life, kept: int | None, kind: signal.Signals) -> int | None:
    """That a killed run lost what it may lose; the steps or batches that are kept now, at least.

    None where the outputs were written already. One more may have been noted and not kept.
    """
    assert life.status in (0, 1, -kind, 128 + kind) and "Traceback" not in life.printed
    if kept is None or any(what == "done" for _, what in life.notes):
        return None
    if life.units:
        assert life.gone_on_after >= kept - 1, life.printed
    if life.status == 128 + kind:
        return life.gone_on_after + life.units
    lost, last = life.unsaved()
    assert lost <= INTERVAL + last
    return kept
