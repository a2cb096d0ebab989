"""Rows of a dataset, wherever it lies, one at a time: memory does not grow with the file.

A row comes with its number, by which errors and counts name it: the line in a `.jsonl` file, the
row (from 1) elsewhere.
"""

import random
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

from pyarrow import ArrowException

from stages.base.errors import InputError
from stages.base.metrics import read_json
from stages.rows.formats import BATCH, FORMATS, Rows, format_of

# What params.yaml says of each source; rows that have no splits are taken for it.
DEFAULT_SPLITS = (None, "train", "test")
FOLDER_FILES = ("dataset_info.json", "dataset_dict.json")


def read_rows(
    dataset: str,
    *,
    split: str | None,
    name: str | None,
    revision: str | None,
    max_samples: int | None,
    seed: int,
) -> Iterator[tuple[int, dict]]:
    """Yields (row number, row) of a local file, a `save_to_disk` folder or a dataset on the hub.

    With `max_samples` below the number of rows, the rows are those that a shuffle by `seed` puts
    first; they come in the order of the file. Which ones they are depends on the seed and the
    number of rows alone. Without it every row comes. A split must be named where there are several
    and none is called "train".

    Raises InputError at once for a dataset that is not there or of a kind not known, and while
    reading for a file that is empty, broken or not what its name says.
    """
    path = Path(dataset)
    if path.is_dir() or (not path.exists() and not _looks_local(path)):
        rows = _open_dataset(dataset, path, split, name, revision)
        return _dataset_rows(dataset, rows, max_samples, seed)
    if not path.is_file():
        raise InputError(f"{dataset}: no such file")
    for knob, value in (("name", name), ("revision", revision)):
        if value is not None:
            raise InputError(f"{dataset}: {knob} is {value!r}, but a file has none; expected null")
    _check_no_split(dataset, split)
    return _file_rows(FORMATS[format_of(path)], path, max_samples, seed)


def on_this_disk(dataset: str) -> bool:
    """Whether a dataset is a file or folder here; otherwise it is asked of the hub."""
    return Path(dataset).exists()


def sample_numbers(total: int, max_samples: int | None, seed: int) -> list[int] | None:
    """Indices below `total` that a seeded shuffle puts first, ascending; None for all of them."""
    if max_samples is None or max_samples >= total:
        return None
    return sorted(random.Random(f"{seed}/max_samples").sample(range(total), max_samples))


def _looks_local(path: Path) -> bool:
    """Hub ids are `name` or `owner/name`; what has a file's ending or more parts is a path."""
    known = {suffix for kind in FORMATS for suffix in (kind, ".gz")}
    return path.suffix in known or len(path.parts) > 2 or path.parts[:1] in [("/",), ("..",)]


def _file_rows(rows: Rows, path: Path, max_samples: int | None, seed: int):
    chosen = None
    if max_samples is not None:
        chosen = sample_numbers(rows.count(path), max_samples, seed)
    numbered = rows.read(path)
    if chosen is None:
        first = next(numbered, None)
        if first is None:
            raise InputError(f"{path}: is empty, expected {rows.expected}")
        yield first
        yield from numbered
    else:
        position = 0
        for index in chosen:
            yield next(islice(numbered, index - position, None))
            position = index + 1


def _open_dataset(dataset: str, path: Path, split, name, revision):
    # Importing it takes a second, which local files need not spend.
    import datasets
    from datasets.exceptions import DatasetsError

    load, arguments = datasets.load_from_disk, {}
    if path.is_dir():
        place = str(_saved_split(path, split))
    else:
        load, place = datasets.load_dataset, dataset
        arguments = {"name": name, "revision": revision, "split": split}
    try:
        found = load(place, **arguments)
    except (DatasetsError, ArrowException, OSError, ValueError, RuntimeError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{dataset}: no such file, and no dataset either: {line}") from error
    return found[_wanted_split(dataset, found, split)] if isinstance(found, dict) else found


def _saved_split(folder: Path, split: str | None) -> Path:
    """The folder of one split that save_to_disk wrote; `datasets` opens none of the others.

    It cannot open a split without rows, and would open them all.
    """
    if not any((folder / file).is_file() for file in FOLDER_FILES):
        raise InputError(f"{folder}: expected a folder written by save_to_disk, or a file")
    place = folder
    if (folder / FOLDER_FILES[1]).is_file():
        place /= _wanted_split(folder, read_json(folder / FOLDER_FILES[1]).get("splits", []), split)
    else:
        _check_no_split(folder, split)
    if not read_json(place / "state.json").get("_data_files"):
        raise InputError(f"{place}: is empty, expected rows")
    return place


def _wanted_split(dataset: str | Path, found: Collection[str], split: str | None) -> str:
    wanted = split or (next(iter(found)) if len(found) == 1 else "train")
    if wanted not in found:
        raise InputError(f"{dataset}: has no split {wanted!r}; expected one of {sorted(found)}")
    return wanted


def _check_no_split(dataset: str | Path, split: str | None) -> None:
    if split not in DEFAULT_SPLITS:
        raise InputError(f"{dataset}: has no splits, found {split!r}; expected train or test")


def _dataset_rows(dataset: str, rows, max_samples: int | None, seed: int):
    if len(rows) == 0:
        raise InputError(f"{dataset}: is empty, expected rows")
    chosen = sample_numbers(len(rows), max_samples, seed)
    numbers = range(len(rows)) if chosen is None else chosen
    for start in range(0, len(numbers), BATCH):
        part = numbers[start : start + BATCH]
        for index, row in zip(part, rows.select(part).to_list(), strict=True):
            yield index + 1, row
