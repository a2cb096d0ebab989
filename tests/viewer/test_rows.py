"""Rows of tables: which come back, and how little is read for them.

Broken bytes prove what was not read: a column chunk full of zeros makes its reader fail.
"""

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.base.errors import InputError
from stages.base.tables import UPDATES, write_table
from stages.viewer.conditions import Condition, parse
from stages.viewer.rows import Summary, Table

GROUPS, SIZE = 5, 1024


def update(round_number, group, sample, **more):
    return {
        "round": round_number,
        "group": group,
        "sample": sample,
        "advantage": [0.5, -0.5],
        "used": True,
        "reward_shaped": (group * 37 % 101) / 100 + sample,
        "ratio": [1.0, 1.0],
        "ratio_mean": 1.0,
        "ratio_max": 1.0,
        "clipped_fraction": 0.0,
        "kl": None,
    } | more


@pytest.fixture
def big(tmp_path):
    """A table of five row groups, 1024 rows each: two samples of 2560 groups."""
    path = tmp_path / "round-1.parquet"
    rows = (update(1, group, sample) for group in range(GROUPS * SIZE // 2) for sample in (0, 1))
    write_table(path, UPDATES, rows, {"stage": "optimize"})
    return path


def spoil(path, columns, groups):
    """Overwrite the data of some columns in some row groups; the footer stays as it is."""
    metadata = pq.read_metadata(path)
    content = bytearray(path.read_bytes())
    for group in groups:
        rows = metadata.row_group(group)
        for index in range(rows.num_columns):
            column = rows.column(index)
            if columns is None or column.path_in_schema.split(".")[0] in columns:
                start = column.dictionary_page_offset or column.data_page_offset
                start = min(start, column.data_page_offset)
                size = column.total_compressed_size
                content[start : start + size] = bytes(size)
    path.write_bytes(content)
    with pytest.raises(InputError, match="cannot be read as a table"):
        Table(path).first(GROUPS * SIZE)


def places(rows):
    return [(row["group"], row["sample"]) for row in rows]


def where(path, text):
    table = Table(path)
    table.where(parse(text))
    return table


def test_ten_rows_are_read_from_the_first_row_group_alone(big):
    spoil(big, None, range(1, GROUPS))
    table = Table(big)
    assert places(table.first(10)) == [(g, s) for g in range(5) for s in (0, 1)]
    assert table.count() == GROUPS * SIZE


def test_rows_of_one_group_are_found_by_the_statistics_of_the_row_groups(big):
    spoil(big, None, [0, 1, 3, 4])
    assert places(where(big, "group == 1025").first(10)) == [(1025, 0), (1025, 1)]


def test_only_the_columns_asked_for_are_read(big):
    spoil(big, {"advantage", "used"}, range(GROUPS))
    assert Table(big).first(1, ["kl", "group"]) == [{"kl": None, "group": 0}]
    last = Table(big).extreme(1, "group", descending=True, columns=["group", "sample"])
    assert last == [{"group": GROUPS * SIZE // 2 - 1, "sample": 0}]


def test_sorting_reads_one_column_and_then_the_row_groups_of_the_rows_found(big):
    rows = pq.read_table(big).to_pylist()
    wanted = sorted(rows, key=lambda row: row["reward_shaped"])[:3]
    assert {row["group"] * 2 // SIZE for row in wanted} == {0}
    spoil(big, {"advantage"}, range(1, GROUPS))
    assert Table(big).extreme(3, "reward_shaped", descending=False) == wanted


def test_the_lowest_and_the_highest_rows_come_in_order_and_nulls_last(tmp_path):
    path = tmp_path / "t.parquet"
    values = [0.5, None, -1.0, math.nan, 2.0, -1.0]
    rows = [update(1, i, 0, reward_shaped=value) for i, value in enumerate(values)]
    write_table(path, UPDATES, rows, {})
    lowest = Table(path).extreme(6, "reward_shaped", descending=False)
    assert [row["group"] for row in lowest] == [2, 5, 0, 4, 1, 3]
    highest = Table(path).extreme(6, "reward_shaped", descending=True)
    assert [row["group"] for row in highest] == [4, 0, 2, 5, 1, 3]
    assert len(Table(path).extreme(2, "reward_shaped", descending=True)) == 2


@pytest.mark.parametrize(
    ("text", "test"),
    [
        ("reward_shaped < 0.5", lambda r: r["reward_shaped"] < 0.5),
        ("reward_shaped == 0.37", lambda r: r["group"] * 37 % 101 == 37 and r["sample"] == 0),
        ("group < 7.5 and sample = 1", lambda r: r["group"] < 8 and r["sample"] == 1),
        ("used != true", lambda r: not r["used"]),
        ("kl == null", lambda r: True),
        ("kl != null", lambda r: False),
        ("kl < 1", lambda r: False),
    ],
)
def test_conditions_keep_the_rows_that_fit(big, text, test):
    wanted = [row for row in pq.read_table(big).to_pylist() if test(row)]
    table = where(big, text)
    assert table.count() == len(wanted)
    assert places(table.first(GROUPS * SIZE)) == places(wanted)


def test_text_is_compared_as_text(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"answer": ["b", "it's", "a"]}), path)
    assert where(path, "answer >= 'b'").first(9) == [{"answer": "b"}, {"answer": "it's"}]
    assert where(path, 'answer == "it\'s"').count() == 1
    assert where(path, "answer ~ 't'").first(9) == [{"answer": "it's"}]


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("rewards < 1", "no column 'rewards'; there are round, group, sample, advantage"),
        ("advantage > 1", "column 'advantage' is list"),
        ("group == 'x'", "column 'group' is int32"),
        ("group == true", "column 'group' is int32"),
        ("used == 1", "column 'used' is bool"),
        ("group ~ 1", "column 'group' is int32"),
        ("used < true", "'used' is bool: == or !="),
        ("kl < null", "null goes with == and != only"),
    ],
)
def test_a_condition_that_does_not_suit_the_table_is_refused(big, condition, said):
    with pytest.raises(InputError) as error:
        where(big, condition)
    assert said in str(error.value)


def test_a_list_is_no_column_to_sort_by(big):
    with pytest.raises(InputError, match="'advantage' holds a list"):
        Table(big).extreme(1, "advantage", descending=False)
    with pytest.raises(InputError, match="no column 'reward'; there are round"):
        Table(big).extreme(1, "reward", descending=False)


def test_the_rounds_of_a_folder_are_one_table_in_their_order(tmp_path):
    for number in (10, 2):
        rows = [update(number, 0, 0)]
        write_table(tmp_path / f"round-{number}.parquet", UPDATES, rows, {"round": number})
    (tmp_path / ".round-3.parquet.partial").write_text("half")
    table = Table(tmp_path)
    assert [row["round"] for row in table.first(9)] == [2, 10]
    assert [row["file"] for row in table.first(9)] == ["round-2", "round-10"]
    highest = table.extreme(1, "round", descending=True, columns=["round"])
    assert highest == [{"file": "round-10", "round": 10}]
    assert list(table.provenance()) == ["round-2.parquet", "round-10.parquet"]
    assert table.provenance()["round-10.parquet"] == {"rows": 1, "round": 10}
    table.where([Condition("round", "==", 10)])
    assert table.count() == 1


def test_a_summary_tells_numbers_of_rows_and_items_of_lists(tmp_path):
    path = tmp_path / "t.parquet"
    write_table(
        path,
        UPDATES,
        [
            update(1, 0, 0, reward_shaped=1.0, advantage=[1.0, -2.0, 0.0], kl=0.5),
            update(1, 1, 0, reward_shaped=2.5, advantage=[4.0], used=False),
            update(1, 2, 0, reward_shaped=None, advantage=[0.0, 0.0]),
        ],
        {},
    )
    found = {entry.name: entry for entry in Table(path).summary()}
    assert found["reward_shaped"] == Summary("reward_shaped", "float", 1, 1.75, 1.0, 2.5)
    assert found["used"] == Summary("used", "bool", 0, 2 / 3, False, True)
    assert found["advantage"] == Summary(
        "advantage", "list of float", 0, None, -2.0, 4.0, length=2.0
    )
    narrowed = {entry.name: entry for entry in where(path, "group > 0").summary()}
    assert narrowed["reward_shaped"] == Summary("reward_shaped", "float", 1, 2.5, 2.5, 2.5)
    assert narrowed["advantage"] == Summary("advantage", "list of float")


def test_a_missing_list_does_not_count_in_the_mean_length(tmp_path):
    pq.write_table(pa.table({"x": [[1.0, 2.0], None, [0.5, 0.5]]}), tmp_path / "t.parquet")
    found = Table(tmp_path / "t.parquet").summary()
    assert found == [Summary("x", "list of double", 1, None, 0.5, 2.0, length=2.0)]


def test_an_empty_table_is_a_table_too(tmp_path):
    write_table(tmp_path / "e.parquet", UPDATES, [], {})
    assert Table(tmp_path / "e.parquet").first(3) == []
    assert Table(tmp_path / "e.parquet").summary()[0] == Summary("round", "int32", 0)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"")
    with pytest.raises(InputError, match="t.parquet: cannot be read as a table"):
        Table(tmp_path / "t.parquet")
