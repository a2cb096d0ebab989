"""What every stage script does around its own work: one-line errors, no orphans, fixed threads."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterable

import click
from tqdm import tqdm

from stages.core.errors import InputError

PR_SET_PDEATHSIG = 1


class Stage(click.Command):
    """A click command whose bad input ends in one line on stderr and exit code 1.

    On Linux the stage is stopped when its parent dies: a killed DVC must leave no orphan that keeps
    writing beside the next run.
    """

    def invoke(self, ctx: click.Context):
        stop_with_parent()
        gc.freeze()
        gc.enable()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        name = self.name.replace("-", "_")  # as in dvc.yaml; click makes a dash of it
        try:
            return super().invoke(ctx)
        except InputError as error:
            raise click.ClickException(f"stage {name}: {error}") from error
        except OSError as error:
            if error.errno is None or error.filename is None and error.errno != 28:
                raise
            raise click.ClickException(f"stage {name}: {error}") from error


def stop_with_parent() -> None:
    """Ask Linux to send SIGTERM to this process when its parent ends; elsewhere nothing happens."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            raise SystemExit("the process that started this stage has ended")


def say(figures: dict, **more: object) -> None:
    """Print one line of figures, nested ones left out: `loss 0.412  accuracy 0.93`."""
    parts = []
    for name, value in (more | figures).items():
        if isinstance(value, dict) or value is None:
            continue
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        parts.append(f"{name.replace('_', ' ')} {text}")
    click.echo("  ".join(parts))


def progress(items: Iterable, name: str, total: int | None = None) -> tqdm:
    """The items behind a progress bar on stderr, which is silent where stderr is no terminal."""
    return tqdm(items, desc=name, total=total, disable=None, dynamic_ncols=True)
