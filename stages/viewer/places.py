"""What lies at a path: rows of some kind, or a folder to be listed."""

from pathlib import Path

from rich.filesize import decimal

from stages.base.errors import InputError
from stages.base.metrics import read_json
from stages.rows.formats import format_of
from stages.viewer import models
from stages.viewer.rows import Table, by_rounds, readable, visible
from stages.viewer.streams import Stream

PEEK = 1024


def rows_at(path: Path) -> Table | Stream | None:
    """The rows at `path`; None where it holds something else.

    One table are the Parquet files of all rounds, and JSON figures of a folder of nothing else (a
    row a file). A folder of `save_to_disk` is read by its `dataset_info.json`.
    """
    if path.is_file():
        return _rows_of_file(path)
    if (path / "dataset_info.json").is_file():
        return Stream.of_dataset(path)
    if by_rounds(path):
        return Table(path)
    files = visible(path)
    if files and all(file.suffix == ".json" for file in files):
        figures = {file.stem: read_json(file) for file in files}
        if all(isinstance(row, dict) for row in figures.values()):
            return Stream(path, lambda: ({"file": name} | row for name, row in figures.items()))
    return None


def _rows_of_file(path: Path) -> Table | Stream | None:
    try:
        kind = format_of(path)
    except InputError:
        return None
    if kind == ".parquet":
        return Table(path)
    return Stream.of_dataset(path) if path.suffix != ".json" or _is_array(path) else None


def _is_array(path: Path) -> bool:
    with readable(path), path.open(encoding="utf-8-sig", errors="replace") as file:
        return file.read(PEEK).lstrip().startswith("[")


def listing(folder: Path) -> list[dict[str, str]]:
    """One row for each thing in a folder: its name, kind, and rows, entries or size."""
    return [_entry(path) for path in visible(folder)]


def _entry(path: Path) -> dict[str, str]:
    row = {"name": path.name + "/" * path.is_dir()}
    try:
        kind, holds = _kind(path)
    except (InputError, OSError):
        return row | {"kind": "unreadable"}
    return row | {"kind": kind, "holds": holds}


def _kind(path: Path) -> tuple[str, str]:
    if models.is_model(path):
        return "model", f"{sum(models.parameters(path).values()):,} parameters"
    found = rows_at(path)
    if isinstance(found, Table):
        return "table", f"{found.count():,} rows"
    if path.is_dir():
        return "folder" if found is None else "rows", f"{len(visible(path))} entries"
    kinds = {".json": "figures", ".html": "page"}
    return kinds.get(path.suffix, "file") if found is None else "rows", decimal(path.stat().st_size)
