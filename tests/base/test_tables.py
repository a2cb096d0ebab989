"""The Parquet tables: what is written comes back, what is foreign is refused by name."""

import math
import subprocess
import sys
from textwrap import dedent

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.base import tables
from stages.base.errors import InputError
from stages.base.tables import (
    BUFFERS,
    PAIRS,
    ROLLOUTS,
    ROWS_PER_GROUP,
    SFT,
    UPDATES,
    iterate_batches,
    iterate_rows,
    open_table,
    random_access,
    read_provenance,
    write_table,
)
from tests.helpers.tiny import ROOT

SCHEMAS = {name: value for name, value in vars(tables).items() if isinstance(value, pa.Schema)}
SAMPLE = {
    pa.int32(): 7,
    pa.float32(): 0.25,
    pa.string(): 'é\n"x"\x00',
    pa.bool_(): True,
    tables.IDS: [1, 2, 3],
    tables.FLOATS: [-0.5, -1.5],
}


def row_of(schema, **values):
    """A row that fits a schema."""
    return {field.name: SAMPLE[field.type] for field in schema} | values


def written(path, schema, rows):
    write_table(path, schema, rows, {"stage": "test"})
    return path


def sft(path, *lists):
    return written(path, SFT, [{"input_ids": ids, "labels": ids} for ids in lists])


@pytest.mark.parametrize("name", SCHEMAS)
def test_rows_come_back_as_they_were_written(tmp_path, name):
    schema = SCHEMAS[name]
    rows = [row_of(schema), row_of(schema)]
    path = written(tmp_path / "t.parquet", schema, rows)
    assert list(iterate_rows(path, schema)) == rows


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("count", [1, ROWS_PER_GROUP, ROWS_PER_GROUP + 1])
def test_one_row_and_many_rows_have_one_schema(tmp_path, name, count):
    schema = SCHEMAS[name]
    path = written(tmp_path / "t.parquet", schema, (row_of(schema) for _ in range(count)))
    found = pq.read_schema(path)
    assert found.remove_metadata() == schema
    assert [field.nullable for field in found] == [field.nullable for field in schema]
    assert pq.read_table(path).num_rows == count
    assert sum(1 for _ in iterate_rows(path, schema)) == count
    with random_access(path, schema) as rows:
        assert len(rows) == count


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("read", [open_table, iterate_rows, iterate_batches, random_access])
def test_n16_a_table_without_rows_is_refused_by_every_reader(tmp_path, name, read):
    path = written(tmp_path / "t.parquet", SCHEMAS[name], [])
    with pytest.raises(InputError, match=r"t\.parquet: no rows; expected at least one"):
        found = read(path, SCHEMAS[name])
        found.__enter__() if read is random_access else next(iter(found))


def test_columns_that_are_null_throughout_change_no_schema(tmp_path):
    nullable = {field.name: None for field in BUFFERS if field.nullable}
    empty = written(tmp_path / "a.parquet", BUFFERS, [row_of(BUFFERS, **nullable)])
    full = written(tmp_path / "b.parquet", BUFFERS, [row_of(BUFFERS)])
    assert pq.read_schema(empty).remove_metadata() == pq.read_schema(full).remove_metadata()
    assert list(iterate_rows(empty, BUFFERS)) == [row_of(BUFFERS, **nullable)]


def test_other_tools_see_float32_int32_and_one_schema(tmp_path):
    path = written(tmp_path / "t.parquet", BUFFERS, [row_of(BUFFERS)])
    kinds = {field.name: str(field.type) for field in pq.read_schema(path)}
    assert kinds["completion_ids"] == "list<element: int32 not null>"
    assert kinds["log_probs_old"] == "list<element: float not null>"
    assert kinds["reward"] == kinds["reward_model"] == kinds["reward_correctness"] == "float"
    assert {c.compression for c in columns(path)} == {"ZSTD"}


def columns(path):
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        for column in range(file.metadata.num_columns):
            yield file.metadata.row_group(group).column(column)


def test_a02_integer_rewards_in_one_round_and_floats_in_the_next_are_one_type(tmp_path):
    for name, reward in (("a", 1), ("b", 0.5)):
        rows = [row_of(BUFFERS, reward=reward)]
        written(tmp_path / f"{name}.parquet", BUFFERS, rows)
    for order in (["a", "b"], ["b", "a"]):
        both = pa.concat_tables([pq.read_table(tmp_path / f"{name}.parquet") for name in order])
        assert both.schema.field("reward").type == pa.float32()


def test_a05_float32_values_come_back_bit_for_bit(tmp_path):
    values = np.random.default_rng(0).normal(-12, 9, 1000).astype(np.float32)
    values[:6] = [0.0, -0.0, np.float32(1e-45), np.finfo(np.float32).max, -12.3456, 1 / 3]
    rows = [row_of(BUFFERS, log_probs_old=values.tolist(), reward=float(values[4]))]
    path = written(tmp_path / "t.parquet", BUFFERS, rows)
    found = next(iterate_rows(path, BUFFERS))
    assert np.array(found["log_probs_old"], np.float32).tobytes() == values.tobytes()
    assert np.float32(found["reward"]) == values[4]
    with random_access(path, BUFFERS) as rows:
        again = np.array(rows[0]["log_probs_old"], np.float32)
    assert again.tobytes() == values.tobytes()


def test_a04_empty_lists_survive_and_are_no_nulls(tmp_path):
    path = sft(tmp_path / "t.parquet", [], [1], [], [2, 3])
    assert [row["input_ids"] for row in iterate_rows(path, SFT)] == [[], [1], [], [2, 3]]
    with random_access(path, SFT) as rows:
        assert rows.lengths("input_ids") == [0, 1, 0, 2]
        assert rows[2] == {"input_ids": [], "labels": []}
    values = [row_of(BUFFERS, values_old=[]), row_of(BUFFERS, values_old=None)]
    path = written(tmp_path / "b.parquet", BUFFERS, values)
    assert [row["values_old"] for row in iterate_rows(path, BUFFERS)] == [[], None]


def test_a04_a_null_reward_survives(tmp_path):
    rows = [row_of(BUFFERS, reward=None), row_of(BUFFERS, reward=math.inf)]
    path = written(tmp_path / "t.parquet", BUFFERS, rows)
    assert [row["reward"] for row in iterate_rows(path, BUFFERS)] == [None, math.inf]


def test_row_groups_are_bounded_however_the_rows_come(tmp_path):
    path = sft(tmp_path / "t.parquet", *[[i] for i in range(2 * ROWS_PER_GROUP + 5)])
    file = pq.ParquetFile(path).metadata
    sizes = [file.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert sizes == [ROWS_PER_GROUP, ROWS_PER_GROUP, 5]


def test_rows_are_taken_as_they_come(tmp_path):
    waiting = []

    def rows():
        for i in range(3 * ROWS_PER_GROUP):
            waiting.append(i)
            yield {"input_ids": [i], "labels": [i]}

    class Watched:
        def __call__(self):
            return {"rows": len(waiting)}

    path = tmp_path / "t.parquet"
    assert write_table(path, SFT, rows(), Watched()) == 3 * ROWS_PER_GROUP
    assert read_provenance(path) == {"rows": 3 * ROWS_PER_GROUP}


def test_a02_a_surplus_column_is_refused_when_written_never_dropped(tmp_path):
    rows = [{"input_ids": [1], "labels": [1]}, {"input_ids": [1], "labels": [1], "weight": 2.0}]
    with pytest.raises(ValueError, match=r"t\.parquet: row 1 has other columns: \['weight'\]"):
        written(tmp_path / "t.parquet", SFT, rows)
    assert not list(tmp_path.iterdir())


def test_a02_a_missing_column_is_refused_when_written_never_null(tmp_path):
    rows = [{"input_ids": [1], "labels": [1]}] * 3 + [{"input_ids": [1]}]
    with pytest.raises(ValueError, match=r"row 3 has other columns: \['labels'\]"):
        written(tmp_path / "t.parquet", SFT, rows)


@pytest.mark.parametrize(
    ("schema", "column", "value", "message"),
    [
        (SFT, "input_ids", None, "row 1025 has no 'input_ids'"),
        (SFT, "input_ids", [1, None, 3], "row 1025 has a null inside 'input_ids'"),
        (SFT, "labels", [None], "row 1025 has a null inside 'labels'"),
        (PAIRS, "margin", None, "row 1025 has no 'margin'"),
        (ROLLOUTS, "log_probs_old", [None, -1.0], "row 1025 has a null inside 'log_probs_old'"),
        (BUFFERS, "values_old", [0.5, None], "row 1025 has a null inside 'values_old'"),
        (UPDATES, "advantage", [None], "row 1025 has a null inside 'advantage'"),
    ],
)
def test_a04_a_null_is_refused_when_written_with_row_and_column(
    tmp_path, schema, column, value, message
):
    rows = [row_of(schema) for _ in range(ROWS_PER_GROUP + 1)]
    rows.append(row_of(schema, **{column: value}))
    with pytest.raises(InputError, match=message):
        written(tmp_path / "t.parquet", schema, rows)
    assert not list(tmp_path.iterdir())


def test_an_id_that_is_no_int32_is_refused_when_written(tmp_path):
    for odd in ([2**31], ["1"], [True]):
        with pytest.raises((pa.ArrowInvalid, pa.ArrowTypeError, OverflowError)):
            sft(tmp_path / "t.parquet", odd)


@pytest.mark.parametrize(
    ("schema", "column", "value"),
    [(SFT, "labels", [1, 2.5]), (ROLLOUTS, "prompt_index", 1.5), (ROLLOUTS, "round", 1.0)],
)
def test_a_fraction_in_an_integer_column_is_refused_and_not_cut_off(
    tmp_path, schema, column, value
):
    rows = [row_of(schema), row_of(schema, **{column: value})]
    with pytest.raises(ValueError, match=rf"t\.parquet: row 1: '{column}' holds a number"):
        written(tmp_path / "t.parquet", schema, rows)
    assert not list(tmp_path.iterdir())


def foreign(path, table, version=tables.SCHEMA_VERSION):
    """A file that somebody else wrote, with our schema_version."""
    pq.write_table(table.replace_schema_metadata({"schema_version": version}), path)
    return path


@pytest.mark.parametrize(
    ("column", "row"), [("input_ids", 3), ("labels", 0)], ids=["input_ids", "labels"]
)
def test_a04_a_null_inside_a_list_of_a_foreign_file_is_refused_with_row_and_column(
    tmp_path, column, row
):
    lists = {"input_ids": [[1]] * 5, "labels": [[1]] * 5}
    lists[column][row] = [1, None, 3]
    kind = pa.list_(pa.field("element", pa.int32()))
    table = pa.table({name: pa.array(values, kind) for name, values in lists.items()})
    path = foreign(tmp_path / "t.parquet", table)
    message = rf"t\.parquet: row {row} has a null inside '{column}'"
    with pytest.raises(InputError, match=message):
        list(iterate_rows(path, loosened(SFT), 2))


def loosened(schema):
    """A schema whose list elements may be null, as a foreign writer leaves them."""
    kind = pa.list_(pa.field("element", pa.int32()))
    return pa.schema([pa.field(field.name, kind, nullable=False) for field in schema])


def test_a_foreign_list_type_is_refused_by_column(tmp_path):
    kind = pa.list_(pa.field("element", pa.int32()))
    table = pa.table({name: pa.array([[1]], kind) for name in ("input_ids", "labels")})
    with pytest.raises(InputError, match=r"column 'input_ids' is list<element: int32>, expected"):
        open_table(foreign(tmp_path / "t.parquet", table), SFT)


def test_a_null_row_of_a_foreign_file_is_refused_with_row_and_column(tmp_path):
    table = pa.table(
        {
            "input_ids": pa.array([[1], [2], None], tables.IDS),
            "labels": pa.array([[1], [2], [3]], tables.IDS),
        }
    )
    path = foreign(tmp_path / "t.parquet", table)
    with pytest.raises(InputError, match=r"t\.parquet: row 2 has no 'input_ids', expected list"):
        list(iterate_rows(path, SFT))
    with pytest.raises(InputError, match="row 2"), random_access(path, SFT):
        pass


def changed(tmp_path, change, version=tables.SCHEMA_VERSION):
    path = written(tmp_path / "t.parquet", BUFFERS, [row_of(BUFFERS)])
    return foreign(path, change(pq.read_table(path)), version)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["log_probs_ref"]), "column 'log_probs_ref' is missing"),
        (lambda t: t.rename_columns([n.upper() for n in t.column_names]), "column 'round' is"),
        (lambda t: t.append_column("kl", pa.array([0.5])), r"unexpected columns \['kl'\]"),
        (
            lambda t: t.set_column(0, "round", pa.array([1], pa.int64())),
            "column 'round' is int64, expected int32",
        ),
        (
            lambda t: t.set_column(
                t.column_names.index("reward"), "reward", pa.array([1], pa.int32())
            ),
            "column 'reward' is int32, expected float",
        ),
        (
            lambda t: t.set_column(
                t.column_names.index("log_probs_old"),
                "log_probs_old",
                pa.array([[np.float16(0.5)]], pa.list_(pa.float16())),
            ),
            "column 'log_probs_old' is list<element: halffloat>, expected list<element: float",
        ),
    ],
    ids=["missing", "renamed", "surplus", "int64", "integer reward", "half precision"],
)
def test_a02_a_table_of_another_schema_is_refused_by_file_and_column(tmp_path, change, message):
    path = changed(tmp_path, change)
    for read in (open_table, lambda *a: list(iterate_batches(*a)), open_random):
        with pytest.raises(InputError, match=rf"t\.parquet: {message}"):
            read(path, BUFFERS)


def open_random(path, schema):
    with random_access(path, schema) as rows:
        return rows


def test_columns_in_another_order_are_read_by_name(tmp_path):
    path = changed(tmp_path, lambda t: t.select(t.column_names[::-1]))
    assert next(iterate_rows(path, BUFFERS)) == row_of(BUFFERS)
    with random_access(path, BUFFERS) as rows:
        assert rows[0] == row_of(BUFFERS)


def test_a_table_of_another_version_is_refused(tmp_path):
    with pytest.raises(InputError, match="schema_version is 0, expected 1"):
        open_table(changed(tmp_path, lambda t: t, "0"), BUFFERS)
    pq.write_table(pa.table({"input_ids": [1]}), tmp_path / "u.parquet")
    with pytest.raises(InputError, match="column 'input_ids' is int64"):
        open_table(tmp_path / "u.parquet", SFT)


def test_a_table_of_another_stage_is_refused(tmp_path):
    path = written(tmp_path / "rollouts.parquet", ROLLOUTS, [row_of(ROLLOUTS)])
    with pytest.raises(InputError, match=r"rollouts\.parquet: column 'reward_model' is missing"):
        open_table(path, BUFFERS)


def test_a_missing_a_foreign_and_a_cut_file_are_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.parquet: missing; expected a Parquet table"):
        open_table(tmp_path / "none.parquet", SFT)
    (tmp_path / "text.parquet").write_text("not a table\n" * 10)
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "folder.parquet").mkdir()
    whole = sft(tmp_path / "whole.parquet", [1, 2]).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    for name in ("text", "empty", "cut", "folder"):
        with pytest.raises(InputError, match=rf"{name}\.parquet: not a readable Parquet file"):
            open_table(tmp_path / f"{name}.parquet", SFT)


def test_a_file_with_a_broken_page_is_named(tmp_path):
    path = sft(tmp_path / "t.parquet", *[list(range(i % 50)) for i in range(3000)])
    data = bytearray(path.read_bytes())
    data[4000:4400] = bytes(400)
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"t\.parquet: a broken Parquet file"):
        list(iterate_rows(path, SFT))


def test_what_made_a_table_is_in_its_metadata(tmp_path):
    path = tmp_path / "t.parquet"
    made = {"stage": "rollout", "round": 3, "note": 'é "x"\n'}
    write_table(path, SFT, [row_of(SFT)], made)
    assert read_provenance(path) == made
    assert pq.read_metadata(path).metadata[b"schema_version"] == b"1"
    assert open_table(path, SFT).schema_arrow.names == SFT.names


def test_the_same_rows_are_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        sft(tmp_path / name, *[[i, i + 1] for i in range(3000)])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_rows_are_found_by_number_over_all_batches(tmp_path):
    count = 2 * ROWS_PER_GROUP + 3
    path = sft(tmp_path / "t.parquet", *[[i] * (i % 3) for i in range(count)])
    with random_access(path, SFT) as rows:
        assert len(rows) == count
        for i in (0, 1, ROWS_PER_GROUP - 1, ROWS_PER_GROUP, 2 * ROWS_PER_GROUP, count - 1):
            assert rows[i]["input_ids"] == [i] * (i % 3)
        assert rows.lengths("input_ids") == [i % 3 for i in range(count)]
        for beyond in (count, -1):
            with pytest.raises(IndexError):
                rows[beyond]
        assert sum(1 for _ in rows) == count


def test_the_copy_behind_random_access_is_gone_afterwards(tmp_path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    path = sft(tmp_path / "t.parquet", [1])
    with pytest.raises(ValueError), random_access(path, SFT):
        assert list(temporary.iterdir())
        raise ValueError
    assert not list(temporary.iterdir())


def test_a_killed_writer_leaves_the_old_table(tmp_path):
    path = sft(tmp_path / "t.parquet", [1])

    def rows():
        yield from ({"input_ids": [i], "labels": [i]} for i in range(5000))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_table(path, SFT, rows(), {})
    assert [row["input_ids"] for row in iterate_rows(path, SFT)] == [[1]]
    assert list(tmp_path.iterdir()) == [path]


MEASURED = """
    import resource, sys
    from pathlib import Path
    from stages.base.tables import SFT, iterate_rows, random_access, write_table

    def anonymous():
        text = Path("/proc/self/status").read_text()
        return int(text.split("VmData:")[1].split()[0]) * 1024

    path, count = Path(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_DATA, (anonymous() + int(sys.argv[3]),) * 2)
    ids = list(range(512))
    rows = ({"input_ids": ids, "labels": [i] * 512} for i in range(count))
    assert write_table(path, SFT, rows, {}) == count
    with random_access(path, SFT) as rows:
        assert len(rows) == count and sum(rows.lengths("labels")) == 512 * count
        for i in range(0, count, 7):
            assert rows[i]["labels"][-1] == i
    assert sum(len(row["input_ids"]) for row in iterate_rows(path, SFT, 64)) == 512 * count
"""


def measured(tmp_path, rows, limit):
    environment = {
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "ARROW_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "TMPDIR": str(tmp_path),
    }
    return subprocess.run(
        [
            sys.executable,
            "-c",
            dedent(MEASURED),
            str(tmp_path / "t.parquet"),
            str(rows),
            str(limit),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is Linux's")
def test_memory_of_writing_and_reading_does_not_grow_with_the_table(tmp_path):
    """50 000 rows of 2 x 512 ids are 205 MB; 150 MB are allowed, of which a tenth is the batch."""
    done = measured(tmp_path, 50_000, 150_000_000)
    assert done.returncode == 0, done.stderr[-2000:]
