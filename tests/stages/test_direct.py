"""Stages `score_pairs` and `train_direct` on a tiny model, through files."""

import csv
import json

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.base import command
from stages.base.tables import PAIRS, write_table
from stages.direct.losses import LOSSES
from stages.models.checkpoints import save_model
from stages.models.scorers import reference_log_probs
from stages.score_pairs import score_pairs
from stages.train_direct import train_direct
from tests.helpers.models import byte_tokenizer, llama, plain_log_probs, random_ids
from tests.helpers.tiny import small_params, write

CHANGES = {
    "score_batch_size": 4,
    "direct__epochs": 2,
    "direct__train_batch_size": 3,
    "direct__batch_acc": 2,
    "direct__lr": 2e-3,
    "direct__warmup_steps": 1,
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with params.yaml, models/sft and pairs, to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "stop_with_parent", lambda: None)
    threads = torch.get_num_threads()
    (tmp_path / "data" / "source").mkdir(parents=True)
    tokenizer = byte_tokenizer()
    (tmp_path / "models" / "sft").mkdir(parents=True)
    save_model(tmp_path / "models" / "sft", llama(vocabulary=len(tokenizer)), tokenizer)
    for name, count in (("train", 13), ("validation", 5)):
        rows = []
        for i in range(count):
            prompt, chosen, rejected = random_ids(100 * count + i, 3 + i % 3, 2 + i % 2, 1 + i % 4)
            rows.append(
                {
                    "prompt_ids": prompt,
                    "chosen_ids": chosen,
                    "rejected_ids": rejected,
                    "margin": 0.5 * (i % 3),
                }
            )
        write_table(tmp_path / "data" / f"{name}.parquet", PAIRS, rows, {})
    set_knobs(tmp_path)
    yield tmp_path
    torch.set_num_threads(threads)


def set_knobs(folder, **changes) -> None:
    write(folder / "params.yaml", small_params(**CHANGES | changes))


def call(stage, *words: str):
    return CliRunner().invoke(stage, words)


def score() -> None:
    words = "--train data/train.parquet --validation data/validation.parquet"
    words += " --reference models/sft --train-out scored/train.parquet"
    words += " --validation-out scored/validation.parquet --figures figures/score_pairs.json"
    result = call(score_pairs, *words.split())
    assert result.exit_code == 0, result.output


def train(out: str):
    words = "--train scored/train.parquet --validation scored/validation.parquet"
    words += f" --policy models/sft --out models/direct/{out} --curve curves/{out}.csv"
    return call(train_direct, *words.split(), "--figures", f"figures/{out}.json")


def figures(name: str) -> dict:
    return json.loads(open(f"figures/{name}.json").read())


def test_the_scores_are_the_references_log_probs_of_each_token(project):
    score()
    model = AutoModelForCausalLM.from_pretrained(project / "models" / "sft")
    rows = pq.read_table(project / "scored" / "train.parquet").to_pylist()
    assert len(rows) == 13
    with torch.no_grad():
        for row in rows:
            for side in ("chosen", "rejected"):
                wanted = plain_log_probs(model, row["prompt_ids"], row[f"{side}_ids"])
                found = torch.tensor(row[f"log_probs_ref_{side}"])
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    found = figures("score_pairs")
    chosen = [sum(row["log_probs_ref_chosen"]) for row in rows]
    rejected = [sum(row["log_probs_ref_rejected"]) for row in rows]
    assert found["train_pairs"] == 13 and found["validation_pairs"] == 5
    assert found["train_chosen_log_prob"] == pytest.approx(sum(chosen) / 13)
    likelier = sum(c > r for c, r in zip(chosen, rejected, strict=True))
    assert found["train_chosen_likelier"] == pytest.approx(likelier / 13)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains_a_model_that_prefers_what_was_chosen(project, loss):
    score()
    set_knobs(project, direct__loss=loss, direct__beta=0.5, direct__lr=5e-3, direct__epochs=8)
    result = train(loss)
    assert result.exit_code == 0, result.output
    found = figures(loss)
    assert found["steps"] == 8 * 3  # 13 pairs: micro-batches of 3, two a step
    # On the pairs trained on: validation pairs are random.
    rows = list(csv.DictReader(open(f"curves/{loss}.csv")))
    gaps = [float(r["chosen_reward"]) - float(r["rejected_reward"]) for r in rows]
    assert sum(gaps[-3:]) > sum(gaps[:3])
    AutoModelForCausalLM.from_pretrained(project / "models" / "direct" / loss)


def test_pairs_are_scored_in_passes_of_no_more_tokens_than_the_knob_says(project, monkeypatch):
    score()
    tables = [pq.read_table(project / "scored" / "train.parquet").to_pylist()]
    seen = []

    def watched(model, rows, temperature):
        lengths = [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows]
        seen.append((len(rows), len(rows) * max(lengths)))
        return reference_log_probs(model, rows, temperature)

    monkeypatch.setattr("stages.score_pairs.reference_log_probs", watched)
    set_knobs(project, forward_max_tokens=17)
    score()
    assert max(rows for rows, _ in seen) == 2 and all(n <= 17 for rows, n in seen if rows > 1)
    tables.append(pq.read_table(project / "scored" / "train.parquet").to_pylist())
    for row, other in zip(*tables, strict=True):
        for side in ("log_probs_ref_chosen", "log_probs_ref_rejected"):
            assert row[side] == pytest.approx(other[side], abs=1e-5)


def test_before_the_first_step_the_policy_is_its_reference(project):
    score()
    assert train("dpo").exit_code == 0
    found = figures("dpo")
    assert found["loss_before"] == pytest.approx(0.6931472, abs=1e-5)
    assert found["chosen_reward_before"] == pytest.approx(0.0, abs=1e-5)
    scores = figures("score_pairs")
    for side in ("chosen", "rejected"):
        before = found[f"{side}_log_prob_before"]
        assert before == pytest.approx(scores[f"validation_{side}_log_prob"], abs=1e-4)
    assert found["kl_ref"] > 0


def test_two_runs_give_the_same_bytes_and_another_seed_does_not(project):
    score()
    assert train("a").exit_code == train("b").exit_code == 0
    set_knobs(project, seed=7)
    assert train("c").exit_code == 0
    weights = [(project / "models" / "direct" / x / "model.safetensors") for x in "abc"]
    assert weights[0].read_bytes() == weights[1].read_bytes() != weights[2].read_bytes()
    assert open("curves/a.csv").read() == open("curves/b.csv").read()


def test_accumulation_gives_the_update_of_one_large_batch(project):
    score()
    changes = {"direct__epochs": 1, "direct__weight_decay": 0.0, "direct__lr": 1e-3}
    for name, size, acc in (("whole", 13, 1), ("parts", 5, 3)):
        set_knobs(project, **changes, direct__train_batch_size=size, direct__batch_acc=acc)
        assert train(name).exit_code == 0
    whole, parts = (
        load_file(project / "models" / "direct" / name / "model.safetensors")
        for name in ("whole", "parts")
    )
    assert figures("whole")["steps"] == figures("parts")["steps"] == 1
    for name, weight in whole.items():
        # Adam's first step is the sign of the gradient: near 0 rounding may turn it.
        assert ((weight - parts[name]).abs() < 1e-5).float().mean() > 0.98, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"direct__loss": "dpoo"}, "direct.loss: found 'dpoo', expected one of dpo, "),
        (
            {"direct__loss": "ipo", "direct__beta": 0.0},
            "params.yaml: direct.beta: found 0, but loss ipo",
        ),
        ({"direct__beta": 0.0}, "params.yaml: direct.beta: found 0, which gives loss dpo no grad"),
        ({"direct__gamma": 0.5}, "direct.gamma: found 0.5, but loss dpo does not read it"),
        (
            {"direct__loss": "simpo", "direct__label_smoothing": 0.1},
            "direct.label_smoothing: found",
        ),
        ({"direct__label_smoothing": 0.5}, "direct.label_smoothing"),
        (
            {"direct__loss": "sft", "direct__nll_weight": 1.0},
            "direct.nll_weight: found 1.0, but loss sft is that term",
        ),
        ({"branches": {"1": "models/sft"}}, "key '1' is no name of a branch"),
        ({"branches": {1: "models/sft"}}, "key 1 is no name of a branch"),
        ({"branches": {"dpo": "models/rm"}}, "branch 'dpo' starts from 'models/rm'"),
        ({"branches": {"a": "models/direct/a"}}, "starts from itself"),
        ({"branches": {"a": "models/direct/b", "b": "models/direct/a"}}, "starts from itself"),
        ({"branches": {"a": "models/policy/9"}}, "rounds has no '9'"),
        ({"rounds": {"1": "models/direct/dpo"}}, "branches has no 'dpo'"),
        (
            {"rounds": {"1": "models/direct/a"}, "branches": {"a": "models/policy/1"}},
            "starts from itself",
        ),
    ],
)
def test_knobs_that_do_not_fit_are_told_before_anything_runs(project, changes, message):
    set_knobs(project, **changes)
    result = train("never")
    assert result.exit_code == 1 and message in result.output, result.output
    assert "Traceback" not in result.output
    assert not (project / "models" / "direct").exists()
