"""Figures as strict JSON and step curves as CSV."""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path

from stages.core.errors import InputError
from stages.store.common.files import replacing


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
        raise InputError(f"{path}: missing; expected a stage's figures as JSON") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); expected a stage's figures") from error


def write_curve(path: Path, rows: Sequence[dict]) -> None:
    """Write a CSV line per step; columns are the first row's, undefined values stay empty."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, list(rows[0]) if rows else ["step"], lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: strict(value) for key, value in row.items()} for row in rows)
