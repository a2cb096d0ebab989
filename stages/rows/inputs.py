"""The rows that a stage was asked for: the embedded task's, or those of a dataset knob."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from itertools import chain, islice
from pathlib import Path

import click
import pyarrow as pa

from stages.base.chunks import chunks
from stages.base.command import progress
from stages.base.errors import InputError
from stages.base.kept import Kept
from stages.base.knobs import Source
from stages.base.spelling import spelled_out
from stages.rows.canonical import SAMPLED_ROWS, CanonicalRow, count_reason, open_rows
from stages.rows.formats import BATCH
from stages.rows.readers import on_this_disk, read_rows
from stages.rows.workers import in_order
from stages.text.messages import Dropped

EMBEDDED = "task"


class Intake:
    """Counts what became of one source's rows: rows in = rows kept + rows dropped, by reason.

    `sums` holds what else a stage counts of the rows that it kept, under the names that it gives.
    One is always there, `tools_unseen`: rows with tools of which the chat template takes no notice.
    """

    def __init__(self, name: str, *summed: str):
        self.name = name
        self.rows = self.kept = 0
        self.sums = Counter(dict.fromkeys(("tools_unseen", *summed), 0))
        self.dropped: Counter[str] = Counter()
        self.first: dict[str, int] = {}

    def drop(self, row_number: int, reason: str) -> None:
        self.rows += 1
        reason = count_reason(self.dropped, spelled_out(reason))
        self.first.setdefault(reason, row_number)

    def add(self, kept: Sized, dropped: list[tuple[int, str]], sums: Counter) -> None:
        """Count what `settle` made of a batch."""
        self.rows += len(kept)
        self.kept += len(kept)
        for number, reason in dropped:
            self.drop(number, reason)
        self.sums.update(sums)

    def figures(self) -> dict:
        """rows read, kept and dropped (with the reasons) and the sums, for a stage's metrics."""
        return {
            "rows": self.rows,
            "kept": self.kept,
            "dropped": sum(self.dropped.values()),
            "dropped_by_reason": dict(sorted(self.dropped.items())),
        } | self.sums

    def close(self) -> None:
        """Print each reason once, with its rows and their first; InputError where none was kept."""
        for reason, count in sorted(self.dropped.items()):
            first = f"first: row {self.first[reason]}"
            click.echo(spelled_out(f"{self.name}: dropped {count} rows: {reason} ({first})"))
        if unseen := self.sums["tools_unseen"]:
            found = f"takes no notice of the tools of {unseen} rows"
            click.echo(spelled_out(f"{self.name}: the chat template {found}"))
        if not self.kept:
            raise InputError(f"{self.name}: no row was kept of {self.rows}")


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


def files_of_source(source: Source, task_file: Path) -> list[Path]:
    """The file or folder that a source is read from; none where it is read from the hub."""
    if source.dataset == EMBEDDED:
        return [task_file]
    return [Path(source.dataset)] if on_this_disk(source.dataset) else []


def look_into(
    kind: str, source: Source, task_rows: list[dict], seed: int
) -> Iterator[tuple[int, CanonicalRow]]:
    """The rows of a source (`task_rows` of the embedded task) once its first ones were read.

    InputError where no later stage could use them.
    """
    if source.dataset == EMBEDDED:
        rows = enumerate(task_rows, start=1)
        _, rows = open_rows(kind, rows, source.format, source.columns, EMBEDDED)
    else:
        _, rows = open_source(kind, source, Path(EMBEDDED), seed)
    first = list(islice(rows, SAMPLED_ROWS + 1))
    return chain(first, rows)


Encode = Callable[[list], Iterable[Dropped | tuple[object, dict[str, int]]]]


def settle(
    encode: Encode, batch: list[tuple[int, CanonicalRow]]
) -> tuple[list[tuple[int, object]], list[tuple[int, str]], Counter]:
    """Numbered rows -> what `encode` makes of the usable ones, the numbers dropped and why, sums.

    `encode(rows)` says of each row why it is dropped, or what becomes of it and what it adds to the
    sums.
    """
    usable = [(number, row) for number, row in batch if not isinstance(row, Dropped)]
    dropped = [(number, row.reason) for number, row in batch if isinstance(row, Dropped)]
    kept, sums = [], Counter()
    results = encode([row for _, row in usable])
    for (number, _), result in zip(usable, results, strict=True):
        if isinstance(result, Dropped):
            dropped.append((number, result.reason))
        else:
            kept.append((number, result[0]))
            sums.update(result[1])
    return kept, dropped, sums


def tokenized(
    rows: Iterable[tuple[int, CanonicalRow]],
    encode: Encode,
    schema: pa.Schema,
    intake: Intake,
    kept: Kept,
) -> Iterator[pa.RecordBatch]:
    """Numbered canonical rows -> tables of a schema, by all cores; counted in `intake`.

    InputError at the end where no row was kept, so that the table is not written.
    """

    def rest(done: int, _) -> Iterator[tuple[pa.RecordBatch, dict]]:
        batches = islice(chunks(progress(rows, "tokenize"), BATCH), done, None)
        for batch, dropped, sums in in_order(partial(_table, encode, schema), batches):
            yield batch, {"dropped": dropped, "sums": sums}

    for batch, counted in kept.batches("rows", rest):
        intake.add(batch, counted["dropped"], counted["sums"])
        yield batch
    intake.close()


def _table(encode: Encode, schema: pa.Schema, batch: list):
    kept, dropped, sums = settle(encode, batch)
    return pa.RecordBatch.from_pylist([row for _, row in kept], schema), dropped, sums
