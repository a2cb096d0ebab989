"""Rows of what is no Parquet file, read one by one: no more of them than are shown.

JSONL, JSON arrays and CSV (also as .gz) and folders of `save_to_disk` come through the readers of
the stages, so that what these accept can be seen; rows need not have the same columns or kinds.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path

from stages.base.errors import InputError
from stages.rows.formats import format_of
from stages.rows.readers import read_rows
from stages.text.messages import kind_of
from stages.viewer.conditions import NUMBER, Condition
from stages.viewer.rows import BATCH, OPERATORS, Summary, readable


class Stream:
    """Rows of a file or folder; `where` narrows what the methods below see, as with `Table`.

    A row holds the columns that it has itself, `file` always.
    """

    def __init__(self, path: Path, rows: Callable[[], Iterator[dict]]):
        self.path, self._read = path, rows
        self.condition: Sequence[Condition] | None = None

    @classmethod
    def of_dataset(cls, path: Path) -> "Stream":
        """What `read_rows` reads; a cell of CSV that is written as a number is one."""
        no = dict.fromkeys(("split", "name", "revision", "max_samples"))
        parse = _cells if path.is_file() and format_of(path) == ".csv" else dict
        return cls(path, lambda: (parse(row) for _, row in read_rows(str(path), seed=0, **no)))

    @cached_property
    def names(self) -> list[str]:
        """The columns of the first `BATCH` rows."""
        with readable(self.path):
            return list(dict.fromkeys(name for row in islice(self._read(), BATCH) for name in row))

    def where(self, conditions: Sequence[Condition]) -> None:
        """Keep rows that fit all conditions; InputError for a column that is not there."""
        for condition in conditions:
            self.check(condition.column)
        self.condition = conditions or None

    def check(self, name: str) -> None:
        if name not in self.names:
            raise InputError(f"{self.path}: no column {name!r}; there are {', '.join(self.names)}")

    def _rows(self) -> Iterator[dict]:
        with readable(self.path):
            for row in self._read():
                if all(_fits(row, condition) for condition in self.condition or ()):
                    yield row

    def count(self) -> int:
        """Rows that fit, by reading all."""
        return sum(1 for _ in self._rows())

    def first(self, count: int, columns: list[str] | None = None) -> list[dict]:
        """The first rows that fit."""
        return [_only(row, columns) for row in islice(self._rows(), count)]

    def extreme(
        self, count: int, key: str, descending: bool, columns: list[str] | None = None
    ) -> list[dict]:
        """The rows with the lowest (or highest) `key`; nulls and NaN come last, ties in order."""
        self.check(key)

        def rank(row: dict) -> tuple:
            value = row.get(key)
            if isinstance(value, list | dict):
                raise InputError(f"{self.path}: column {key!r} holds {kind_of(value)}; no order")
            missing = value is None or value != value
            return (missing != descending, isinstance(value, str), 0 if missing else value)

        pick = heapq.nlargest if descending else heapq.nsmallest
        return [_only(row, columns) for row in pick(count, self._rows(), key=rank)]

    def summary(self) -> list[Summary]:
        """One entry a column, by reading all: the kinds of its values; figures of its numbers."""
        columns, rows = {}, 0
        for row in self._rows():
            rows += 1
            for name, value in row.items():
                columns.setdefault(name, _Column()).add(value)
        return [column.summary(name, rows) for name, column in columns.items()]

    def provenance(self) -> dict[str, dict]:
        """Nothing: only the stages' tables tell what made them."""
        return {}


def _cells(row: dict[str, str]) -> dict:
    return {name: _cell(text) for name, text in row.items()}


def _cell(text: str) -> object:
    """A number where writing it again gives the same digits, null where empty, else the text."""
    if not NUMBER.fullmatch(text):
        return text or None
    if text.lstrip("-").isdigit():
        return int(text) if str(int(text)) == text else text
    return float(text)


def _only(row: dict, columns: list[str] | None) -> dict:
    if columns is None:
        return row
    return {name: row[name] for name in ("file", *columns) if name in row}


def _fits(row: dict, condition: Condition) -> bool:
    value, wanted = row.get(condition.column), condition.value
    if wanted is None:
        return (value is None) == (condition.operator == "==")
    if value is None:
        return False
    if condition.operator == "~":
        return isinstance(value, str) and str(wanted) in value
    try:
        return OPERATORS[condition.operator](value, wanted)
    except TypeError:  # text < 1: rows of a stream may differ in kind
        return False


class _Column:
    """Kinds, nulls and the numbers of a column, value by value; NaN spoils the mean."""

    def __init__(self):
        self.kinds, self.known, self.count = {}, 0, 0
        self.sum, self.low, self.high = 0, math.inf, -math.inf

    def add(self, value: object) -> None:
        if value is None:
            return
        self.known += 1
        self.kinds[kind_of(value)] = True
        if isinstance(value, int | float):
            self.count += 1
            self.sum += value
            self.low, self.high = min(self.low, value), max(self.high, value)

    def summary(self, name: str, rows: int) -> Summary:
        found = Summary(name, " or ".join(self.kinds), rows - self.known)
        if not self.count:
            return found
        return replace(found, mean=self.sum / self.count, low=self.low, high=self.high)
