"""A training that is cut off goes on where it was, and ends at the bytes of an undisturbed one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from stages.base import command
from stages.base.environment import SAVE_MINUTES, SCRATCH
from stages.base.scratch import save_state
from stages.base.tables import SFT, write_table
from stages.clear_scratch import clear_scratch
from stages.models.recompute import recomputes
from stages.train_direct import train_direct
from stages.train_rm import train_rm
from stages.train_sft import train_sft
from stages.training import saving
from stages.training.supervised import Fit
from tests.helpers.cuts import Cut, cutting
from tests.helpers.models import byte_tokenizer, gpt2
from tests.helpers.tiny import ROOT
from tests.helpers.trainings import COMMANDS, SECTIONS, lay_out, set_knobs, words
from tests.pipeline.running import content

EVERY_STEP = "0.0000001"

STAGES = {"train_sft": train_sft, "train_rm": train_rm, "train_direct": train_direct}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with params.yaml, a model with dropout and rows of every kind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "stop_with_parent", lambda: None)
    monkeypatch.setenv(SAVE_MINUTES, EVERY_STEP)
    monkeypatch.delenv(SCRATCH, raising=False)
    threads = torch.get_num_threads()
    lay_out(tmp_path, gpt2(vocabulary=len(byte_tokenizer()), dropout=0.2))
    yield tmp_path
    torch.set_num_threads(threads)


def run(stage: str, name: str):
    return CliRunner().invoke(STAGES[stage], words(stage, name))


def cut_off(monkeypatch, stage: str, name: str, after: int) -> None:
    """Cut a training off after so many saved states."""
    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_state", cutting(after))
        assert isinstance(run(stage, name).exception, Cut)


LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.3, "targets": "all-linear"}


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_training_cut_off_anywhere_ends_at_the_bytes_of_an_undisturbed_one(
    project, stage, lora, monkeypatch
):
    set_knobs(project, **{f"{section}__lora": lora for section in SECTIONS})
    assert run(stage, "whole").exit_code == 0
    assert not list(project.glob(".scratch/*"))
    for step in (1, 3, 5):
        name = f"cut{step}"
        cut_off(monkeypatch, stage, name, step)
        assert not (project / name / "model").exists()
        result = run(stage, name)
        assert result.exit_code == 0, result.output
        assert f"{stage}: goes on after step {step} (" in result.output
        assert content(project / name) == content(project / "whole")
        assert not list(project.glob(".scratch/*"))


def test_a_training_cut_off_twice_in_a_row_loses_nothing(project, monkeypatch):
    assert run("train_sft", "whole").exit_code == 0
    cut_off(monkeypatch, "train_sft", "cut", 2)
    cut_off(monkeypatch, "train_sft", "cut", 1)
    result = run("train_sft", "cut")
    assert "goes on after step 3" in result.output
    assert content(project / "cut") == content(project / "whole")


def test_at_most_two_states_are_kept(project, monkeypatch):
    cut_off(monkeypatch, "train_sft", "cut", 4)
    found = [path.name for path in project.glob(".scratch/*/step-*")]
    assert sorted(found) == ["step-000000003", "step-000000004"]


def old(folder: Path, days: float) -> Path:
    moment = time.time() - days * 86400
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder, (moment, moment))
    return folder


def test_work_that_nothing_was_written_to_for_two_weeks_goes_and_nothing_else(project, monkeypatch):
    """The scratch may be a folder with other things in it."""
    name = f"optimize-3-{'0a' * 10}"
    stale, fresh = old(project / ".scratch" / name, 15), old(project / ".scratch" / f"b{name}", 13)
    others = [old(project / ".scratch" / name, 99) for name in ("photos", "thesis-2024", name[:-1])]
    cut_off(monkeypatch, "train_sft", "cut", 1)
    assert not stale.exists() and fresh.exists() and all(folder.exists() for folder in others)


def test_one_command_clears_the_scratch_and_nothing_else_in_its_folder(project, monkeypatch):
    assert "nothing to remove" in CliRunner().invoke(clear_scratch).output
    name = f"optimize-3-{'0a' * 10}"
    stale, other = old(project / ".scratch" / name, 3), old(project / ".scratch" / "photos", 3)
    cut_off(monkeypatch, "train_sft", "cut", 2)
    result = CliRunner().invoke(clear_scratch, ["--days", "2"])
    assert result.output == f".scratch/{name}: removed, 0.0 MB, 3.0 days old\n"
    assert not stale.exists() and other.exists() and newest(project)
    assert ": removed, " in CliRunner().invoke(clear_scratch).output
    assert list(project.glob(".scratch/*")) == [other]


def newest(folder: Path) -> Path:
    return max(folder.glob(".scratch/*/step-*"))


def cut_short(path: Path) -> None:
    file = path / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


def one_byte(path: Path) -> None:
    data = bytearray((path / "state.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "state.safetensors").write_bytes(data)


def no_json(path: Path) -> None:
    (path / "about.json").write_text("{")


def other_key(path: Path) -> None:
    file = path / "about.json"
    file.write_text(file.read_text().replace('"key": "', '"key": "0'))


def another_record(path: Path) -> None:
    """A digit of what stands beside the tensors."""
    file = path / "about.json"
    text = file.read_text()
    loss = json.loads(text)["values"]["records"][0]["loss"]
    file.write_text(text.replace(f'"loss": {loss}', f'"loss": 1{loss}', 1))


def another_version(path: Path) -> None:
    """Written by code that knew other names."""
    (path / "about.json").write_text(json.dumps({"version": 3, "step": 7}))


FAULTS = [cut_short, one_byte, no_json, other_key, another_record, another_version]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_state_is_passed_over_for_the_one_before_it(project, monkeypatch, fault):
    assert run("train_sft", "whole").exit_code == 0
    cut_off(monkeypatch, "train_sft", "cut", 4)
    fault(newest(project))
    result = run("train_sft", "cut")
    assert "step-000000004: a saved state that cannot be used" in result.output
    assert "goes on after step 3" in result.output
    assert content(project / "cut") == content(project / "whole")


CHANGED = {
    "a knob": lambda folder: set_knobs(folder, sft__lr=4e-3),
    "an input": lambda folder: set_rows(folder),
    "a model": lambda folder: edit(folder / "models" / "base" / "generation_config.json"),
}


def set_rows(folder: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}] * 8
    write_table(folder / "data" / "sft.parquet", SFT, rows, {})


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "\n")


@pytest.mark.parametrize("change", CHANGED)
def test_other_work_never_goes_on_from_this_one(project, monkeypatch, change):
    cut_off(monkeypatch, "train_sft", "cut", 3)
    CHANGED[change](project)
    result = run("train_sft", "other")
    assert result.exit_code == 0 and "goes on" not in result.output
    # What was cut off is kept until it is stale.
    assert [path.name for path in project.glob(".scratch/*/step-*")]


def test_edited_code_is_other_work(project, monkeypatch):
    cut_off(monkeypatch, "train_sft", "cut", 3)
    copy = project / "steps.py"
    copy.write_text(Path(sys.modules["stages.training.steps"].__file__).read_text() + "# edited\n")
    monkeypatch.setattr(sys.modules["stages.training.steps"], "__file__", str(copy))
    assert "goes on" not in run("train_sft", "cut").output


def test_an_input_that_changes_meanwhile_costs_the_state_not_the_run(project, monkeypatch):
    folder = project / "models" / "base"

    def changing(work, state):
        edit(folder / "generation_config.json")
        save_state(work, state)

    monkeypatch.setattr(saving, "save_state", changing)
    result = run("train_sft", "out")
    assert result.exit_code == 0
    assert "an input changed while it ran; its state is not saved" in result.output
    assert not list(project.glob(".scratch/*"))


def test_a_full_disk_costs_the_state_not_the_run(project, monkeypatch):
    full, usage = type("Usage", (), {"free": 10}), shutil.disk_usage

    def of(path):
        return full if ".scratch" in str(path) else usage(path)

    monkeypatch.setattr("shutil.disk_usage", of)
    result = run("train_sft", "out")
    assert result.exit_code == 0 and "10 bytes are free" in result.output


def test_a_scratch_that_cannot_be_written_costs_the_state_not_the_run(project, monkeypatch):
    (project / "no").write_text("a file where the folder should be")
    monkeypatch.setenv(SCRATCH, str(project / "no"))
    result = run("train_sft", "out")
    assert result.exit_code == 0 and "the state is not saved" in result.output


def test_nothing_is_saved_where_it_is_switched_off_or_too_short(project, monkeypatch):
    for minutes in ("0", "10"):
        monkeypatch.setenv(SAVE_MINUTES, minutes)
        monkeypatch.setattr(saving, "save_state", None)
        assert run("train_sft", "out").exit_code == 0
    assert not list(project.glob(".scratch*"))


@pytest.mark.parametrize("text", ["ten", "-1", "nan", "inf"])
def test_minutes_that_are_none_are_refused(project, monkeypatch, text):
    monkeypatch.setenv(SAVE_MINUTES, text)
    result = run("train_sft", "out")
    assert result.exit_code == 1 and f"{SAVE_MINUTES}: found {text!r}" in result.output


def test_the_scratch_can_lie_elsewhere_and_be_found_from_another_folder(
    project, monkeypatch, tmp_path_factory
):
    elsewhere = tmp_path_factory.mktemp("scratch")
    monkeypatch.setenv(SCRATCH, str(elsewhere))
    cut_off(monkeypatch, "train_sft", "cut", 3)
    assert list(elsewhere.glob("train_sft-*/step-*")) and not (project / ".scratch").exists()
    other = tmp_path_factory.mktemp("other")
    for name in ("data", "models", "params.yaml"):
        (project / name).rename(other / name)
    monkeypatch.chdir(other)
    assert "goes on after step 3" in run("train_sft", "cut").output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_saves_and_ends_the_stage_and_the_same_command_goes_on(project, number):
    """SIGKILL cannot be heard: there the state saved last counts."""
    set_knobs(project, sft__epochs=200)
    assert run("train_sft", "whole").exit_code == 0
    minutes = EVERY_STEP if number == signal.SIGKILL else "10"
    environment = os.environ | {SAVE_MINUTES: minutes, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "stages.train_sft", *words("train_sft", "cut")]
    process = subprocess.Popen(line, env=environment, text=True, stderr=subprocess.PIPE)
    curve = project / "cut" / "curve.csv"
    while not (curve.exists() and curve.read_text().count("\n") > 3):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=30) == (-9 if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in process.stderr.read()
    assert not (project / "cut" / "model").exists()
    done = subprocess.run(line, env=environment, text=True, capture_output=True)
    assert done.returncode == 0 and "goes on after step" in done.stdout, done.stderr
    assert content(project / "cut") == content(project / "whole")


@pytest.mark.parametrize("stage", COMMANDS)
def test_micro_batches_hold_no_more_tokens_than_the_knob_says(project, monkeypatch, stage):
    trained, limit = [], 24
    monkeypatch.setattr(Fit, "run", lambda fit, *_: trained.append(fit) or [])
    set_knobs(project, train_max_tokens=limit, **{f"{s}__train_batch_size": 8 for s in SECTIONS})
    run(stage, "asked")
    (fit,) = trained
    sides = 1 if stage == "train_sft" else 2
    batches = [batch for step in fit.plan() for batch in step]
    sizes = [sides * len(batch) * max(fit.lengths[row] for row in batch) for batch in batches]
    assert max(sizes) <= limit and max(map(len, batches)) > 1


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("stage", COMMANDS)
def test_layers_are_computed_anew_where_the_knob_says_so(project, monkeypatch, stage, asked):
    trained = []
    monkeypatch.setattr(Fit, "run", lambda fit, *_: trained.append(fit.model) or [])
    set_knobs(project, gradient_checkpointing=asked)
    run(stage, "asked")
    assert [recomputes(model.base_model) for model in trained] == [asked]
