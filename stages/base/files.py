"""Writing so that a killed or failed stage leaves nothing that a later stage accepts.

Every output is written to a sibling whose name starts with a dot and then renamed over the old one,
so that an old output is never written through (it may be a read-only link into the DVC cache) and a
half-written one never has its final name.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.base.errors import InputError

# A disk that takes no more. Libraries in Rust (safetensors, tokenizers) say so in words only.
CANNOT_WRITE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO}
FORBIDDEN = {errno.EACCES, errno.EPERM}
IN_WORDS = re.compile(r"\(os error (\d+)\)")


@contextmanager
def replacing(path: Path, folder: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling of `path` to write to; rename it to `path` if the block ends well.

    With `folder` the sibling is a new empty folder. What killed runs left under the same name is
    removed first. A disk that is full or read-only ends in an `OSError` that names `path`.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(temporary)
        if folder:
            temporary.mkdir()
    try:
        with naming(path):
            yield temporary
            flush(temporary)
            if folder:
                remove(path)
            os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn whatever a full or read-only disk raises inside into an `OSError` that names `path`."""
    try:
        yield
    except Exception as error:
        number = _number_of(error)
        if number in CANNOT_WRITE or number in FORBIDDEN and not _elsewhere(error, path):
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


def _elsewhere(error: BaseException, path: Path) -> bool:
    """Whether an error names a file that is there and not in the folder of `path`: an input."""
    named = getattr(error, "filename", None)
    return named is not None and os.path.exists(named) and path.parent not in Path(named).parents


def _number_of(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = IN_WORDS.search(str(error))
    return int(found[1]) if found else None


def check_room(path: Path, size: int) -> None:
    """Raise InputError where the disk that `path` will lie on has less free than `size` bytes.

    Asked before a stage trains, which may take days.
    """
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise InputError(
            f"{path}: about {size / 1e9:,.3f} GB will be written, but {free / 1e9:,.3f} GB are free"
            " on its disk; expected as much (`python -m stages.disk` says what can go)"
        )


def flush(path: Path) -> None:
    """Force a file, or every file in a folder, to disk: a rename must not outrun the bytes."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def remove(path: Path) -> None:
    """Remove a file, a link (never what it points to) or a folder; nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
