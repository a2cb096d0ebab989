"""Figures as strict JSON and step curves as CSV."""

import csv
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.base.errors import InputError, MissingFile
from stages.base.files import naming, remove, replacing


def strict(value):
    """Replace non-finite numbers by None, at any depth: NaN is not JSON."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, figures: dict | list) -> None:
    """Write figures as strict JSON; undefined (non-finite) values become null."""
    with replacing(path) as temporary:
        text = json.dumps(strict(figures), indent=2, allow_nan=False, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict:
    """Read figures that a stage wrote; `InputError` where the file is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFile(path, "a stage's figures as JSON") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); expected a stage's figures") from error


class Means:
    """Running means by name. None, what could not be measured, counts in no mean."""

    def __init__(self):
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1

    def of(self, name: str) -> float | None:
        """The mean of what was added under a name; None where nothing was."""
        return self.sums[name] / self.counts[name] if name in self.sums else None

    def known(self) -> dict[str, float]:
        """Every mean there is, by name."""
        return {name: self.sums[name] / self.counts[name] for name in self.sums}


@contextmanager
def growing_curve(path: Path) -> Iterator[Callable[[dict], None]]:
    """Yield a function that adds a step's row to a CSV file at once, for plots that are live.

    Columns are the first row's, undefined values stay empty. Where the block fails the file goes; a
    killed stage may leave whole lines of it, and none of its other outputs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(path)  # it may be a link into the DVC cache
    try:
        with naming(path), path.open("x", newline="", encoding="utf-8") as handle:
            writers: list[csv.DictWriter] = []

            def add(row: dict) -> None:
                if not writers:
                    writers.append(csv.DictWriter(handle, list(row), lineterminator="\n"))
                    writers[0].writeheader()
                writers[0].writerow(strict(row))
                handle.flush()

            yield add
            os.fsync(handle.fileno())
    except BaseException:
        remove(path)
        raise
