"""Say what a run takes on disk, and what can go: `python -m stages.disk`. No stage: it only reads.

Weights, moments and tables are sizes of files. Beside them stands what they take here, where links
into DVC's cache take nothing, and in the cache. The rest of the cache belongs to nothing here: to
other experiments, and to runs that were changed since.
"""

import subprocess
import sys
from pathlib import Path

import click
from rich.filesize import decimal

from stages.base.environment import scratch_folder
from stages.base.errors import InputError
from stages.show import Viewer
from stages.viewer import text
from stages.viewer.storage import OTHER, Part, Storage, files_of, storage_of


@click.command(cls=Viewer)
def disk() -> None:
    """Say what each round takes in the workspace and in the cache, and what can go."""
    found = storage_of(Path(), cache_folder())
    text.print_rows(text.console(), rows_of(found))
    for line in what_can_go(found, sum(f.stat().st_size for f in files_of(scratch_folder()))):
        click.echo(line)


def cache_folder() -> Path:
    """Where DVC's cache lies, as DVC says."""
    command = [sys.executable, "-m", "dvc", "cache", "dir"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"dvc cache dir: {done.stderr.strip()}; expected a repository of DVC")
    return Path(done.stdout.strip())


def rows_of(found: Storage) -> list[dict[str, str]]:
    """A row of text for each part, one for the rest of the cache, and one for all."""
    total = sum(found.parts.values(), Part())
    parts = {name: part for name, part in found.parts.items() if name != OTHER}
    parts[OTHER] = found.parts.get(OTHER, Part())
    rows = [{"": name} | _sizes(part) for name, part in parts.items()]
    rows.append({"": "the rest of the cache"} | _sizes(Part(cached=found.unnamed)))
    total.cached += found.unnamed
    return [*rows, {"": "all"} | _sizes(total)]


def _sizes(part: Part) -> dict[str, str]:
    return {name: decimal(size) if size else "" for name, size in vars(part).items()}


def what_can_go(found: Storage, scratch: int) -> list[str]:
    """A line for each thing that can go: its size and the command."""
    rounds = [part.moments for name, part in found.parts.items() if name.startswith("round ")]
    lines = {
        "moments of all rounds but the newest: python -m stages.drop_moments --keep 1": sum(
            rounds[:-1]
        ),
        "in the cache, of nothing here: dvc gc, which docs/disk.md tells how to hold back": (
            found.unnamed
        ),
        "states of stages that were cut off: python -m stages.clear_scratch": scratch,
        "here and in the cache as well: dvc checkout --relink": found.copies,
    }
    told = [f"{decimal(size)} {line}" for line, size in lines.items() if size]
    return ["", "What can go:", *told] if told else ["", "Nothing can go."]


if __name__ == "__main__":
    disk()
