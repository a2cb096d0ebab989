"""Rows of files that are no Parquet: kinds may differ from row to row."""

import gzip
import json

import datasets
import pytest

from stages.base.errors import InputError
from stages.viewer.conditions import parse
from stages.viewer.places import listing, rows_at
from stages.viewer.rows import Summary
from stages.viewer.streams import Stream

ROWS = [{"x": 2, "y": "b"}, {"x": None}, {"x": 1.5, "y": ["b"]}, {"x": float("nan"), "y": "ab"}]


@pytest.fixture
def mixed(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x > 1", [0, 2]),
        ("x == null", [1]),
        ("x != null and y ~ 'b'", [0, 3]),
        ("y == 'b'", [0]),
        ("y != 'b'", [2, 3]),
        ("y < 1", []),
        ("y >= 'b'", [0]),
    ],
)
def test_conditions_keep_the_rows_that_fit(mixed, text, wanted):
    table = Stream.of_dataset(mixed)
    table.where(parse(text))
    assert repr(table.first(9)) == repr([ROWS[i] for i in wanted])
    assert table.count() == len(wanted)


def test_the_lowest_and_the_highest_rows_come_in_order_and_nulls_last(mixed):
    table = Stream.of_dataset(mixed)
    lowest = [row["x"] for row in table.extreme(9, "x", descending=False)]
    highest = [row["x"] for row in table.extreme(9, "x", descending=True)]
    assert str(lowest) == "[1.5, 2, None, nan]" and str(highest) == "[2, 1.5, None, nan]"
    assert table.extreme(1, "x", descending=True, columns=["y"]) == [{"y": "b"}]
    with pytest.raises(InputError, match="column 'y' holds a list; no order"):
        table.extreme(1, "y", descending=False)
    with pytest.raises(InputError, match="no column 'z'; there are x, y"):
        table.extreme(1, "z", descending=False)


def test_a_summary_tells_the_kinds_and_the_range_of_numbers(mixed):
    mixed.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    assert Stream.of_dataset(mixed).summary() == [
        Summary("x", "a number", 1, 1.75, 1.5, 2),
        Summary("y", "text or a list", 1),
    ]


@pytest.mark.parametrize("name", ["c.csv", "c.csv.gz"])
def test_cells_that_are_written_as_numbers_are_such(tmp_path, name):
    write = gzip.open if name.endswith(".gz") else open
    with write(tmp_path / name, "wt") as file:
        file.write("step,loss,code,note\n1,0.5,007,nan\n2,,10,\n-3,2.5e-1,1_0,a\n")
    assert rows_at(tmp_path / name).first(9) == [
        {"step": 1, "loss": 0.5, "code": "007", "note": "nan"},
        {"step": 2, "loss": None, "code": 10, "note": None},
        {"step": -3, "loss": 0.25, "code": "1_0", "note": "a"},
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b'{"a": 1}\n{"a": \xff\n', "t.jsonl:2: expected UTF-8"), (b"", "is empty")],
)
def test_a_broken_file_is_named(tmp_path, content, said):
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=said):
        rows_at(tmp_path / "t.jsonl").first(3)


def test_a_dataset_on_disk_has_rows_and_one_with_splits_lists_them(tmp_path):
    part = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    datasets.DatasetDict(train=part, test=part).save_to_disk(tmp_path / "d")
    assert rows_at(tmp_path / "d") is None
    assert [row["name"] for row in listing(tmp_path / "d")] == [
        "dataset_dict.json",
        "test/",
        "train/",
    ]
    assert [row["kind"] for row in listing(tmp_path / "d")] == ["figures", "rows", "rows"]
    assert rows_at(tmp_path / "d" / "train").first(1) == [{"prompt": "a"}]
