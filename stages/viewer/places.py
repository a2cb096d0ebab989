"""What lies at a path: rows of some kind, or a folder to be listed."""

import re
from pathlib import Path

from rich.filesize import decimal

from stages.base.errors import InputError
from stages.base.metrics import read_json
from stages.rows.formats import format_of
from stages.viewer import models
from stages.viewer.rows import Rows

PEEK = 1024
ROUND = re.compile(r"(round-\d+|sft|direct-.+)\.parquet")


def rows_at(path: Path) -> Rows | None:
    """The rows at `path`; None where it holds something else.

    One table are the Parquet files of all rounds (round-k.parquet, and in evaluations sft.parquet
    and those of branches), and JSON figures of a folder of nothing else (a row a file). A folder of
    `save_to_disk` is known by its `dataset_info.json`.
    """
    if path.is_file():
        kind = _kind_of_file(path)
        return Rows(path, [path], kind) if kind else None
    if (path / "dataset_info.json").is_file():
        return Rows(path, [path], "dataset")
    files = visible(path)
    if all(ROUND.fullmatch(file.name) for file in files) and files not in (
        [],
        [path / "sft.parquet"],
    ):
        return Rows(path, files, ".parquet")
    if files and all(
        file.suffix == ".json" and isinstance(read_json(file), dict) for file in files
    ):
        return Rows(path, files, ".json")
    return None


def _kind_of_file(path: Path) -> str | None:
    """The kind of a file of rows; one of JSON holds figures unless it begins as an array."""
    try:
        kind = format_of(path)
    except InputError:
        return None
    if path.suffix == ".json":
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            return kind if file.read(PEEK).lstrip().startswith("[") else None
    return kind


def visible(folder: Path) -> list[Path]:
    """What lies in a folder, round-2 before round-10; nothing hidden or half written."""

    def natural(file: Path) -> list:
        return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", file.name)]

    return sorted(folder.glob("[!.]*"), key=natural)


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
    if found and found.kind == ".parquet":
        return "table", f"{found.count():,} rows"
    if path.is_dir():
        return "folder" if found is None else "rows", f"{len(visible(path))} entries"
    kinds = {".json": "figures", ".html": "page"}
    return kinds.get(path.suffix, "file") if found is None else "rows", decimal(path.stat().st_size)
