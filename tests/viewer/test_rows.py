"""Rows of tables and of files of rows: which come back, in which order, and what they come to."""

import gzip
import json
import math

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.base.errors import InputError
from stages.base.tables import UPDATES, write_table
from stages.viewer.places import listing, rows_at
from stages.viewer.rows import spelled

ROWS = [{"x": 2, "y": "b"}, {"x": None}, {"x": 1.5, "y": ["b"]}, {"x": float("nan"), "y": "ab"}]


def update(group, reward_shaped=1.0, **more):
    """A row of data/updates."""
    row = dict.fromkeys(UPDATES.names) | {"round": 1, "group": group, "sample": 0, "used": True}
    return row | {"advantage": [0.5, -0.5], "reward_shaped": reward_shaped} | more


@pytest.fixture
def table(tmp_path):
    """Groups 0 to 5 with shaped rewards 0.5, null, -1, NaN, 0.37, -1; the last one was not used."""
    values = [0.5, None, -1.0, math.nan, 0.37, -1.0]
    rows = [update(i, value, used=i < 5) for i, value in enumerate(values)]
    write_table(tmp_path / "round-1.parquet", UPDATES, rows, {"stage": "optimize"})
    return tmp_path / "round-1.parquet"


@pytest.fixture
def mixed(tmp_path):
    """Lines whose columns and kinds differ."""
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def where(path, condition):
    found = rows_at(path)
    found.where(condition)
    return found


def groups(rows):
    return [row["group"] for row in rows]


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("reward_shaped<-1e-1", [2, 5]),
        ("reward_shaped == 0.37", [4]),
        ("group < 2.5 and round = 1", [0, 1, 2]),
        ("group in (1, 4) or not used", [1, 4, 5]),
        ("used != false and round(reward_shaped) = 0", [4]),
        ("kl == null and reward_shaped != null", [0, 2, 3, 4, 5]),
        ("kl is not null", []),
        ("advantage[2] < 0 and len(advantage) = 2", [0, 1, 2, 3, 4, 5]),
        ("reward_shaped > 0", [0, 3, 4]),  # for DuckDB NaN is above all numbers
    ],
)
def test_a_condition_keeps_the_rows_that_fit(table, condition, wanted):
    assert groups(where(table, condition).first(9)) == wanted
    assert where(table, condition).count() == len(wanted)


def test_text_is_compared_as_text_in_either_kind_of_quotes(tmp_path):
    pq.write_table(
        pa.table({"answer": ["b", "it's", ""], "a b": [1, 2, 3]}), tmp_path / "t.parquet"
    )

    def numbers(condition):
        return [row["a b"] for row in where(tmp_path / "t.parquet", condition).first(9)]

    assert numbers("answer >= 'b'") == [1, 2]
    assert numbers('answer == "it\'s"') == numbers("contains(answer, 't')") == [2]
    assert numbers("answer == ''") == numbers('answer = ""') == numbers('"a b" > 2') == [3]


def test_what_looks_like_a_column_or_null_inside_of_text_stays_as_it_is():
    assert (
        spelled("a = '== null a ''~' and a == NULL", ["a"])
        == "\"a\" = '== null a ''~' and \"a\" is null"
    )


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("rewards < 1", "no column 'rewards'; there are round, group, sample, advantage"),
        ("advantage > 1", "Cannot compare values of type FLOAT[] and type INTEGER"),
        ("group == 'x'", "Could not convert string 'x' to INT32"),
        ("advantage[3]::int + 'x'::int > 0", "Could not convert string 'x' to INT32"),
        ("kl < null", "found '< null'; expected `is null` or `is not null`"),
        ("group ~ 1", "found '~'; expected `contains(column, 'text')`"),
        ("used <", "syntax error at or near \"<\""),
        ("", "SELECT clause without selection list"),
        ("used; copy (select 1) to 'stolen'", "Cannot have any modifiers in the expression list"),
        ("used) --", 'syntax error at or near ")"'),
        ("__import__('os').system('true') == 0", "system does not exist"),
    ],
)  # fmt: skip
def test_what_is_no_condition_on_the_table_is_refused_in_one_line(table, condition, said):
    with pytest.raises(InputError) as error:
        where(table, condition).first(9)
    assert str(error.value).startswith("condition ") and "\n" not in str(error.value)
    assert said in str(error.value)


def test_the_lowest_and_the_highest_rows_come_in_order_and_nulls_last(table):
    rows = rows_at(table)
    assert groups(rows.extreme(6, "reward_shaped", descending=False)) == [2, 5, 4, 0, 3, 1]
    assert groups(rows.extreme(6, "reward_shaped", descending=True)) == [0, 4, 2, 5, 3, 1]
    assert rows.extreme(1, "group", descending=True, columns=["used"]) == [{"used": False}]
    with pytest.raises(InputError, match="no column 'reward'; there are round"):
        rows.extreme(1, "reward", descending=False)


def test_rows_of_equal_rank_keep_their_order(tmp_path):
    values = {"x": [i % 7 for i in range(50_000)], "place": range(50_000)}
    pq.write_table(pa.table(values), tmp_path / "t.parquet")
    for descending, start in ((False, 0), (True, 6)):
        found = rows_at(tmp_path / "t.parquet").extreme(100, "x", descending, ["place"])
        assert [row["place"] for row in found] == list(range(start, 700, 7))


def test_the_rounds_of_a_folder_are_one_table_in_their_order(tmp_path):
    for number in (10, 2):
        rows = [update(0, round=number)]
        write_table(tmp_path / f"round-{number}.parquet", UPDATES, rows, {"round": number})
    (tmp_path / ".round-3.parquet.partial").write_text("half")
    table = rows_at(tmp_path)
    assert [row["round"] for row in table.first(9)] == [2, 10]
    assert [row["file"] for row in table.first(9)] == ["round-2", "round-10"]
    highest = table.extreme(1, "round", descending=True, columns=["round"])
    assert highest == [{"file": "round-10", "round": 10}]
    assert list(table.provenance()) == ["round-2.parquet", "round-10.parquet"]
    assert table.provenance()["round-10.parquet"] == {"rows": 1, "round": 10}
    assert where(tmp_path, "file = 'round-10'").count() == 1


def test_a_summary_tells_numbers_of_rows_and_items_of_lists(tmp_path):
    columns = {"used": [True, False, None], "reward": [1.0, 2.5, None], "text": ["a", None, None]}
    lists = {"ids": [[1, -2, 0], None, [4]], "none": pa.array([[], [], []], pa.list_(pa.int32()))}
    pq.write_table(pa.table(columns | lists), tmp_path / "t.parquet")

    def figures(condition="true"):
        table = where(tmp_path / "t.parquet", condition)
        return {e["column"]: tuple(e.values())[1:] for e in table.summary()}

    assert figures() == {
        "used": ("BOOLEAN", 1, 0.5, False, True, None),
        "reward": ("DOUBLE", 1, 1.75, 1.0, 2.5, None),
        "text": ("VARCHAR", 2, None, None, None, None),
        "ids": ("BIGINT[]", 1, None, -2, 4, 2.0),
        "none": ("INTEGER[]", 0, None, None, None, 0.0),
    }
    assert figures("reward > 1")["reward"] == ("DOUBLE", 0, 2.5, 2.5, 2.5, None)
    assert figures("reward > 9")["used"] == ("BOOLEAN", 0, None, None, None, None)


@pytest.mark.parametrize("name", ["a[1]*?.parquet", "it's.parquet"])
def test_a_file_of_any_name_is_itself(tmp_path, name):
    pq.write_table(pa.table({"x": [1]}), tmp_path / name)
    pq.write_table(pa.table({"x": [2]}), tmp_path / "a1bc.parquet")
    assert rows_at(tmp_path / name).first(9) == [{"x": 1}]


@pytest.mark.parametrize(
    ("condition", "wanted"), [("x > 1", [0, 2, 3]), ("x == null", [1]), ("y == null", [1])]
)
def test_lines_of_json_may_differ_in_columns_and_kinds(mixed, condition, wanted):
    assert repr(where(mixed, condition).first(9, ["y"])) == repr(
        [{"y": ROWS[i].get("y")} for i in wanted]
    )


def test_cells_of_json_come_as_they_are_written(tmp_path):
    row = {"day": "2024-01-01", "at": "2024-01-01T00:00:00Z", "ids": [1, 2], "deep": {"a": [{}]}}
    row["messages"] = [{"role": "user", "content": "a"}, {"role": "tool", "n": 1}]
    for name in ("t.jsonl", "t.json"):
        lines = json.dumps(row)
        (tmp_path / name).write_text(f"[{lines}]" if name == "t.json" else f"{lines}\n\n{lines}\n")
        assert rows_at(tmp_path / name).first(1) == [row]


def test_the_last_line_counts_for_the_type_of_a_column(mixed):
    mixed.write_text('{"x": 1}\n' * 30_000 + '{"x": 1.5}\n')
    assert rows_at(mixed).extreme(1, "x", descending=True) == [{"x": 1.5}]


@pytest.mark.parametrize("name", ["c.csv", "c.csv.gz"])
def test_cells_that_are_written_as_numbers_are_such(tmp_path, name):
    write = gzip.open if name.endswith(".gz") else open
    with write(tmp_path / name, "wt") as file:
        file.write(
            'step,loss,code,day,note\n1,0.5,007,2024-01-01,nan\n2,,10,,\n-3,2.5e-1,1_0,,"a, b"\n'
        )
    assert rows_at(tmp_path / name).first(9) == [
        {"step": 1, "loss": 0.5, "code": "007", "day": "2024-01-01", "note": "nan"},
        {"step": 2, "loss": None, "code": "10", "day": None, "note": None},
        {"step": -3, "loss": 0.25, "code": "1_0", "day": None, "note": "a, b"},
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.jsonl", b'{"a": 1}\n{"a": \xff\n', "t.jsonl:2: expected UTF-8"),
        ("t.jsonl", b'{"a": 1}\n{"a":\n', "t.jsonl:2: broken JSON"),
        ("t.csv", b"a,b\n1,2\n3\n", "t.csv:3: 1 cells, expected 2 as in the header"),
        ("t.json", b'[{"a": 1}, {"a"', "t.json: cannot be read as rows (Malformed JSON"),
        ("t.parquet", b"", "t.parquet: cannot be read as rows (File '"),
    ],
)
def test_a_broken_file_is_named_with_the_line_in_text(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        rows_at(tmp_path / name).first(3)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_dataset_on_disk_has_rows_and_one_with_splits_lists_them(tmp_path):
    part = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    datasets.DatasetDict(train=part.select([2, 0]), test=part).save_to_disk(tmp_path / "d")
    assert rows_at(tmp_path / "d") is None
    found = {row["name"]: row["kind"] for row in listing(tmp_path / "d")}
    assert found == {"dataset_dict.json": "figures", "test/": "rows", "train/": "rows"}
    assert rows_at(tmp_path / "d" / "train").first(1) == [{"prompt": "c"}]
    assert where(tmp_path / "d" / "test", "prompt > 'b'").first(9) == [{"prompt": "c"}]
