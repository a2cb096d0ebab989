"""Where the state of a stage under way is kept, so that a cut-off stage goes on from it.

    <RLHF_SCRATCH>/<stage>-<start of its key>/step-<n>/{state.safetensors, state.json}

The folder belongs to one exact piece of work: the key is made of all that the stage reads. It is no
output: neither DVC nor Git sees it. A state that is cut off, changed or another's is never used.
"""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.base.environment import scratch_folder
from stages.base.files import remove, replacing

KEPT = 2
STALE_DAYS = 14
SPARE = 1.1  # of a state's size must be free on the disk


@dataclass(frozen=True)
class State:
    """What was saved after `step` updates: tensors by name, and plain values."""

    step: int
    tensors: dict[str, Tensor]
    values: dict


class Work:
    """One exact piece of work, by name and by what it reads.

    `facts` are plain values (knobs, versions, device). The code is read at once, the inputs when
    the key is first asked for: a short stage never asks. Inputs that changed in between give no
    key, and nothing is saved.
    """

    def __init__(self, stage: str, inputs: Iterable[Path], facts: Mapping):
        self.stage, self.inputs = stage, sorted(inputs)
        self._facts = json.dumps(
            {"stage": stage, "facts": facts, "code": _code_loaded()}, sort_keys=True
        )
        self._stamps, self._key = self._stamp(), None

    def _stamp(self) -> list[tuple]:
        files = [(f, f.stat()) for path in self.inputs for f in files_of(path)]
        return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in files]

    @property
    def key(self) -> str | None:
        """SHA-256 of all that the stage reads; None where an input changed since it began."""
        if self._key is None:
            digest = hashlib.sha256(self._facts.encode())
            for path in self.inputs:
                for file in files_of(path):
                    digest.update(f"{path}\0{file.relative_to(path)}\0".encode())
                    digest.update(digest_of(file))
            self._key = digest.hexdigest() if self._stamp() == self._stamps else None
        return self._key

    def folder(self) -> Path | None:
        """Where its states lie; nothing needs to be there."""
        return scratch_folder() / f"{self.stage}-{self.key[:20]}" if self.key else None


def _code_loaded() -> dict[str, str]:
    """Every module of stages/ that this process runs, by name, and the digest of its file."""
    names = sorted(n for n in sys.modules if n.partition(".")[0] in ("stages", "__main__"))
    files = {n: getattr(sys.modules[n], "__file__", None) for n in names}
    return {n: digest_of(Path(f)).hex() for n, f in files.items() if f and Path(f).is_file()}


def files_of(path: Path) -> list[Path]:
    """The file, or every file of a folder, in order."""
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def digest_of(file: Path) -> bytes:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").digest()


def load_state(work: Work) -> State | None:
    """The newest whole state of this very work; says so of one that is not whole."""
    if not list(scratch_folder().glob(f"{work.stage}-*")) or not (folder := work.folder()):
        return None
    for path in _states(folder):
        try:
            about = json.loads((path / "state.json").read_text(encoding="utf-8"))
            file = path / "state.safetensors"
            if about["key"] != work.key or about["digest"] != digest_of(file).hex():
                raise ValueError("it is not what was written")
            return State(about["step"], load_file(file), about["values"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            click.echo(f"{path}: a saved state that cannot be used ({error}); passed over")
    return None


def save_state(work: Work, state: State) -> None:
    """Write a state beside the last one; a disk that takes it not costs the state, not the run."""
    folder = work.folder()
    if folder is None:
        click.echo(f"{work.stage}: an input changed while it ran; its state is not saved")
        return
    size = sum(tensor.nbytes for tensor in state.tensors.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < SPARE * size:
            click.echo(f"{folder}: {free:,} bytes are free, a state takes {size:,}; not saved")
            return
        path = folder / f"step-{state.step:09d}"
        with replacing(path, folder=True) as temporary:
            file = temporary / "state.safetensors"
            save_file(state.tensors, file)
            about = {"key": work.key, "step": state.step, "digest": digest_of(file).hex()}
            text = json.dumps(about | {"values": state.values})
            (temporary / "state.json").write_text(text, encoding="utf-8")
        for old in _states(folder)[KEPT:]:
            remove(old)
        _drop_stale(folder)
    except (OSError, SafetensorError) as error:
        click.echo(f"{folder}: the state is not saved ({error})")


def drop_states(work: Work) -> None:
    """Remove the states of a piece of work that is done."""
    if list(scratch_folder().glob(f"{work.stage}-*")) and (folder := work.folder()):
        remove(folder)


def _states(folder: Path) -> list[Path]:
    """Saved states, the newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def _drop_stale(kept: Path) -> None:
    """Remove the folders of other work that nothing was written to for two weeks."""
    for folder in kept.parent.iterdir():
        age = time.time() - folder.stat().st_mtime
        if folder != kept and folder.is_dir() and age > STALE_DAYS * 86400:
            remove(folder)
