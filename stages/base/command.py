"""What every stage script does around its own work: one-line errors, no orphans, fixed threads."""

import ctypes
import errno
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from tqdm import tqdm

import stages
from stages.base.environment import rank, world_size
from stages.base.errors import InputError, Lost
from stages.base.launch import LOST, first_to_say, launch, quieten
from stages.base.spelling import spelled_out

PR_SET_PDEATHSIG = 1
OUT_OF_MEMORY = (
    "a smaller batch: half the train_batch_size with twice the batch_acc gives the same update;"
    " rollout_batch_size, score_batch_size and evaluate.batch_size change no result"
)


class Stage(click.Command):
    """A click command whose bad input ends in one line on stderr and exit code 1.

    On Linux the stage is stopped when its parent dies: a killed DVC must leave no orphan that keeps
    writing beside the next run. Several processes, where a launcher started them, are refused.
    """

    shared = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        self.words = list(args)
        return super().parse_args(ctx, args)

    @property
    def script(self) -> str:
        """As in dvc.yaml; click makes a dash of `_`."""
        return self.name.replace("-", "_")

    def invoke(self, ctx: click.Context):
        stop_with_parent()
        gc.freeze()
        gc.enable()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        quieten()
        try:
            return self._invoke(ctx)
        except Lost:
            raise SystemExit(LOST) from None
        except Exception as error:
            if (world_size() or 1) > 1 and not first_to_say():
                raise SystemExit(1) from error
            raise

    def _invoke(self, ctx: click.Context):
        """The stage itself, its bad input as a `ClickException`."""
        name = self.script
        try:
            if (found := world_size() or 1) > 1 and not self.shared:
                raise InputError(
                    f"found {found} processes, expected one: run this stage without a launcher"
                )
            return super().invoke(ctx)
        except InputError as error:
            raise failure(name, error, error.advice) from error
        except OSError as error:
            if error.errno is None or error.filename is None and error.errno != errno.ENOSPC:
                raise
            raise failure(name, error, InputError.advice) from error
        except Exception as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's, which not every stage imports
                raise
            words = str(error).partition("\n")[0]
            raise failure(name, words, OUT_OF_MEMORY) from error


class SharedStage(Stage):
    """A stage that several processes may run together, each of them the whole script."""

    shared = True


def launched(processes: int, threads: int) -> bool:
    """Whether several processes, started here, have done the work of the stage that is running.

    The knobs come from its script, once they are known to be good.
    """
    command = click.get_current_context().command
    return launch(command.script, command.words, processes, threads)


def paths(*options: str) -> Callable:
    """Required options that take a path: `paths("--base", "--out")`.

    `--policy start` gives the path of `--policy` to the parameter `start`.
    """

    def decorate(function: Callable) -> Callable:
        for words in reversed(options):
            option = click.option(*words.split(), type=click.Path(path_type=Path), required=True)
            function = option(function)
        return function

    return decorate


def failure(stage: str, error: Exception | str, advice: str) -> click.ClickException:
    """What stopped a stage, and in a line of its own what to do next."""
    message = spelled_out(str(error), keep="\n")
    return click.ClickException(f"stage {stage}: {message}\nNext: {advice}")


def stop_with_parent() -> None:
    """End this stage when what started it ends: DVC, or a shell."""
    stop_with(stages.PARENT, signal.SIGTERM)


def stop_with(parent: int, word: signal.Signals) -> None:
    """Ask Linux to send a signal to this process when its parent ends; elsewhere nothing is done.

    A parent that ended before, while modules were imported, ends the process at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, word)
        if os.getppid() != parent:
            raise SystemExit("the process that started this one has ended")


@contextmanager
def on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with the first SIGTERM or SIGINT that comes inside; a second one ends the stage.

    `act` runs between two lines of whatever the stage is doing, and may raise there.
    """
    before = {}

    def heard(number: int, frame) -> None:
        for other, handler in before.items():
            signal.signal(other, handler)
        act(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, heard)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(figures: dict, **more: object) -> None:
    """Print one line of figures, nested ones left out: `loss 0.412  accuracy 0.93`."""
    parts = []
    for name, value in (more | figures).items():
        if isinstance(value, dict) or value is None:
            continue
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        parts.append(f"{name.replace('_', ' ')} {text}")
    click.echo("  ".join(parts))


class Bar(tqdm):
    """A progress bar with a rate of what is in the items, and figures so far."""

    counted = 0

    def tell(self, count: int, unit: str = "tokens", **figures: float | None) -> None:
        """Count so many tokens (or another unit) more, and show their rate and the figures."""
        self.counted += count
        if self.disable:
            return
        rate = self.counted / max(1e-9, self.format_dict["elapsed"])
        known = {name: f"{value:.3g}" for name, value in figures.items() if value is not None}
        self.set_postfix({f"{unit}/s": f"{rate:,.0f}"} | known, refresh=False)


def progress(items: Iterable, name: str, total: int | None = None, done: int = 0) -> Bar:
    """The items behind a progress bar on stderr, which is silent where stderr is no terminal.

    `done` of `total` were there before. Of several processes the first one shows it.
    """
    silent = True if rank() else None
    return Bar(items, desc=name, total=total, initial=done, disable=silent, dynamic_ncols=True)
