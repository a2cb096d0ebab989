"""Memory of a whole stage, as the operating system counts it."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.tiny import ROOT, command_line, small_params, write


def peak_of(folder, stage: str, **knobs) -> int:
    """Run a stage as DVC does; the most memory that one of its processes held at once, in KiB.

    There are as many as cores and one, whatever the rows, and the largest counts.
    """
    script, options = command_line(stage)
    write(folder / "params.yaml", small_params(**knobs))
    words = [word for pair in options.items() for word in pair]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    command = [sys.executable, "-m", f"stages.{script}", *words]
    child = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    assert status == 0
    return usage.ru_maxrss


def source(folder, row, count: int) -> str:
    path = folder / "data" / "source" / "rows.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps(row(number)) + "\n")
    return "data/source/rows.jsonl"


ROWS = {
    "tokenize_sft": lambda i: {"prompt": f"{i} {'q' * 40}", "completion": "a" * 80},
    "tokenize_preferences": lambda i: {"prompt": f"{i}", "chosen": "a" * 80, "rejected": "b" * 60},
}
SECTIONS = {"tokenize_sft": "sft", "tokenize_preferences": "preferences"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="KiB of ru_maxrss are Linux's")
@pytest.mark.parametrize("stage", ROWS)
def test_a03_tokenizing_ten_times_the_rows_takes_as_much_memory(tmp_path, stage):
    peak_of(tmp_path, "prepare_model")
    peaks = []
    for count in (10_000, 100_000):
        dataset = source(tmp_path, ROWS[stage], count)
        peaks.append(peak_of(tmp_path, stage, **{f"{SECTIONS[stage]}__dataset": dataset}))
    assert peaks[1] < 1.1 * peaks[0], peaks
