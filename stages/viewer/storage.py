"""What outputs take on disk: here, in DVC's cache, and how much of it a run could do without.

A file here takes nothing of its own where it is a link into the cache. What a reflink shares cannot
be seen: it counts twice.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stages.base.errors import InputError
from stages.viewer.models import outputs

ROUND = re.compile(
    r"(?:models/policy/|data/(?:rollouts|buffers|updates)/round-)(\d+)(?:\.parquet)?"
)
OTHER = "the rest of data"


@dataclass
class Part:
    """Bytes of some outputs: weights, moments and tables as they read; here; in the cache."""

    weights: int = 0
    moments: int = 0
    tables: int = 0
    here: int = 0
    cached: int = 0

    def __add__(self, other: "Part") -> "Part":
        return Part(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


@dataclass
class Storage:
    """Parts by name, rounds in their order.

    And bytes: of the cache that no part names, and here of copies of what the cache holds.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    unnamed: int = 0
    copies: int = 0


def storage_of(root: Path, cache: Path) -> Storage:
    """The outputs that dvc.lock in `root` names; InputError where there is no such file.

    Equal files are one object of the cache, which counts for the first part that names it.
    """
    if not (root / "dvc.lock").is_file():
        raise InputError(f"{root / 'dvc.lock'}: missing; expected a pipeline that has run")
    objects = {f"{p.parent.name}{p.name}": p.stat() for p in cache.glob("files/md5/??/*")}
    linked = {(stat.st_dev, stat.st_ino) for stat in objects.values()}
    held, found = set(objects), Storage()
    for path, md5 in sorted(outputs(root / "dvc.lock").items(), key=_order):
        part = Part(cached=sum(_taken(objects, md5, cache)))
        for file in files_of(root / path):
            stat = file.stat()
            kind = "moments" if is_moments(file) else "weights"
            kind = kind if path.startswith("models/") else "tables"
            own = not file.is_symlink() and (stat.st_dev, stat.st_ino) not in linked
            part += Part(**{kind: stat.st_size}, here=stat.st_size * own)
        found.copies += part.here * (md5 in held)
        name = name_of(path)
        found.parts[name] = found.parts.get(name, Part()) + part
    found.unnamed = sum(stat.st_size for stat in objects.values())
    return found


def _order(item: tuple[str, str]) -> tuple:
    """Models of the start, then rounds by number, then what else there is."""
    name = name_of(item[0])
    number = ROUND.fullmatch(item[0])
    return (name == OTHER, number is not None, int(number[1]) if number else 0, item[0])


def name_of(path: str) -> str:
    """What an output counts as: a round with its tables, a model, or the rest."""
    if number := ROUND.fullmatch(path):
        return f"round {number[1]}"
    return path if path.startswith("models/") else OTHER


def is_moments(file: Path) -> bool:
    """Whether a file is an optimizer's state beside a policy: trainer/<model>.safetensors."""
    return file.suffix == ".safetensors" and file.parent.name == "trainer"


def files_of(path: Path) -> list[Path]:
    """A file or the files of a folder; none where nothing is."""
    if path.is_file():
        return [path]
    return [p for p in path.rglob("*") if p.is_file()]


def _taken(objects: dict, md5: str, cache: Path) -> Iterator[int]:
    """Sizes of the objects of an output, which are taken out of `objects`."""
    if md5.endswith(".dir") and md5 in objects:
        listed = json.loads((cache / "files/md5" / md5[:2] / md5[2:]).read_text(encoding="utf-8"))
        for entry in listed:
            yield from _taken(objects, entry["md5"], cache)
    if stat := objects.pop(md5, None):
        yield stat.st_size
