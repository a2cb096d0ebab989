"""The kinds of file that rows are read from, each as a stream of (row number, row)."""

import codecs
import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO

import pyarrow
import pyarrow.parquet

from stages.base.errors import InputError
from stages.text.messages import kind_of

CHUNK = 1 << 16
LONGEST_VALUE = 1 << 26
BATCH = 256  # rows that are read, tokenized and passed on together

NumberedRows = Iterator[tuple[int, dict]]


@dataclass(frozen=True)
class Rows:
    """How to read a kind of file, how to count its rows, and what it must hold, in words."""

    read: Callable[[Path], NumberedRows]
    count: Callable[[Path], int]
    expected: str


def format_of(path: Path) -> str:
    """The key of FORMATS for a file name, `.gz` aside; InputError for another ending."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    kind = suffixes[0] if suffixes[1:] == [".gz"] else (suffixes or [""])[-1]
    if kind not in FORMATS or (kind == ".parquet" and suffixes[-1] == ".gz"):
        endings = ", ".join(FORMATS)
        raise InputError(f"{path}: unknown kind of file; expected {endings} (text also as .gz)")
    return kind


def read_jsonl(path: Path) -> NumberedRows:
    """One JSON object a line; blank lines are passed over. The number is that of the line."""
    expected = "expected one JSON object a line"
    with _open(path) as file:
        for number, line in enumerate(_lines(file, path), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise InputError(f"{path}:{number}: broken JSON ({error}); {expected}") from None
            yield number, _object(row, f"{path}:{number}", expected)


def read_json(path: Path) -> NumberedRows:
    """A JSON array of objects, or objects one after another, parsed piece by piece."""
    expected = "expected a JSON array of objects"
    with _open(path) as file:
        for number, (line, row) in enumerate(_json_values(file, path, expected), start=1):
            yield number, _object(row, f"{path}:{line}", expected)


def read_csv(path: Path) -> NumberedRows:
    """Comma-separated values under a header; cells are text and an empty cell is empty text."""
    csv.field_size_limit(LONGEST_VALUE)  # the default refuses cells above 128 KiB
    with _open(path) as file:
        reader = csv.reader(_lines(file, path), strict=True)
        try:
            header = next(reader, None)
            if header is None:
                return
            if len(set(header)) < len(header) or not all(header):
                raise InputError(f"{path}:1: expected a header of distinct names, found {header}")
            for number, cells in enumerate((cells for cells in reader if cells), start=1):
                if len(cells) != len(header):
                    found = f"{len(cells)} cells, expected {len(header)} as in the header"
                    raise InputError(f"{path}:{reader.line_num}: {found}")
                yield number, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            raise InputError(f"{path}:{reader.line_num}: broken CSV ({error})") from None


def read_parquet(path: Path) -> NumberedRows:
    """A Parquet file, read batch by batch."""
    number = 0
    with _open_parquet(path) as file:
        for batch in file.iter_batches(batch_size=BATCH):
            for number, row in enumerate(batch.to_pylist(), start=number + 1):  # noqa: B020
                yield number, row


def count_parquet(path: Path) -> int:
    with _open_parquet(path) as file:
        return file.metadata.num_rows


@contextmanager
def _open_parquet(path: Path):
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        line = (str(error).splitlines() or ["no reason given"])[0]
        raise InputError(f"{path}: expected a Parquet file ({line})") from error


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")


def _lines(file: BinaryIO, path: Path) -> Iterator[str]:
    lines = iter(file)
    for number in count(1):
        with _readable(path, number):
            line = next(lines, None)
            if line is None:
                return
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        yield text


@contextmanager
def _readable(path: Path, line: int):
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{line}: expected UTF-8 text ({error.reason})") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}:{line}: expected a whole gzip file ({error})") from None


def _object(row, where: str, expected: str) -> dict:
    if not isinstance(row, dict):
        raise InputError(f"{where}: holds {kind_of(row)}; {expected}")
    return row


def _json_values(file: BinaryIO, path: Path, expected: str) -> Iterator[tuple[int, object]]:
    """The values of an array, or of a sequence, each with the line on which it starts."""
    reader = _JsonReader(file, path, expected)
    array = reader.take("[")
    first = True
    while not reader.ended():
        if array and reader.take("]"):
            if not reader.ended():
                raise reader.error("something after the end of the array")
            return
        if array and not first and not reader.take(","):
            raise reader.error("no comma between two values")
        first = False
        if reader.ended():
            break
        yield reader.line, reader.value()
    if array:
        raise reader.error("the array does not end")


class _JsonReader:
    """A window on a JSON text that holds the value being read, and not much more.

    ijson would make a question mark of half a surrogate pair, unsaid, knows no line numbers and
    takes no whole number beyond 64 bits.
    """

    def __init__(self, file: BinaryIO, path: Path, expected: str):
        self.file = codecs.getreader("utf-8-sig")(file)
        self.path, self.expected = path, expected
        self.buffer, self.line, self.whole = "", 1, False

    def ended(self) -> bool:
        """Passes over white space; whether nothing is left."""
        while True:
            rest = self.buffer.lstrip(" \t\r\n")
            self._pass(len(self.buffer) - len(rest))
            if rest or self.whole:
                return not rest
            self._read(CHUNK)

    def take(self, sign: str) -> bool:
        """Passes over a sign, if it comes next."""
        found = not self.ended() and self.buffer[0] == sign
        self._pass(int(found))
        return found

    def value(self):
        """The value that comes next. Reads on, twice as far each time, until it is whole."""
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self.buffer)
                self._pass(end)
                return value
            except (json.JSONDecodeError, RecursionError) as error:
                if self.whole or len(self.buffer) > LONGEST_VALUE:
                    message = getattr(error, "msg", "too deep")
                    self._pass(getattr(error, "pos", 0))
                    raise self.error(message) from None
            self._read(max(CHUNK, len(self.buffer)))

    def error(self, message: str) -> InputError:
        return InputError(f"{self.path}:{self.line}: broken JSON ({message}); {self.expected}")

    def _read(self, size: int) -> None:
        with _readable(self.path, self.line):
            chunk = self.file.read(size)
        self.buffer += chunk
        self.whole = not chunk

    def _pass(self, size: int) -> None:
        self.line += self.buffer.count("\n", 0, size)
        self.buffer = self.buffer[size:]


def _count(read: Callable[[Path], NumberedRows]) -> Callable[[Path], int]:
    return lambda path: sum(1 for _ in read(path))


FORMATS = {
    ".jsonl": Rows(read_jsonl, _count(read_jsonl), "one JSON object a line"),
    ".json": Rows(read_json, _count(read_json), "a JSON array of objects"),
    ".csv": Rows(read_csv, _count(read_csv), "a header and rows of cells"),
    ".parquet": Rows(read_parquet, count_parquet, "a Parquet file with rows"),
}
