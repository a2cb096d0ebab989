"""What stages keep on disk: the knobs of it, and a disk that has no room for it."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from stages.drop_moments import older
from tests.helpers.stage import figures, refuse, succeed
from tests.pipeline.running import content

ONCE = ["prepare_task", "prepare_model", "tokenize_sft", "train_sft", "tokenize_preferences"]
ONCE += ["split_preferences", "train_rm"]
BRANCH = {"branches": {"dpo": "models/sft"}}
TRAININGS = {
    "train_sft": "models/sft",
    "train_rm": "models/rm",
    "train_direct@dpo": "models/direct/dpo",
    "optimize@2": "models/policy/2",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A pipeline in which every training has what it reads. Read only."""
    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "data" / "source").mkdir(parents=True)
    for stage in [*ONCE, "rollout@1", "score@1", "optimize@1", "rollout@2", "score@2"]:
        succeed(folder, stage)
    succeed(folder, "score_pairs@dpo", **BRANCH)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "copy"))


def dtypes(folder: Path) -> set[str]:
    tensors = load_file(folder / "model.safetensors").values()
    return {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}


@pytest.mark.parametrize("stage", TRAININGS)
def test_a_training_stops_before_its_first_step_where_the_disk_is_too_small(
    folder, monkeypatch, stage
):
    kept, curves = content(folder / "models"), content(folder / "data/curves")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10_000))
    said = refuse(folder, stage, **BRANCH)
    assert f"{TRAININGS[stage]}: about 0.0" in said and "but 0.000 GB are free" in said
    assert content(folder / "models") == kept
    assert content(folder / "data/curves") == curves


def test_each_training_keeps_its_weights_in_the_precision_of_its_knob(folder):
    knobs = {f"{section}keep_weights": "bf16" for section in ("", "sft__", "rm__", "direct__")}
    for stage, place in TRAININGS.items():
        succeed(folder, stage, **knobs, **BRANCH)
        assert dtypes(folder / place) == {"bfloat16"}, stage
    assert dtypes(folder / "models/base") == {"float32"}
    moments = load_file(folder / "models/policy/2/trainer/policy.safetensors")
    assert {str(tensor.dtype) for tensor in moments.values()} == {"torch.float32"}
    succeed(folder, "prepare_model", model__keep_weights="bf16")
    assert dtypes(folder / "models/base") == {"bfloat16"}
    succeed(folder, "train_sft")
    assert dtypes(folder / "models/sft") == {"float32"}


def test_a_round_after_one_without_moments_says_so_and_goes_on_counting(folder):
    succeed(folder, "optimize@1", keep_moments="none")
    trainer = folder / "models/policy/1/trainer"
    assert [path.name for path in trainer.iterdir()] == ["state.json"]
    first = json.loads((trainer / "state.json").read_text())
    said = succeed(folder, "optimize@2")
    assert "models/policy/1: no moments were kept; this round starts with fresh ones" in said
    second = json.loads((folder / "models/policy/2/trainer/state.json").read_text())
    assert second["rounds"] == [1, 2] and "moments" not in second
    assert second["step"] == first["step"] + figures(folder, "optimize/2")["steps"]
    assert second["prompt_cursor"] > first["prompt_cursor"]


def test_a_round_with_moments_says_nothing_of_them(folder):
    assert "moments" not in succeed(folder, "optimize@2", keep_moments="bf16")
    kept = load_file(folder / "models/policy/2/trainer/policy.safetensors")
    halves = {name for name, tensor in kept.items() if "bfloat16" in str(tensor.dtype)}
    assert halves == {name for name in kept if not name.endswith("/step")}


def test_a_critic_is_kept_without_its_moments(folder):
    for k, moments in ((1, "none"), (2, "float32")):
        for stage in ("rollout", "score", "optimize"):
            said = succeed(folder, f"{stage}@{k}", loss="ppo", keep_moments=moments)
    assert "fresh ones" in said
    files = {p.name for p in (folder / "models/policy/1/trainer/critic").iterdir()}
    assert "model.safetensors" in files
    assert figures(folder, "score/2")["completions"] > 0


def test_the_newest_rounds_are_those_that_have_run(tmp_path):
    rounds = [str(number) for number in (1, 2, 3, 9, 10, 11)]
    for number in (1, 2, 9, 10):
        (tmp_path / str(number)).mkdir()

    def names(keep: int) -> list[str]:
        return [path.name for path in older(tmp_path, rounds, keep)]

    assert names(0) == ["1", "2", "9", "10"]
    assert names(1) == ["1", "2", "9"]
    assert names(4) == names(7) == []
