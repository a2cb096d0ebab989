"""Rows on their way into the stages: what is refused, dropped with a count, or kept.

Names such as n16 are those of the project's list of faults.
"""

import json
import shutil

import pytest

from stages.base.tables import PAIRS, SFT, write_table
from tests.helpers.stage import refuse, succeed

LONG = {"prompt": "a" * 600, "completion": "b" * 600, "chosen": "b" * 600, "rejected": "c" * 600}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the base model of the small knobs."""
    folder = tmp_path_factory.mktemp("base")
    succeed(folder, "prepare_model")
    return folder


@pytest.fixture
def folder(base, tmp_path):
    """A copy of it, and an empty data/source."""
    copy = tmp_path / "run"
    shutil.copytree(base, copy)
    (copy / "data" / "source").mkdir(parents=True)
    return copy


def source(folder, *rows):
    """Rows as a file under data/source; the knob's value for it."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "data" / "source" / "rows.jsonl").write_text(text)
    return "data/source/rows.jsonl"


def pair(**ids):
    return {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3], "margin": 0.0} | ids


# Nothing half done.


@pytest.mark.parametrize(
    ("stage", "section", "out"),
    [
        ("tokenize_sft", "sft", "data/sft.parquet"),
        ("tokenize_preferences", "preferences", "data/preferences/pairs.parquet"),
    ],
)
def test_n16_a_stage_that_keeps_no_row_leaves_no_table(folder, stage, section, out):
    message = refuse(folder, stage, **{f"{section}__dataset": source(folder, LONG)})
    assert "data/source/rows.jsonl: no row was kept of 1" in message
    assert not (folder / out).exists() and not list((folder / "data").rglob(".*"))


def test_n16_an_sft_without_rows_is_refused_before_it_begins(folder):
    write_table(folder / "data" / "sft.parquet", SFT, [], {})
    assert "data/sft.parquet: no rows; expected at least one" in refuse(folder, "train_sft")
    assert not (folder / "models" / "sft").exists()


@pytest.mark.parametrize("empty", ["train", "validation"])
def test_n16_a_reward_model_without_rows_on_one_side_is_refused_before_it_begins(folder, empty):
    shutil.copytree(folder / "models" / "base", folder / "models" / "sft")
    for side in ("train", "validation"):
        pairs = [] if side == empty else [pair()]
        write_table(folder / "data" / "preferences" / f"{side}.parquet", PAIRS, pairs, {})
    message = refuse(folder, "train_rm")
    assert f"data/preferences/{empty}.parquet: no rows; expected at least one" in message
    assert not (folder / "models" / "rm").exists()


def test_n16_pairs_without_rows_are_refused_by_the_split(folder):
    write_table(folder / "data" / "preferences" / "pairs.parquet", PAIRS, [], {})
    assert "pairs.parquet: no rows; expected at least one" in refuse(folder, "split_preferences")


# What prepare_task finds before anything trains.


@pytest.fixture
def empty(tmp_path):
    (tmp_path / "data" / "source").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("section", ["prompts", "evaluate"])
@pytest.mark.parametrize("field", ["answer", "prompt", "system"])
def test_n08_a_column_that_is_not_there_is_refused_by_the_first_stage(empty, section, field):
    rows = source(empty, {"prompt": "q", "reward_model": {"ground_truth": "a"}})
    knobs = {f"{section}__dataset": rows, f"{section}__columns": {field: "ground_thruth"}}
    message = refuse(empty, "prepare_task", **knobs)
    wanted = f"no column 'ground_thruth' (for '{field}'); there are [prompt, reward_model"
    assert f"  {section}: {rows}: columns: {wanted}.ground_truth]" in message
    assert not (empty / "data" / "task").exists()


@pytest.mark.parametrize(("section", "field"), [("sft", "system"), ("preferences", "margin")])
def test_n08_a_column_that_the_embedded_task_lacks_is_refused_too(empty, section, field):
    message = refuse(empty, "prepare_task", **{f"{section}__columns": {field: "nowhere"}})
    assert f"  {section}: task: columns: no column 'nowhere' (for '{field}')" in message


UNVERIFIED = [
    ({"prompt": "q"}, "exact", "'answer'"),
    ({"prompt": "q", "answer": None}, "regex", "'answer'"),
    ({"prompt": "q", "answer": "forty two"}, "numeric", "'answer' with a number"),
    ({"prompt": "q", "answer": "a"}, "task", "'entry'"),
]


@pytest.mark.parametrize(("row", "verifier", "needed"), UNVERIFIED)
def test_n09_prompts_that_nothing_can_verify_are_refused_by_the_first_stage(
    empty, row, verifier, needed
):
    knobs = {"verifier": verifier, "verifier_pattern": "(.)"}
    rows = source(empty, *[row] * 1100)
    message = refuse(empty, "prepare_task", prompts__dataset=rows, **knobs)
    assert f"  prompts: {rows}: verifier {verifier} needs {needed} and no prompt has one" in message
    assert "expected a column of that name" in message and "rewards.correctness null" in message
    rewards = {"correctness": None, "format": None, "length": None, "reward_model": 1.0}
    succeed(empty, "prepare_task", prompts__dataset=rows, rewards=rewards, **knobs)


@pytest.mark.parametrize("weight", [1.0, 0.0, -0.5])
def test_n09_a_component_that_is_null_leaves_no_reward_whatever_its_weight(empty, weight):
    rewards = {"correctness": weight, "format": None, "length": None, "reward_model": 1.0}
    rows = source(empty, {"prompt": "q"})
    knobs = {"prompts__dataset": rows, "verifier": "exact", "rewards": rewards}
    assert f"with rewards.correctness {weight} none" in refuse(empty, "prepare_task", **knobs)


def test_n09_one_prompt_with_an_answer_is_enough_and_ones_own_verifier_is_trusted(empty):
    late = source(empty, *[{"prompt": "q"}] * 1500, {"prompt": "q", "answer": "3"})
    for verifier in ("exact", "numeric"):
        succeed(empty, "prepare_task", prompts__dataset=late, verifier=verifier)
    (empty / "data" / "source" / "mine.py").write_text("def check(text, answer, entry): return 1")
    rows = source(empty, {"prompt": "q"})
    succeed(empty, "prepare_task", prompts__dataset=rows, verifier="mine:check")


def test_n09_the_embedded_task_is_looked_at_as_well(empty):
    message = refuse(empty, "prepare_task", verifier="numeric")
    assert "  prompts: task: verifier numeric needs 'answer' with a number" in message
