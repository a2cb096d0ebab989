"""Stages that go row by row go on after the rows that are done, to the same bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from stages.base import kept, scratch
from stages.base.environment import SAVE_MINUTES
from stages.base.kept import Kept
from stages.base.scratch import Work
from stages.base.tables import BUFFERS, exact
from tests.helpers.cuts import Cut, cutting
from tests.helpers.long_stages import (
    BY_ROWS,
    CHANGES,
    RULE,
    alone,
    copy,
    make,
    run,
    set_knobs,
    words,
)
from tests.helpers.tiny import ROOT
from tests.pipeline.running import content

EVERY_BATCH = "0.0000001"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"))


@pytest.fixture
def project(made, tmp_path, monkeypatch):
    """A copy of that folder to work in, where every batch is written as it comes."""
    folder = copy(made, tmp_path / "run")
    threads = torch.get_num_threads()
    alone(monkeypatch, folder)
    monkeypatch.setenv(SAVE_MINUTES, EVERY_BATCH)
    yield folder
    torch.set_num_threads(threads)


def cut_off(monkeypatch, stage: str, name: str, after: int) -> None:
    """Cut a stage off after so many batches are written."""
    with monkeypatch.context() as patch:
        patch.setattr(kept, "write_part", cutting(after, kept.write_part))
        assert isinstance(run(stage, name).exception, Cut)


def counted(monkeypatch) -> list[str]:
    """The names of the parts that are written from now on."""
    names = []

    def write_part(work, name, *rest):
        names.append(name)
        return scratch.write_part(work, name, *rest)

    monkeypatch.setattr(kept, "write_part", write_part)
    return names


@pytest.mark.parametrize("stage", BY_ROWS)
def test_a_stage_cut_off_after_any_batch_ends_at_the_bytes_of_an_undisturbed_one(
    project, monkeypatch, stage
):
    monkeypatch.setenv(SAVE_MINUTES, "0")
    assert run(stage, "off").exit_code == 0
    monkeypatch.setenv(SAVE_MINUTES, EVERY_BATCH)
    names = counted(monkeypatch)
    result = run(stage, "whole")
    assert result.exit_code == 0, result.output
    whole = list(names)
    assert len(whole) >= 4 and "goes on" not in result.output
    assert content(project / "whole") == content(project / "off")
    for after in (1, len(whole) // 2, len(whole)):
        cut_off(monkeypatch, stage, f"cut{after}", after)
        assert not list((project / f"cut{after}").glob("*.json"))
        names.clear()
        result = run(stage, f"cut{after}")
        assert result.exit_code == 0, result.output
        assert ": goes on after batch" in result.output
        assert names == whole[after:]
        assert content(project / f"cut{after}") == content(project / "whole")
        assert not list(project.glob(".scratch/*"))


def test_dynamic_sampling_goes_on_with_its_cursor_and_its_counts(project, monkeypatch):
    assert run("rollout", "whole").exit_code == 0
    figures = json.loads((project / "whole" / "figures.json").read_text())
    assert figures["groups_dropped"] > 2 and figures["groups_kept"] == 7
    cut_off(monkeypatch, "rollout", "cut", 3)
    result = run("rollout", "cut")
    assert "rollout-1: goes on after batch 3 of rows (0.0 min saved)" in result.output
    assert content(project / "cut") == content(project / "whole")


def test_score_keeps_what_each_model_measured(project, monkeypatch):
    assert run("score", "whole").exit_code == 0
    total = len(counted_batches(project))
    cut_off(monkeypatch, "score", "cut", total + 2)
    result = run("score", "cut")
    assert f"score-out: goes on after batch {total} of reward model (" in result.output
    assert "score-out: goes on after batch 2 of reference (" in result.output
    assert content(project / "cut") == content(project / "whole")


def counted_batches(project: Path) -> range:
    rows = json.loads((project / "whole" / "figures.json").read_text())["completions"]
    return range(-(-rows // CHANGES["score_batch_size"]))


def test_a_stage_cut_off_three_times_in_a_row_loses_nothing(project, monkeypatch):
    assert run("rollout", "whole").exit_code == 0
    for after in (2, 1, 1):
        cut_off(monkeypatch, "rollout", "cut", after)
    assert "goes on after batch 4 of rows" in run("rollout", "cut").output
    assert content(project / "cut") == content(project / "whole")


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob(".scratch/*/*"))


def cut_short(path: Path) -> None:
    file = path / "rows.arrow"
    file.write_bytes(file.read_bytes()[:-9])


def one_byte(path: Path) -> None:
    file = path / "rows.arrow"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def other_count(path: Path) -> None:
    """What a change of the plain values would do: a cursor that is one too high."""
    file = path / "about.json"
    text = file.read_text()
    cursor = json.loads(text)["values"]["batches"][-1]["cursor"]
    file.write_text(text.replace(f'"cursor": {cursor}', f'"cursor": {cursor + 1}'))


def other_key(path: Path) -> None:
    file = path / "about.json"
    file.write_text(file.read_text().replace('"key": "', '"key": "0'))


def another_version(path: Path) -> None:
    """Written by code that knew other names."""
    (path / "about.json").write_text(json.dumps({"version": 3, "rows": 7}))


def no_file(path: Path) -> None:
    (path / "rows.arrow").unlink()


def missing(path: Path) -> None:
    shutil.rmtree(path)


FAULTS = [cut_short, one_byte, other_count, other_key, another_version, no_file, missing]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", [0, 2, 3])
def test_from_a_damaged_part_on_the_rows_are_made_anew(project, monkeypatch, fault, place):
    assert run("rollout", "whole").exit_code == 0
    cut_off(monkeypatch, "rollout", "cut", 4)
    assert len(parts(project)) == 4
    fault(parts(project)[place])
    result = run("rollout", "cut")
    assert result.exit_code == 0, result.output
    told = f"rows-{place:09d}: a saved state that cannot be used" in result.output
    assert told == (fault is not missing)
    gone_on = f"goes on after batch {place} of rows" in result.output
    assert gone_on == (place > 0)
    assert content(project / "cut") == content(project / "whole")
    assert not parts(project)


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "\n")


def another_prompt(folder: Path) -> None:
    file = folder / "task" / "prompts.jsonl"
    file.write_text(file.read_text().replace("hello", "hallo"))


CHANGED = {
    "a knob": lambda folder: set_knobs(folder, temperature=1.1),
    "a prompt": another_prompt,
    "the verifier": lambda folder: edit(folder / "data" / "source" / "odd_rule.py"),
    "the model": lambda folder: edit(folder / "models" / "sft" / "generation_config.json"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_other_work_never_goes_on_from_these_rows(project, monkeypatch, change):
    cut_off(monkeypatch, "rollout", "cut", 3)
    CHANGED[change](project)
    result = run("rollout", "other")
    assert result.exit_code == 0 and "goes on" not in result.output
    assert len(parts(project)) == 3


def test_byte_code_beside_a_verifier_is_no_input(project, monkeypatch):
    cut_off(monkeypatch, "rollout", "cut", 3)
    cache = project / "data" / "source" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "odd_rule.cpython-399.pyc").write_bytes(b"other")
    assert "goes on after batch 3" in run("rollout", "cut").output


def test_rows_from_the_hub_are_not_kept_by_the_tokenizing_stages(project, monkeypatch):
    """Nothing on this disk says that they are the same rows the next time."""
    monkeypatch.setattr("stages.tokenize_sft.files_of_source", lambda *_: [])
    monkeypatch.setattr(kept, "write_part", None)
    assert run("tokenize_sft", "out").exit_code == 0


@pytest.mark.parametrize("stage", BY_ROWS)
def test_nothing_is_written_where_it_is_switched_off_or_too_short(project, monkeypatch, stage):
    monkeypatch.setattr(kept, "write_part", None)
    for minutes in ("0", "10"):
        monkeypatch.setenv(SAVE_MINUTES, minutes)
        assert run(stage, "out").exit_code == 0
    assert not list(project.glob(".scratch*"))


def test_what_waits_in_memory_is_written_before_it_grows_large(project, monkeypatch):
    monkeypatch.setenv(SAVE_MINUTES, "10")
    names = counted(monkeypatch)
    monkeypatch.setattr(kept, "WAITING", 3000)
    assert run("rollout", "out").exit_code == 0
    assert 0 < len(names) < 5


def test_a_full_disk_costs_the_scratch_not_the_run(project, monkeypatch):
    assert run("rollout", "whole").exit_code == 0
    free = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    names = counted(monkeypatch)
    result = run("rollout", "out")
    assert result.exit_code == 0 and result.output.count("10 bytes are free") == 1
    assert names == ["rows-000000000"]
    assert content(project / "out") == content(project / "whole")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_scratch_without_rights_costs_the_scratch_not_the_run(project, monkeypatch):
    cut_off(monkeypatch, "rollout", "cut", 3)
    for part in [*parts(project), project / ".scratch"]:
        part.chmod(0)
    try:
        result = run("rollout", "cut")
        assert result.exit_code == 0 and "goes on" not in result.output
    finally:
        (project / ".scratch").chmod(0o700)
        for part in parts(project):
            part.chmod(0o700)


def test_a_scratch_that_refuses_everything_costs_the_scratch_not_the_run(project, monkeypatch):
    """As a folder without rights does, also for root."""
    assert run("rollout", "whole").exit_code == 0
    cut_off(monkeypatch, "rollout", "cut", 3)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    for name in ("remove", "replacing", "_digest_of_part"):
        monkeypatch.setattr(scratch, name, refuse)
    result = run("rollout", "cut")
    assert result.exit_code == 0, result.output
    assert "rows-000000000: a saved state that cannot be used" in result.output
    assert "Permission denied" in result.output
    assert content(project / "cut") == content(project / "whole")


def test_rows_come_back_as_they_were_to_the_last_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SAVE_MINUTES, EVERY_BATCH)
    fields = ("reward_correctness", "log_probs_old", "completion", "finished", "values_old")
    schema = pa.schema([BUFFERS.field(name) for name in fields])
    odd = [0.1, 1 / 3, -0.0, 1e-320, float("inf")]
    texts = ["", "é\n\0", "😀", "a", "b"]
    rows = [
        dict(zip(fields, (x, odd[:i], texts[i], i > 2, None if i else odd), strict=True))
        for i, x in enumerate(odd)
    ]
    assert exact(schema).field("log_probs_old").type.value_type == pa.float64()

    def rest(done, last):
        assert (done, last) == (len(found), {"done": len(found)} if found else None)
        for number in range(done, 3):
            yield rows[number:], {"done": number + 1}

    for found in ([], [0, 1]):
        stream = Kept(Work("stage", [], {})).rows("rows", schema, rest)
        got = [batch for batch, _ in (next(stream) for _ in range(3 if found else 2))]
    assert repr(got) == repr([rows, rows[1:], rows[2:]])


# The 21st answer is not judged until a file is there.
WAITING_RULE = """
import os, time

quick, calls = share, []

def share(*arguments):
    calls.append(1)
    while len(calls) > 20 and not os.path.exists("go"):
        open("waits", "w").close()
        time.sleep(0.01)
    return quick(*arguments)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_midst_of_a_batch_keeps_the_batches_before_it(project, number):
    """The end comes at once, not with the batch, and no interval has passed."""
    (project / "data" / "source" / "odd_rule.py").write_text(RULE + WAITING_RULE)
    environment = os.environ | {SAVE_MINUTES: "10", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "stages.rollout"]
    process = subprocess.Popen(
        [*line, *words("rollout", "cut")], env=environment, text=True, stderr=subprocess.PIPE
    )
    while not (project / "waits").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=20) == 128 + number
    assert "Traceback" not in process.stderr.read()
    (project / "go").touch()
    results = []
    for name in ("cut", "whole"):
        results.append(
            subprocess.run(
                [*line, *words("rollout", name)], env=environment, text=True, capture_output=True
            )
        )
        assert results[-1].returncode == 0, results[-1].stderr
    told = [": goes on after batch 3 of rows" in result.stdout for result in results]
    assert told == [True, False]
    assert content(project / "cut") == content(project / "whole")
