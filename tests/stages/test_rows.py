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
