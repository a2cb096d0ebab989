"""Where a stage under way keeps what it has done, so that a cut-off stage goes on from it.

    <RLHF_SCRATCH>/<stage>-<start of its key>/step-<n>/{state.safetensors, about.json}
    <RLHF_SCRATCH>/<stage>-<start of its key>/<rows>-<n>/{rows.arrow, about.json}

The folder belongs to one exact piece of work: the key is made of all that the stage reads. It is no
output: neither DVC nor Git sees it. A part that is cut off, changed or another's is never used.
"""

import hashlib
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import click
import torch
from pyarrow import ArrowException
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.base.bases import with_bases
from stages.base.environment import scratch_folder
from stages.base.files import remove, replacing

KEPT = 2
STALE_DAYS = 14
SPARE = 1.1  # of a part's size must be free on the disk
ABOUT = "about.json"
LIBRARIES = ("torch", "transformers", "tokenizers")
OURS = re.compile(r".+-[0-9a-f]{20}")
BROKEN = (OSError, ValueError, KeyError, TypeError, SafetensorError, ArrowException)


@dataclass(frozen=True)
class State:
    """What was saved after `step` updates: tensors by name, and plain values."""

    step: int
    tensors: dict[str, Tensor]
    values: dict


class Work:
    """One exact piece of work, by name and by what it reads.

    `facts` are plain values (knobs, versions, device), `rows` what was read from no file here. The
    code is read at once, the rest when the key is first asked for: a short stage never asks. Inputs
    that changed in between give no key, and nothing is saved.
    """

    def __init__(self, stage: str, inputs: Iterable[Path], facts: Mapping, rows: object = None):
        self.stage, self.inputs, self._rows = stage, with_bases(inputs), rows
        self._facts = json.dumps(
            {"stage": stage, "facts": facts, "code": _code_loaded()}, sort_keys=True
        )
        self._stamps, self._key = self._stamp(), None

    def _stamp(self) -> list[tuple] | None:
        """Of each file its size and time; None where one is missing: who reads it says so."""
        try:
            files = [(f, f.stat()) for path in self.inputs for f in files_of(path)]
        except FileNotFoundError:
            return None
        return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in files]

    @property
    def key(self) -> str | None:
        """SHA-256 of all that the stage reads; None where an input is missing or has changed."""
        if self._key is None and self._stamps is not None:
            digest = hashlib.sha256(self._facts.encode())
            digest.update(repr(self._rows).encode("utf-8", "surrogatepass"))
            for path in self.inputs:
                for file in files_of(path):
                    digest.update(f"{path}\0{file.relative_to(path)}\0".encode())
                    digest.update(digest_of(file))
            self._key = digest.hexdigest() if self._stamp() == self._stamps else None
        return self._key

    def folder(self) -> Path | None:
        """Where its parts lie; nothing needs to be there."""
        return scratch_folder() / f"{self.stage}-{self.key[:20]}" if self.key else None

    def found(self) -> Path | None:
        """The folder, where one may be there: without any of its stage's the key is not asked."""
        return self.folder() if any(scratch_folder().glob(f"{self.stage}-*")) else None


def work_of(
    stage: str, inputs: list[Path], knobs, device: torch.device | None = None, rows: object = None
) -> Work:
    """The piece of work of a stage: what it reads, its knobs, its libraries and its device."""
    facts = {
        "knobs": knobs.model_dump(mode="json"),
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    if device is not None:
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        facts["device"] = [device.type, gpu, torch.backends.cpu.get_cpu_capability()]
        facts["threads"] = torch.get_num_threads()
    return Work(stage, inputs, facts, rows)


def _code_loaded() -> dict[str, str]:
    """Every module of stages/ that this process runs, by name, and the digest of its file."""
    names = sorted(n for n in sys.modules if n.partition(".")[0] in ("stages", "__main__"))
    files = {n: getattr(sys.modules[n], "__file__", None) for n in names}
    return {n: digest_of(Path(f)).hex() for n, f in files.items() if f and Path(f).is_file()}


def files_of(path: Path) -> list[Path]:
    """The file, or every file of a folder, in order; not the byte code that Python adds."""
    if not path.is_dir():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def digest_of(file: Path) -> bytes:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").digest()


def write_part(
    work: Work, name: str, size: int, write: Callable[[Path], None], values: dict
) -> bool:
    """Add a folder to the scratch: what `write` puts there, about `size` bytes, and plain values.

    False where that was not possible, and said so: a full disk costs the scratch, not the run.
    """
    folder = work.folder()
    if folder is None:
        click.echo(f"{work.stage}: an input changed while it ran; its state is not saved")
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < SPARE * size:
            click.echo(f"{folder}: {free:,} bytes are free, a state takes {size:,}; not saved")
            return False
        with replacing(folder / name, folder=True) as temporary:
            write(temporary)
            about = {"key": work.key, "values": values}
            about["digest"] = _digest_of_part(temporary, about)
            (temporary / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        _drop_stale(folder)
    except (OSError, SafetensorError, ArrowException) as error:
        click.echo(f"{folder}: the state is not saved ({error})")
        return False
    return True


def _digest_of_part(path: Path, about: dict) -> str:
    """Of the files of a part, ABOUT aside, and of the values in it."""
    digest = hashlib.sha256(json.dumps([about["key"], about["values"]]).encode())
    for file in files_of(path):
        if file.name != ABOUT:
            digest.update(f"{file.name}\0".encode() + digest_of(file))
    return digest.hexdigest()


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Say so where what is read inside cannot be used, and go on behind the block."""
    try:
        yield
    except BROKEN as error:
        click.echo(f"{path}: a saved state that cannot be used ({error}); passed over")


def read_part(work: Work, path: Path, read: Callable[[Path], object]) -> tuple | None:
    """(what `read` makes of its folder, its values) of a whole part of this very work, or None."""
    with _whole(path):
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        if about["key"] != work.key or about["digest"] != _digest_of_part(path, about):
            raise ValueError("it is not what was written")
        return read(path), about["values"]
    return None


def load_state(work: Work) -> State | None:
    """The newest whole state of this very work; says so of one that is not whole."""
    folder = work.found()
    for path in _states(folder) if folder else []:
        if part := read_part(work, path, lambda p: load_file(p / "state.safetensors")):
            tensors, values = part
            return State(values.pop("step"), tensors, values)
    return None


def save_state(work: Work, state: State) -> None:
    """Write a state beside the last one; older ones go."""
    size = sum(tensor.nbytes for tensor in state.tensors.values())

    def write(path: Path) -> None:
        save_file(state.tensors, path / "state.safetensors")

    values = state.values | {"step": state.step}
    if write_part(work, f"step-{state.step:09d}", size, write, values):
        for old in _states(work.folder())[KEPT:]:
            clear(old)


def drop(work: Work) -> None:
    """Remove what is kept of a piece of work that is done."""
    if folder := work.found():
        clear(folder)


def clear(path: Path) -> bool:
    """Remove a folder of the scratch; says so where that cannot be done."""
    try:
        remove(path)
    except OSError as error:
        click.echo(f"{path}: not removed ({error})")
    return not path.exists()


def _states(folder: Path) -> list[Path]:
    """Saved states, the newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def works() -> list[tuple[Path, float, int]]:
    """Each piece of work in the scratch: its folder, days since it was written to, its bytes.

    The scratch may be a folder with other things in it: only names as ours count. What another
    stage removes meanwhile is left out.
    """
    scratch, found = scratch_folder(), []
    for folder in sorted(scratch.iterdir()) if scratch.is_dir() else []:
        if OURS.fullmatch(folder.name) and folder.is_dir():
            with suppress(FileNotFoundError):
                days = (time.time() - folder.stat().st_mtime) / 86400
                found.append((folder, days, sum(f.stat().st_size for f in files_of(folder))))
    return found


def _drop_stale(kept: Path) -> None:
    """Remove the folders of other work that nothing was written to for two weeks."""
    for folder, days, _ in works():
        if folder != kept and days > STALE_DAYS:
            clear(folder)
