"""Stage `score_answers`: which of the held-out answers a reward model picks, and how good it is."""

import shutil
from pathlib import Path

import pytest
import torch

from stages.base.tables import EVALUATIONS, iterate_rows, write_table
from stages.models.checkpoints import load_policy, load_scorer, save_model
from stages.models.scorers import scores
from tests.helpers.models import byte_tokenizer, llama_scorer
from tests.helpers.stage import figures, refuse, succeed

KNOBS = {
    "evaluate__samples": 4,
    "score_batch_size": 7,
    "verifier": "picking_rule:share",
    "rounds": {"1": "models/sft"},
    "best_of_n": {"rm": "models/rm"},
}
RULE = """
def share(text, answer, entry):
    return float(len(text) % 2)
"""
STAGE, TABLE = "score_answers@rm", Path("data/evaluations/sft.parquet")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Held-out answers of a random policy, half of them right, and a random reward model."""
    folder = tmp_path_factory.mktemp("project")
    for place in ("data/source", "models/source", "models/rm"):
        (folder / place).mkdir(parents=True)
    (folder / "data" / "source" / "picking_rule.py").write_text(RULE)
    for stage in ("prepare_task", "prepare_model"):
        succeed(folder, stage, **KNOBS)
    shutil.copytree(folder / "models" / "base", folder / "models" / "sft")
    size = load_policy(folder / "models" / "sft", "sdpa", "cpu").config.vocab_size
    save_model(folder / "models" / "rm", llama_scorer(vocabulary=size), byte_tokenizer())
    succeed(folder, "evaluate_sft", **KNOBS)
    shutil.copy(folder / TABLE, folder / TABLE.with_name("round-1.parquet"))
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def run(folder: Path) -> dict:
    succeed(folder, STAGE, **KNOBS)
    return figures(folder, "score_answers/rm")


def change(folder: Path, **columns) -> None:
    """Other values in all rows of the table of the SFT policy."""
    rows = [row | columns for row in iterate_rows(folder / TABLE, EVALUATIONS)]
    write_table(folder / TABLE, EVALUATIONS, rows, {})


def test_picked_is_the_answer_of_the_highest_score_of_a_slow_loop(folder):
    scorer = load_scorer(folder / "models" / "rm", "sdpa", torch.device("cpu"))
    tokenizer, by_prompt = byte_tokenizer(), {}
    for row in iterate_rows(folder / TABLE, EVALUATIONS):
        if not row["greedy"]:
            prompt = tokenizer(row["prompt"])["input_ids"]
            with torch.no_grad():
                score = scores(scorer, [prompt], [row["completion_ids"]]).item()
            by_prompt.setdefault(row["prompt_index"], []).append((score, row["correct"]))
    groups = by_prompt.values()
    picked = sum(max(group)[1] for group in groups) / len(groups)
    mean = sum(right for group in groups for _, right in group) / (4 * len(groups))
    best = sum(any(right for _, right in group) for group in groups) / len(groups)
    assert mean < best, "all answers of a prompt are alike: nothing to pick"
    found = run(folder)
    assert found["sft"] == found["round-1"]
    assert found["sft"]["accuracy_picked"] == pytest.approx(picked)
    assert found["sft"]["accuracy_mean"] == pytest.approx(mean)
    assert found["sft"]["accuracy_best"] == pytest.approx(best)
    assert found["sft"]["answers"] == 4 * len(groups)


def test_answers_that_no_rule_could_check_have_no_figures(folder):
    change(folder, reward_correctness=None, correct=False)
    found = run(folder)
    assert found["sft"] == {} and found["round-1"] != {}


def test_answers_to_other_prompts_are_refused(folder):
    change(folder, prompt="another one")
    said = refuse(folder, STAGE, **KNOBS)
    assert "data/evaluations/sft.parquet: prompt " in said
    assert "is 'another one', expected that row of evaluate.dataset" in said
