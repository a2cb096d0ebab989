"""Drop the moments of older rounds: `python -m stages.drop_moments --keep 2`. No stage.

Weights, critics and counters of a round stay, its optimizer states go (trainer/*.safetensors). A
round that starts from it later says so and starts with fresh ones. dvc.lock is told of the smaller
folders, for the rounds themselves and for all that read them, so nothing runs again.

It is a command and no knob, since which rounds are the newest changes with every round that is
added: a knob would train old rounds again. Where it was cut off, `dvc checkout` brings the folders
back.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import click
from rich.filesize import decimal

from stages.base import params
from stages.base.errors import InputError
from stages.base.metrics import read_json, write_json
from stages.show import Viewer
from stages.viewer.models import readers
from stages.viewer.storage import files_of, is_moments


@click.command(cls=Viewer)
@click.option("--keep", type=click.IntRange(min=0), required=True, help="So many newest rounds.")
def drop_moments(keep: int) -> None:
    """Drop the moments of all rounds but the newest ones."""
    folders = older(Path("models/policy"), params.read()["rounds"], keep)
    dropped = {folder: [f for f in files_of(folder) if is_moments(f)] for folder in folders}
    dropped = {folder: files for folder, files in dropped.items() if files}
    if not dropped:
        click.echo("nothing to drop")
        return
    stages = readers(Path("dvc.lock"), {str(folder) for folder in dropped})
    if dvc("status", "--quiet", *stages).returncode:
        raise InputError(
            f"dvc.lock is written anew for {' '.join(stages)}: expected all of them to be up to"
            " date; `dvc status` says what is not, `dvc checkout` or `dvc repro` mends it"
        )
    for folder, files in dropped.items():
        state = folder / "trainer" / "state.json"
        write_json(state, read_json(state) | {"moments": "none"})
        size = sum(file.stat().st_size for file in files)
        for file in files:
            file.unlink()
        click.echo(f"{folder}: {decimal(size)} of moments dropped")
    done = dvc("commit", "--quiet", "--force", *stages)
    if done.returncode:
        raise InputError(f"dvc commit: {done.stderr.strip()}; `dvc checkout` brings them back")
    click.echo("dvc.lock is written; the cache keeps them until dvc gc (docs/disk.md)")


def older(policies: Path, rounds: Iterable[str], keep: int) -> list[Path]:
    """Folders of the rounds that have run, but for the `keep` newest of them."""
    ran = [policies / number for number in sorted(rounds, key=int) if (policies / number).is_dir()]
    return ran[: max(0, len(ran) - keep)]


def dvc(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "dvc", *words], capture_output=True, text=True)


if __name__ == "__main__":
    drop_moments()
