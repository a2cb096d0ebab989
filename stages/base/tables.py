"""The Parquet tables between the stages: explicit schemas, bounded row groups, checked when read.

List columns have true lengths: nothing padded is ever stored. A null is allowed only where the
schema says so (`reward` null: the completion could not be scored).
"""

import json
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stages.base.chunks import chunks
from stages.base.errors import InputError, MissingFile
from stages.base.files import naming, replacing

SCHEMA_VERSION = "1"
ROWS_PER_GROUP = 1024
IGNORED = -100  # the label of a token that is read, not learned


def _list(item: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", item, nullable=False))


def _schema(required: dict, nullable: dict | None = None) -> pa.Schema:
    fields = [pa.field(name, kind, nullable=False) for name, kind in required.items()]
    return pa.schema(fields + [pa.field(name, kind) for name, kind in (nullable or {}).items()])


IDS, FLOATS = _list(pa.int32()), _list(pa.float32())

SFT = _schema({"input_ids": IDS, "labels": IDS})
PAIRS = _schema({"prompt_ids": IDS, "chosen_ids": IDS, "rejected_ids": IDS, "margin": pa.float32()})
SCORED_PAIRS = pa.schema(
    [
        *PAIRS,
        pa.field("log_probs_ref_chosen", FLOATS, nullable=False),
        pa.field("log_probs_ref_rejected", FLOATS, nullable=False),
    ]
)
# A completion that is right (1) or wrong (0).
LABELLED = _schema({"prompt_ids": IDS, "completion_ids": IDS, "label": pa.float32()})
ROLLOUTS = _schema(
    {
        "round": pa.int32(),
        "group": pa.int32(),
        "sample": pa.int32(),
        "prompt_index": pa.int32(),
        "prompt": pa.string(),
        "completion": pa.string(),
        "prompt_ids": IDS,
        "completion_ids": IDS,
        "finished": pa.bool_(),
        "log_probs_old": FLOATS,
    },
    {
        "answer": pa.string(),
        "log_probs_sampler": FLOATS,
        "reward_correctness": pa.float32(),
        "reward_format": pa.float32(),
        "reward_length": pa.float32(),
    },
)
BUFFERS = pa.schema(
    [
        *ROLLOUTS,
        pa.field("reward_model", pa.float32()),
        pa.field("reward", pa.float32()),
        pa.field("log_probs_ref", FLOATS),
        pa.field("values_old", FLOATS),
    ]
)
UPDATES = _schema(
    {
        "round": pa.int32(),
        "group": pa.int32(),
        "sample": pa.int32(),
        "advantage": FLOATS,
        "used": pa.bool_(),
    },
    {
        "reward_shaped": pa.float32(),
        "ratio": FLOATS,
        "ratio_mean": pa.float32(),
        "ratio_max": pa.float32(),
        "clipped_fraction": pa.float32(),
        "kl": pa.float32(),
    },
)
EVALUATIONS = _schema(
    {
        "prompt_index": pa.int32(),
        "sample": pa.int32(),
        "greedy": pa.bool_(),
        "prompt": pa.string(),
        "completion": pa.string(),
        "completion_ids": IDS,
        "finished": pa.bool_(),
        "correct": pa.bool_(),
    },
    {"answer": pa.string(), "reward_correctness": pa.float32()},
)


def exact(schema: pa.Schema) -> pa.Schema:
    """A schema with float64 for float32: what Python's numbers lose nothing in."""
    wide = {pa.float32(): pa.float64(), FLOATS: _list(pa.float64())}
    return pa.schema([field.with_type(wide.get(field.type, field.type)) for field in schema])


def write_table(
    path: Path, schema: pa.Schema, rows: Iterable[dict], provenance: dict | Callable[[], dict]
) -> int:
    """Write rows (dicts with exactly the schema's keys) and return how many there were.

    Rows are taken as they come, at most `ROWS_PER_GROUP` in memory. `provenance` (plain JSON
    values: what made the table, or a function called once the rows have passed) goes into the
    file's metadata beside `schema_version`. A surplus or missing key is an error, never dropped,
    and so is a null where the schema allows none.
    """
    return write_batches(path, schema, _record_batches(path, schema, rows), provenance)


def _record_batches(path: Path, schema: pa.Schema, rows: Iterable[dict]) -> Iterator:
    names, count = set(schema.names), 0
    for chunk in chunks(rows, ROWS_PER_GROUP):
        for number, row in enumerate(chunk, start=count):
            if row.keys() != names:
                odd = sorted(row.keys() ^ names)
                raise ValueError(f"{path}: row {number} has other columns: {odd}")
        for field in schema:
            _check_whole_numbers(path, chunk, field, count)
        count += len(chunk)
        yield pa.RecordBatch.from_pylist(chunk, schema=schema)


def write_batches(
    path: Path,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    provenance: dict | Callable[[], dict],
) -> int:
    """`write_table` for rows that are in Arrow's memory already, in batches of any size."""
    schema, count = schema.with_metadata({"schema_version": SCHEMA_VERSION}), 0
    with replacing(path) as temporary:
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for batch in _of_one_size(batches, schema):
                for field in schema:
                    _check_nulls(path, batch.column(field.name), field, count)
                writer.write_batch(batch)
                count += batch.num_rows
            made = provenance() if callable(provenance) else provenance
            text = json.dumps(made, sort_keys=True, ensure_ascii=False)
            writer.add_key_value_metadata({"provenance": text})
    return count


def _of_one_size(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows in batches of ROWS_PER_GROUP; the last one holds the rest."""
    waiting = pa.Table.from_batches([], schema)
    for batch in batches:
        waiting = pa.concat_tables([waiting, pa.Table.from_batches([batch], schema)])
        while waiting.num_rows >= ROWS_PER_GROUP:
            yield from waiting.slice(0, ROWS_PER_GROUP).combine_chunks().to_batches()
            waiting = waiting.slice(ROWS_PER_GROUP)
    if waiting.num_rows:
        yield from waiting.combine_chunks().to_batches()


def _check_whole_numbers(path: Path, chunk: list[dict], field: pa.Field, start: int) -> None:
    """Raise ValueError for a fraction in an integer column, which Arrow would cut off."""
    many = pa.types.is_list(field.type)
    if not pa.types.is_integer(field.type.value_type if many else field.type):
        return
    for number, row in enumerate(chunk, start=start):
        value = row[field.name]
        kinds = set(map(type, value if many and value is not None else [value]))
        if any(issubclass(kind, float) for kind in kinds):
            raise ValueError(
                f"{path}: row {number}: {field.name!r} holds a number that is not whole"
            )


def open_table(path: Path, schema: pa.Schema) -> pq.ParquetFile:
    """Open and check a table: `InputError` names the file and the column that is not `schema`'s.

    A table without rows is refused too: nothing comes of one, and no stage means to write it.
    """
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError as error:
        raise MissingFile(path, "a Parquet table that a stage wrote") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: not a readable Parquet file ({error})") from error
    found = file.schema_arrow
    for field in schema:
        if field.name not in found.names:
            raise InputError(f"{path}: column {field.name!r} is missing, expected {field.type}")
        kind = found.field(field.name).type
        if not kind.equals(field.type) and str(kind) != str(field.type):
            raise InputError(f"{path}: column {field.name!r} is {kind}, expected {field.type}")
    if surplus := [name for name in found.names if name not in schema.names]:
        raise InputError(f"{path}: unexpected columns {surplus}, expected {schema.names}")
    version = (found.metadata or {}).get(b"schema_version", b"none").decode()
    if version != SCHEMA_VERSION:
        raise InputError(f"{path}: schema_version is {version}, expected {SCHEMA_VERSION}")
    if not file.metadata.num_rows:
        raise InputError(f"{path}: no rows; expected at least one")
    return file


def schema_of(path: Path, *schemas: pa.Schema) -> pa.Schema:
    """The first of some schemas of which a table has all columns; InputError names what it has."""
    try:
        found = pq.read_schema(path).names
    except FileNotFoundError as error:
        raise MissingFile(path, "a Parquet table that a stage wrote") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: not a readable Parquet file ({error})") from error
    for schema in schemas:
        if set(schema.names) <= set(found):
            return schema
    wanted = " or ".join(str(schema.names) for schema in schemas)
    raise InputError(f"{path}: its columns are {found}, expected those of {wanted}")


def read_provenance(path: Path) -> dict:
    """What made a table: the JSON object that `write_table` stored in its metadata."""
    return json.loads((pq.read_metadata(path).metadata or {}).get(b"provenance", b"{}"))


def iterate_batches(
    path: Path,
    schema: pa.Schema,
    size: int = ROWS_PER_GROUP,
    columns: Sequence[str] | None = None,
):
    """Yield the table as record batches of at most `size` rows, checked for forbidden nulls.

    With `columns` only those are read.
    """
    start, columns = 0, list(schema.names if columns is None else columns)
    with open_table(path, schema) as file:
        for batch in _readable(path, file.iter_batches(batch_size=size, columns=columns)):
            for field in map(schema.field, columns):
                _check_nulls(path, batch.column(field.name), field, start)
            yield batch
            start += batch.num_rows


def _readable(path: Path, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path}: a broken Parquet file ({error})") from error
        if batch is None:
            return
        yield batch


def iterate_rows(path: Path, schema: pa.Schema, size: int = ROWS_PER_GROUP) -> Iterator[dict]:
    """Yield the rows of a table as dicts, batch by batch."""
    for batch in iterate_batches(path, schema, size):
        yield from batch.to_pylist()


def _check_nulls(path: Path, column: pa.Array, field: pa.Field, start: int) -> None:
    if not field.nullable and column.null_count:
        row = start + column.is_null().to_pylist().index(True)
        raise InputError(f"{path}: row {row} has no {field.name!r}, expected {field.type}")
    if pa.types.is_list(field.type) and column.flatten().null_count:
        for index, items in enumerate(column.to_pylist()):
            if items is not None and None in items:
                raise InputError(
                    f"{path}: row {start + index} has a null inside {field.name!r},"
                    f" expected {field.type}"
                )


class Rows(Sequence):
    """A table by row number, from a memory map.

    Rows are decoded when asked for, so memory does not grow with the file. `rows[i]` is a dict.
    `lengths(column)` gives the list lengths of all rows without reading the lists twice.
    """

    def __init__(self, path: Path, batches: list[pa.RecordBatch], lengths: dict[str, list[int]]):
        self.path, self._batches, self._lengths = path, batches, lengths
        self._starts = list(accumulate((b.num_rows for b in batches), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(index)
        batch = bisect_right(self._starts, index) - 1
        return self._batches[batch].slice(index - self._starts[batch], 1).to_pylist()[0]

    def lengths(self, column: str) -> list[int]:
        return self._lengths[column]


@contextmanager
def random_access(path: Path, schema: pa.Schema) -> Iterator[Rows]:
    """Open a table for rows in any order; the uncompressed copy behind it is a temporary file."""
    list_columns = [f.name for f in schema if pa.types.is_list(f.type) and not f.nullable]
    lengths = {name: [] for name in list_columns}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "rows.arrow"
        with naming(copy), pa.ipc.new_file(copy, schema) as writer:
            for batch in iterate_batches(path, schema):
                for name in list_columns:
                    lengths[name] += batch.column(name).value_lengths().to_pylist()
                columns = [batch.column(field.name).cast(field.type) for field in schema]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        with pa.memory_map(str(copy)) as mapped:
            reader = pa.ipc.open_file(mapped)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            yield Rows(path, batches, lengths)
