"""Stages under LoRA, each by its command line: what is kept, what loads it, what is refused."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from accelerate.state import AcceleratorState
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages import score
from stages.base.bases import base_of
from stages.merge import merge_adapters
from stages.models.adapters import adapter_weights
from stages.models.checkpoints import load_policy, load_scorer
from stages.viewer.models import describe
from tests.helpers.stage import figures, refuse, succeed
from tests.pipeline.running import content

LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.1, "targets": "all-linear"}
EVERYWHERE = {key: LORA for key in ("lora", "sft__lora", "rm__lora", "direct__lora")}
ROWS = ["prepare_task", "prepare_model", "tokenize_sft", "tokenize_preferences"]
ROWS += ["split_preferences"]
ROUND = ("rollout", "score", "optimize", "evaluate")
CPU = torch.device("cpu")
BRANCH = {"branches": {"dpo": "models/sft"}}
DIRECT = ("score_pairs@dpo", "train_direct@dpo", "evaluate_direct@dpo")


def made(tmp_path_factory, stages, **knobs) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "data" / "source").mkdir(parents=True)
    for stage in [*ROWS, *stages]:
        succeed(folder, stage, **knobs)
    return folder


@pytest.fixture(scope="module")
def by_rounds(tmp_path_factory):
    """SFT and reward model whole, two rounds by adapters."""
    stages = ["train_sft", "train_rm", *(f"{s}@{k}" for k in (1, 2) for s in ROUND)]
    return made(tmp_path_factory, stages, lora=LORA)


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory):
    """Every training by adapters, the rounds by PPO."""
    stages = ["train_sft", "evaluate_sft", "train_rm"]
    stages += [f"{s}@{k}" for k in (1, 2) for s in ROUND]
    folder = made(tmp_path_factory, stages, loss="ppo", **EVERYWHERE)
    for stage in DIRECT:
        succeed(folder, stage, loss="ppo", **EVERYWHERE, **BRANCH)
    return folder


def read_rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def files_of(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix == ".safetensors"}


def test_a_round_keeps_adapters_and_their_moments_alone(by_rounds):
    for k in (1, 2):
        policy = by_rounds / f"models/policy/{k}"
        assert files_of(policy) == {"adapter_model.safetensors", "trainer/policy.safetensors"}
        moments = load_file(policy / "trainer" / "policy.safetensors")
        assert moments and all(".lora_" in name for name in moments)


def test_adapters_switched_off_are_the_reference_to_the_last_bit(by_rounds, monkeypatch):
    from peft import AutoPeftModelForCausalLM

    monkeypatch.chdir(by_rounds)
    ids = torch.tensor([[5, 6, 7, 8]])
    policy = AutoPeftModelForCausalLM.from_pretrained("models/policy/2").eval()
    reference = AutoModelForCausalLM.from_pretrained("models/sft").eval()
    with torch.no_grad():
        wanted = reference(input_ids=ids).logits
        assert not torch.equal(policy(input_ids=ids).logits, wanted)
        with policy.disable_adapter():
            assert torch.equal(policy(input_ids=ids).logits, wanted)


def test_what_a_round_answers_with_is_what_it_trained(by_rounds):
    """The old log-probs of round 2 are those of round 1's adapters: no KL at its start."""
    assert figures(by_rounds, "optimize/2")["ratio_max"] == pytest.approx(1.0, abs=0.05)
    first = (by_rounds / "data/curves/optimize/2.csv").read_text().splitlines()
    step = dict(zip(first[0].split(","), first[1].split(","), strict=True))
    assert float(step["kl"]) == pytest.approx(0.0, abs=1e-8)


def test_every_training_by_adapters_keeps_to_one_base(everywhere, monkeypatch):
    monkeypatch.chdir(everywhere)
    adapters = ["models/sft", "models/rm", "models/direct/dpo", "models/policy/1"]
    adapters += ["models/policy/2", "models/policy/2/trainer/critic"]
    for name in adapters:
        assert base_of(Path(name)) == Path("models/base"), name
        assert not Path(name, "model.safetensors").exists()
    critic = load_scorer(Path("models/policy/2/trainer/critic"), "sdpa", CPU)
    before = load_scorer(Path("models/policy/1/trainer/critic"), "sdpa", CPU)
    for name, weight in adapter_weights(before).items():
        assert not torch.equal(weight, adapter_weights(critic)[name]), name


@pytest.mark.parametrize("stage", ["train_sft", "train_rm", "optimize@2"])
def test_the_same_training_writes_the_same_bytes_twice(everywhere, tmp_path, stage):
    folder = tmp_path / "copy"
    shutil.copytree(everywhere, folder)
    succeed(folder, stage, loss="ppo", **EVERYWHERE)
    assert content(folder / "models") == content(everywhere / "models")


def test_a_merged_policy_loads_without_adapters_and_answers_alike(everywhere, monkeypatch):
    monkeypatch.chdir(everywhere)
    result = CliRunner().invoke(merge_adapters, ["models/policy/2", "merged"])
    assert result.exit_code == 0, result.output
    again = CliRunner().invoke(merge_adapters, ["models/policy/2", "merged"])
    assert again.exit_code == 1 and "merged: is there already" in again.output
    whole = CliRunner().invoke(merge_adapters, ["merged", "again"])
    assert whole.exit_code == 1 and "no adapter_config.json" in whole.output
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained("merged").eval()(input_ids=ids).logits
        wanted = load_policy(Path("models/policy/2"), "sdpa", CPU)(input_ids=ids).logits
    assert torch.allclose(plain, wanted, atol=1e-4)
    scorer = CliRunner().invoke(merge_adapters, ["models/rm", "merged_rm", "--scorer"])
    assert scorer.exit_code == 0, scorer.output
    assert load_scorer(Path("merged_rm"), "sdpa", CPU).score.weight.any()


def test_the_viewer_says_what_the_adapters_are(by_rounds, monkeypatch):
    monkeypatch.chdir(by_rounds)
    told = describe(Path("models/policy/2"))
    assert told["base"] == "models/sft"
    assert told["adapters"].startswith("LoRA of rank 2, alpha 4.0, on down_proj, gate_proj")
    assert told["architecture"] == "LlamaForCausalLM"
    tensors = load_file("models/policy/2/adapter_model.safetensors").values()
    assert told["parameters"] == f"{sum(t.numel() for t in tensors):,} F32"


def test_a_round_by_adapters_after_a_whole_one_is_refused_and_the_reverse(by_rounds, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(by_rounds, folder)
    said = refuse(folder, "optimize@2")
    assert "lora: is null, but models/policy/1 was trained by adapters" in said
    succeed(folder, "optimize@1")
    said = refuse(folder, "optimize@2", lora=LORA)
    assert "lora: is set, but models/policy/1 was trained whole" in said


def test_whole_rounds_start_from_adapters_of_sft_by_a_merged_copy(everywhere, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(everywhere, folder)
    before = content(folder / "models/sft")
    succeed(folder, "optimize@1", loss="grpo")
    assert "model.safetensors" in files_of(folder / "models/policy/1")
    assert content(folder / "models/sft") == before


@pytest.fixture(scope="module")
def scored_by_adapters(tmp_path_factory):
    """SFT whole, the reward model by adapters on it, and a rollout to be scored. Read only."""
    stages = ["train_sft", "train_rm", "rollout@1"]
    return made(tmp_path_factory, stages, rm__lora=LORA, critic="reward_model")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_reference_and_reward_model_are_one_model_that_gives_the_bits_of_two(
    scored_by_adapters, tmp_path, monkeypatch, precision, attention
):
    folder = tmp_path / "copy"
    shutil.copytree(scored_by_adapters, folder)
    knobs = {"rm__lora": LORA, "critic": "reward_model", "precision": precision}
    knobs |= {"attention": attention}
    AcceleratorState._reset_state(True)  # it keeps the precision of the test before
    calls = []
    load = score.load_policy
    monkeypatch.setattr(score, "load_policy", lambda *a: calls.append(a[0]) or load(*a))
    with monkeypatch.context() as alone:
        alone.setattr(score, "load_scorer", None)  # is not called
        succeed(folder, "score@1", **knobs)
    together = read_rows(folder / "data/buffers/round-1.parquet")
    assert calls == [Path("models/sft")]
    monkeypatch.setattr(score, "base_of", lambda path: None)
    succeed(folder, "score@1", **knobs)
    apart = read_rows(folder / "data/buffers/round-1.parquet")
    assert together == apart
    assert len({row["reward_model"] for row in apart}) > 1
    assert all(row["log_probs_ref"] and row["values_old"] for row in apart)
    pairs = [(row["log_probs_ref"], row["log_probs_old"]) for row in apart]
    far = max(abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True))
    AcceleratorState._reset_state(True)
    assert far < (1e-4 if precision == "float32" else 0.1)  # round 1 samples from the reference


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"lora": LORA | {"rank": 0}}, "lora.rank: found 0"),
        ({"rm__lora": LORA | {"dropout": 1.0}}, "rm.lora.dropout: found 1.0"),
        ({"lora": LORA | {"targets": []}}, "lora.targets"),
        ({"lora": {"rank": 2}}, "lora.alpha: missing"),
        ({"lora": LORA | {"rnak": 2}}, "lora"),
        ({"sft__lora": LORA, "lora": LORA | {"rank": 4}}, "lora.rank: found 4, but sft.lora"),
    ],
)
def test_shapes_that_cannot_be_are_refused_before_anything_runs(tmp_path, knobs, said):
    (tmp_path / "data" / "source").mkdir(parents=True)
    assert said in refuse(tmp_path, "prepare_task", **knobs)


def test_adapters_beside_a_whole_branch_are_refused_before_anything_runs(tmp_path):
    (tmp_path / "data" / "source").mkdir(parents=True)
    knobs = BRANCH | {"rounds": {"1": "models/direct/dpo"}, "lora": LORA}
    said = refuse(tmp_path, "prepare_task", **knobs)
    assert "lora: rounds.1 starts from models/direct/dpo, a whole model" in said
    knobs |= {"direct__lora": LORA | {"rank": 4}}
    assert "lora.rank: found 2, but direct.lora has 4" in refuse(tmp_path, "prepare_task", **knobs)
