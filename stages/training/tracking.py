"""Figures of a running training: to its curve, and to the trackers that people already have.

The curve is a CSV file that grows by the step, so that DVC's editor extension draws it live.
Trackers are fed by Accelerate. Which ones is said by the environment, `RLHF_TRACK=tensorboard,wandb
dvc repro`, and by no knob: a tracker changes no output, while DVC would train everything again for
a knob that says another one. Their own settings (project, server, account) are environment
variables too.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from accelerate import Accelerator

from stages.base.environment import TRACK, words
from stages.base.errors import InputError
from stages.base.metrics import growing_curve
from stages.base.spelling import flat
from stages.models import processes

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
PROJECT, FOLDER = "rlhf-dvc", Path("runs")


@contextmanager
def tracking(run: str, knobs: Mapping, curve: Path) -> Iterator[Callable[[dict], None]]:
    """Yield a function that adds a row with `step` to the curve and to every tracker chosen.

    `run` names the stage, and with the time the run; `knobs` are shown beside it. InputError for an
    unknown tracker or one that is not installed. Of several processes the first one writes.
    """
    if processes.number():
        yield lambda row: None
        return
    names = chosen()
    with growing_curve(curve) as draw, _trackers(names, run, knobs) as send:

        def log(row: dict) -> None:
            draw(row)
            send(row)

        yield log


@contextmanager
def _trackers(names, run: str, knobs: Mapping) -> Iterator[Callable[[dict], None]]:
    if not names:
        yield lambda row: None
        return
    run = f"{run}-{time.strftime('%Y%m%d-%H%M%S')}"
    accelerator = Accelerator(log_with=list(names), project_dir=FOLDER / run)
    named = {"wandb": "name", "mlflow": "run_name", "trackio": "name"}
    options = {name: {named[name]: run} for name in names if name in named}
    plain = {  # what every tracker takes
        key: value if isinstance(value, int | float | str) else str(value)
        for key, value in flat(knobs).items()
    }
    accelerator.init_trackers(PROJECT, plain, options)

    def send(row: dict) -> None:
        accelerator.log(
            {name: value for name, value in row.items() if value is not None and name != "step"},
            step=row["step"],
        )

    try:
        yield send
    finally:
        accelerator.end_training()


def chosen() -> tuple[str, ...]:
    """The trackers that the environment names, each checked to be known and installed."""
    names = words(TRACK)
    for name in names:
        if name not in TRACKERS:
            raise InputError(
                f"{TRACK}: found {name!r}, expected names out of {', '.join(TRACKERS)}"
            )
        if find_spec(name) is None:
            raise InputError(f"{TRACK}: {name} is not installed: pip install {name}")
    return tuple(dict.fromkeys(names))
