"""Rows, summaries and provenance of any table, without ever holding a whole one.

What is read: the footer; of each row group that may hold rows that fit (by its statistics) only the
columns asked for; and of those no more than are shown. At most `BATCH` rows are in memory at once.
A table is a Parquet file, or the folder of those of all rounds (`data/buffers`).
"""

import heapq
import json
import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from stages.base.errors import InputError
from stages.viewer.conditions import Condition

BATCH = 1024
FRUGAL = {
    "batch_size": BATCH,
    "batch_readahead": 1,
    "fragment_readahead": 1,
    "use_threads": False,
}
ROUND = re.compile(r"(round-\d+|sft)\.parquet")
START = "sft.parquet"
OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Summary:
    """One column: nulls, mean, lowest and highest value; None where that is not known.

    Of a list column these are of its items, `length` is the mean number of items, and all comes
    from the footers. Text has nulls only.
    """

    name: str
    kind: str
    nulls: int | None = None
    mean: float | None = None
    low: object = None
    high: object = None
    length: float | None = None


def by_rounds(folder: Path) -> bool:
    """True for a folder of nothing but round-k.parquet (and sft.parquet, the start), one schema."""
    files = visible(folder)
    if not all(ROUND.fullmatch(file.name) for file in files) or files in ([], [folder / START]):
        return False
    schemas = []
    for file in files:
        with readable(file):
            schemas.append(pq.read_schema(file))
    return all(schema.equals(schemas[0]) for schema in schemas)


def visible(folder: Path) -> list[Path]:
    """What lies in a folder, round-2 before round-10; nothing hidden or half written."""

    def natural(file: Path) -> list:
        return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", file.name)]

    return sorted(folder.glob("[!.]*"), key=natural)


class Table:
    """A file or a folder of files; `where` narrows what the methods below see of it.

    Rows are dicts; those of a folder begin with `file`, the name of the one that each stands in.
    """

    def __init__(self, path: Path):
        self.path, self.files = path, visible(path) if path.is_dir() else [path]
        self.condition: pc.Expression | None = None
        with readable(path):
            self._dataset = ds.dataset([str(file) for file in self.files], format="parquet")
        self.schema: pa.Schema = self._dataset.schema
        self.names: list[str] = self.schema.names

    def where(self, conditions: Sequence[Condition]) -> None:
        """Keep rows that fit all conditions; InputError for a column that is not there or unfit."""
        for condition in conditions:
            part = self._expression(condition)
            self.condition = part if self.condition is None else self.condition & part

    def _expression(self, condition: Condition) -> pc.Expression:
        kind, value = self.field(condition.column).type, condition.value
        column, said = pc.field(condition.column), f"{condition.column} {condition.operator}"
        if value is None:
            return column.is_null() if condition.operator == "==" else column.is_valid()
        wanted, order = _literal_of(kind)
        if not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool):
            raise InputError(f"condition {said!r} {value!r}: column {condition.column!r} is {kind}")
        if condition.operator == "~":
            if wanted is not str:
                raise InputError(f"condition {said!r}: column {condition.column!r} is {kind}")
            return pc.match_substring(column, value)
        if not order and condition.operator not in ("==", "!="):
            raise InputError(f"condition {said!r}: column {condition.column!r} is {kind}: == or !=")
        # 0.1 in float32 is another number than 0.1: the literal becomes what the column holds.
        scalar = pa.scalar(value, kind if pa.types.is_floating(kind) else None)
        return OPERATORS[condition.operator](column, pc.scalar(scalar))

    def check(self, name: str) -> None:
        """InputError for a column that is not there names those that are."""
        if name not in self.names:
            raise InputError(f"{self.path}: no column {name!r}; there are {', '.join(self.names)}")

    def field(self, name: str) -> pa.Field:
        """A column by name, checked."""
        self.check(name)
        return self.schema.field(name)

    def count(self) -> int:
        """Rows that fit; without conditions the footers know."""
        with readable(self.path):
            return self._dataset.count_rows(filter=self.condition, **FRUGAL)

    def first(self, count: int, columns: list[str] | None = None) -> list[dict]:
        """The first rows that fit."""
        found = []
        for part, _, batch in self._batches(columns):
            rows = batch.slice(0, count - len(found)).to_pylist()
            found += [self._named(row, part) for row in rows]
            if len(found) >= count:
                break
        return found

    def extreme(
        self, count: int, key: str, descending: bool, columns: list[str] | None = None
    ) -> list[dict]:
        """The rows with the lowest (or highest) `key`; nulls and NaN come last, ties in order.

        One pass over the key alone, then only the row groups that hold the rows found.
        """
        if pa.types.is_nested(self.field(key).type):
            raise InputError(f"{self.path}: column {key!r} holds a list; sort by a plain one")

        def keyed():
            for part, start, batch in self._batches([key]):
                for position, value in enumerate(batch.column(0).to_pylist(), start):
                    missing = value is None or value != value
                    rank = (missing != descending, None if missing else value)
                    yield rank, (part.number, position)

        pick = heapq.nlargest if descending else heapq.nsmallest
        places = [place for _, place in pick(count, keyed(), key=lambda item: item[0])]
        wanted = defaultdict(set)
        for part, position in places:
            wanted[part].add(position)
        found = {}
        for part, start, batch in self._batches(columns, parts=wanted):
            for position in wanted[part.number]:
                if start <= position < start + batch.num_rows:
                    row = batch.slice(position - start, 1).to_pylist()[0]
                    found[part.number, position] = self._named(row, part)
        return [found[place] for place in places]

    def _named(self, row: dict, part: "_Part") -> dict:
        return {"file": part.file} | row if len(self.files) > 1 else row

    def _parts(self) -> Iterator["_Part"]:
        """Row groups; the statistics of some spare reading them in vain."""
        number = 0
        for file in self._dataset.get_fragments(self.condition):
            for part in file.split_by_row_group():
                yield _Part(number, Path(file.path).stem, part)
                number += 1

    def _batches(
        self, columns: list[str] | None, parts=None
    ) -> Iterator[tuple["_Part", int, pa.RecordBatch]]:
        """(part, number of the batch's first row among those of the part that fit, batch)."""
        with readable(self.path):
            for part in self._parts():
                if parts is not None and part.number not in parts:
                    continue
                start = 0
                for batch in part.fragment.to_batches(
                    schema=self.schema, columns=columns, filter=self.condition, **FRUGAL
                ):
                    yield part, start, batch
                    start += batch.num_rows

    def summary(self) -> list[Summary]:
        """One entry a column: plain numbers over the rows that fit, the rest from the footers."""
        numbers = [field.name for field in self.schema if _is_number(field.type)]
        totals = {name: _Total() for name in numbers}
        for _, _, batch in self._batches(numbers) if numbers else ():
            for name in numbers:
                totals[name].add(batch.column(name))
        footers = self._footers() if self.condition is None else {}
        found = []
        for field in self.schema:
            known = totals[field.name] if field.name in totals else footers.get(field.name)
            known = {} if known is None else known.figures()
            found.append(Summary(field.name, _kind(field.type), **known))
        return found

    def _footers(self) -> dict[str, "_Footer"]:
        found = defaultdict(_Footer)
        for fragment in self._dataset.get_fragments():
            for group in range(fragment.metadata.num_row_groups):
                rows = fragment.metadata.row_group(group)
                for index in range(rows.num_columns):
                    column = rows.column(index)
                    found[column.path_in_schema.split(".")[0]].add(column, rows.num_rows)
        return found

    def provenance(self) -> dict[str, dict]:
        """File name -> what made it, as `write_table` noted; rows too."""
        found = {}
        for fragment in self._dataset.get_fragments():
            metadata = fragment.metadata.metadata or {}
            with readable(Path(fragment.path)):
                made = json.loads(metadata.get(b"provenance", b"{}"))
            found[Path(fragment.path).name] = {"rows": fragment.metadata.num_rows, **made}
        return found


@dataclass(frozen=True)
class _Part:
    """A row group; numbered in the order of reading."""

    number: int
    file: str
    fragment: ds.Fragment


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What a reader of files may raise -> InputError with the file's name."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise InputError(f"{path}: cannot be read as a table ({error})") from error


def _literal_of(kind: pa.DataType) -> tuple[type | tuple, bool]:
    """Column type -> Python types of a literal beside it, and whether < and > make sense."""
    if pa.types.is_boolean(kind):
        return bool, False
    if _is_number(kind):
        return (int, float), True
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return str, True
    return (), False


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _kind(kind: pa.DataType) -> str:
    """int32, string, list of int32, struct."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list of {_kind(kind.value_type)}"
    return "struct" if pa.types.is_struct(kind) else str(kind)


class _Total:
    """Sum, extremes and nulls of a column of numbers, batch by batch; NaN spoils the mean."""

    def __init__(self):
        self.count = self.nulls = 0
        self.sum, self.low, self.high = 0.0, math.inf, -math.inf

    def add(self, column: pa.Array) -> None:
        self.nulls += column.null_count
        self.count += len(column) - column.null_count
        if len(column) > column.null_count:
            self.sum += float(pc.sum(column).as_py())
            extremes = pc.min_max(column).as_py()
            self.low = min(self.low, extremes["min"])
            self.high = max(self.high, extremes["max"])

    def figures(self) -> dict:
        if not self.count:
            return {"nulls": self.nulls}
        mean = self.sum / self.count
        return {"nulls": self.nulls, "mean": mean, "low": self.low, "high": self.high}


class _Footer:
    """What the statistics of all row groups say of a text or list column."""

    def __init__(self):
        self.rows = self.items = self.nulls = 0
        self.low, self.high, self.is_list = math.inf, -math.inf, False

    def add(self, column, rows: int) -> None:
        self.rows += rows
        self.is_list |= "." in column.path_in_schema
        known = column.statistics
        if known is None:
            return
        self.nulls += known.null_count or 0
        self.items += known.num_values
        if known.has_min_max and not isinstance(known.min, str | bytes):
            self.low, self.high = min(self.low, known.min), max(self.high, known.max)

    def figures(self) -> dict:
        found = {"nulls": self.nulls}
        if self.is_list and self.items and self.low <= self.high:
            length = self.items / max(1, self.rows - self.nulls)
            found |= {"low": self.low, "high": self.high, "length": length}
        return found
