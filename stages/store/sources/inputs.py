"""The rows that a stage was asked for: the embedded task's, or those of a dataset knob."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import click

from stages.core.rows.canonical import CanonicalRow, open_rows
from stages.core.text.messages import Dropped
from stages.knobs.base import Source
from stages.store.common.command import spelled_out
from stages.store.sources.readers import read_rows

EMBEDDED = "task"


class Intake:
    """Counts what became of one source's rows: rows in = rows kept + rows dropped, by reason."""

    def __init__(self, name: str):
        self.name = name
        self.rows = self.kept = 0
        self.dropped: Counter[str] = Counter()
        self.first: dict[str, int] = {}

    def keep(self) -> None:
        self.rows += 1
        self.kept += 1

    def drop(self, row_number: int, reason: str) -> None:
        self.rows += 1
        self.dropped[reason] += 1
        self.first.setdefault(reason, row_number)

    def figures(self) -> dict:
        """rows read, kept and dropped (with the reasons), for a stage's metrics."""
        return {
            "rows": self.rows,
            "kept": self.kept,
            "dropped": sum(self.dropped.values()),
            "dropped_by_reason": dict(sorted(self.dropped.items())),
        }

    def report(self) -> None:
        """Print each reason once, with the number of rows and the first of them."""
        for reason, count in sorted(self.dropped.items()):
            first = f"first: row {self.first[reason]}"
            click.echo(spelled_out(f"{self.name}: dropped {count} rows: {reason} ({first})"))


def open_source(
    kind: str, source: Source, task_file: Path, seed: int
) -> tuple[str, Iterator[tuple[int, CanonicalRow]]]:
    """Knobs of a source -> its name, and its rows as (row number, canonical row or Dropped).

    `task_file` stands in where the dataset is `task`. Prints which format was detected.
    """
    embedded = source.dataset == EMBEDDED
    name = str(task_file) if embedded else source.dataset
    rows = read_rows(
        name,
        split=None if embedded else source.split,
        name=source.name,
        revision=source.revision,
        max_samples=source.max_samples,
        seed=seed,
    )
    layout, rows = open_rows(kind, rows, source.format, source.columns, name)
    named = "".join(
        f", {column!r} as {field!r}" for field, column in (source.columns or {}).items()
    )
    ignored = f"; not read: {', '.join(layout.unread)}" if layout.unread else ""
    click.echo(spelled_out(f"{name}: rows in format {layout.name!r}{named}{ignored}"))
    return name, rows


def batches(rows: Iterable, size: int = 1000) -> Iterator[list]:
    """Rows in lists of up to `size`, read as they are needed."""
    rows = iter(rows)
    while batch := list(islice(rows, size)):
        yield batch


def usable(batch: list, intake: Intake) -> tuple[list[int], list]:
    """(row number, row or Dropped) pairs -> numbers and rows of the usable; the rest is counted."""
    numbers, rows = [], []
    for number, row in batch:
        if isinstance(row, Dropped):
            intake.drop(number, row.reason)
        else:
            numbers.append(number)
            rows.append(row)
    return numbers, rows
