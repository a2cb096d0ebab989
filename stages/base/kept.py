"""Rows that a stage has finished, kept batch by batch, so that a cut-off stage goes on after them.

They wait in memory until RLHF_SAVE_MINUTES have passed (or 64 MiB wait), and are written when a
signal ends the stage. A stage shorter than that writes nothing.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
import pyarrow as pa

from stages.base.command import on_signals
from stages.base.environment import rank, save_seconds
from stages.base.scratch import Work, clear, drop, read_part, write_part
from stages.base.tables import exact

WAITING = 64 << 20  # bytes
ROWS = "rows.arrow"

Table = pa.RecordBatch
# (batches that were found, values of the last one) -> the batches after them, each with its values
Rest = Callable[[int, dict | None], Iterable[tuple]]


class Kept:
    """The finished batches of one piece of work; of None none is kept.

    A stage may have several streams of batches, each under a name of its own. Beside a batch stand
    plain values: what its stream needs in order to go on.
    """

    def __init__(self, work: Work | None):
        self.work, self.seconds = work, save_seconds() if work else None
        self._began = self._last = time.monotonic()
        self._saved = 0.0  # seconds of work of runs that were cut off
        self._waiting: dict[str, list[tuple[Table, dict]]] = {}
        self._bytes, self._written = 0, Counter()
        self._signal, self._writing = None, False

    def rows(self, name: str, schema: pa.Schema, rest: Rest) -> Iterator[tuple[list[dict], dict]]:
        """`batches` of rows as dicts, which come back as they were, to the last bit."""
        pack = partial(Table.from_pylist, schema=exact(schema))
        return self.batches(name, rest, pack, Table.to_pylist)

    def batches(self, name: str, rest: Rest, pack=lambda x: x, unpack=lambda x: x) -> Iterator:
        """Yield the batches of a stream with their values: those found, then those of `rest`.

        `pack` and `unpack` make a record batch of a batch, and the reverse.
        """
        last = None
        for table, last in self._found(name) if self.seconds else ():
            yield unpack(table), last
        if done := self._written[name]:
            place = f"goes on after batch {done} of {name} ({self._saved / 60:.1f} min saved)"
            click.echo(f"{self.work.stage}: {place}")
        for batch, values in rest(done, last):
            if self.seconds and not rank():  # of several processes the first one keeps them
                self._add(name, pack(batch), values)
            yield batch, values

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hear SIGTERM and SIGINT inside: what is finished is written, and the stage ends.

        That happens at once, not at the end of a batch, which may take longer than a scheduler
        waits. A second signal ends the stage whatever it does.
        """
        if not self.seconds:
            yield
            return
        with on_signals(self._heard):
            yield

    def done(self) -> None:
        """Remove what was kept: the outputs are written."""
        if self.work:
            drop(self.work)

    def _heard(self, number: int) -> None:
        self._signal = number
        if not self._writing:
            self._write()

    def _add(self, name: str, table: Table, values: dict) -> None:
        self._waiting.setdefault(name, []).append((table, values))
        self._bytes += table.nbytes
        late = time.monotonic() - self._last >= self.seconds
        if late or self._bytes >= WAITING or self._signal is not None:
            self._write()

    def _write(self) -> None:
        """Write what waits; after a signal the stage ends here."""
        self._writing, whole = True, True
        for name, waiting in self._waiting.items():
            first = self._written[name]
            values = {
                "first": first,
                "seconds": self._saved + time.monotonic() - self._began,
                "batches": [values for _, values in waiting],
            }
            tables = [table for table, _ in waiting]
            size, write = sum(t.nbytes for t in tables), partial(_write_tables, tables)
            whole &= write_part(self.work, f"{name}-{first:09d}", size, write, values)
            self._written[name] += len(waiting)
        self._waiting, self._bytes, self._last = {}, 0, time.monotonic()
        self._writing = False
        if self._signal is not None:
            raise SystemExit(128 + self._signal)
        if not whole:
            self.seconds = None  # what came later would have a gap before it

    def _found(self, name: str) -> Iterator[tuple[Table, dict]]:
        """Batches that a cut-off run of the same work left, up to the first that is not whole."""
        folder = self.work.found()
        parts = sorted(folder.glob(f"{name}-*")) if folder else []
        while parts:
            part = read_part(self.work, parts[0], _read_tables)
            if part is None or part[1]["first"] != self._written[name]:
                break
            tables, values = part
            self._written[name] += len(tables)
            self._saved = max(self._saved, values["seconds"])
            yield from zip(tables, values["batches"], strict=True)
            parts = parts[1:]
        for part in parts:
            clear(part)


def _write_tables(tables: list[Table], folder: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(folder / ROWS, tables[0].schema, options=options) as writer:
        for table in tables:
            writer.write_batch(table)


def _read_tables(folder: Path) -> list[Table]:
    with pa.OSFile(str(folder / ROWS)) as file, pa.ipc.open_file(file) as reader:
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]
