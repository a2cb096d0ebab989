"""A training that can be cut off: when its state is saved, and what that state is.

Whatever a training loop carries from one update to the next is in a state: weights, moments, the
random generators, the records so far. The loops are those of supervised.py and of stages/rl.
Of several processes the first one writes it, after the same step, and all go on from it.
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import click
import torch
from torch import Tensor, nn

from stages.base.command import on_signals
from stages.base.environment import SCRATCH, save_seconds
from stages.base.errors import InputError
from stages.base.scratch import State, Work, drop, load_state, save_state
from stages.models import processes
from stages.models.sharding import parted_as, whole

Models = Mapping[str, tuple[torch.optim.Optimizer, nn.Module]]


class Saver:
    """Saves the state of one piece of work every so often, and before a signal ends the stage."""

    def __init__(self, work: Work):
        self.work, self.seconds = work, save_seconds()
        self._began = self._last = time.monotonic()
        self._signal = None

    def found(self) -> State | None:
        """The state that a cut-off run of the same work left, said in one line."""
        state = load_state(self.work) if self.seconds else None
        steps = processes.gathered(state and state.step)
        if len(set(steps)) > 1:
            raise InputError(
                f"{SCRATCH}: the processes found states of steps {steps}, expected one folder that"
                " all of them share"
            )
        if state:
            self._began -= state.values["seconds"]
            minutes = state.values["seconds"] / 60
            click.echo(
                f"{self.work.stage}: goes on after step {state.step} ({minutes:.1f} min saved)"
            )
        return state

    def after_step(self, step: int, tensors: Callable[[], dict], values: dict) -> None:
        """Save, where it is time: what `tensors()` gives, and plain values.

        After a signal, to whichever process, the state is saved and the stage ends.
        """
        if not self.seconds:
            return
        now = time.monotonic()
        due, heard = now - self._last >= self.seconds, self._signal is not None
        flags = torch.tensor([due and not processes.number(), heard], dtype=torch.int32)
        due, heard = map(bool, processes.summed(flags).tolist())
        if not due and not heard:
            return
        values, found = values | {"seconds": now - self._began}, tensors()
        if not processes.number():
            save_state(self.work, State(step, found, values))
        self._last = time.monotonic()
        if heard:
            raise SystemExit(128 + (self._signal or signal.SIGTERM))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hear SIGTERM and SIGINT inside; a second one ends the stage at once."""
        if not self.seconds:
            yield
            return
        with on_signals(self._heard):
            yield

    def _heard(self, number: int) -> None:
        self._signal = number

    def done(self) -> None:
        """Remove what was saved: the outputs are written."""
        if self.seconds:
            drop(self.work)


def tensors_of(models: Models) -> dict[str, Tensor]:
    """Trained weights, moments and the generators of all processes, each a tensor of its own."""
    own = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        own["random/cuda"] = torch.cuda.get_rng_state()
    found = {
        f"{key}{_suffix(number)}": generator
        for number, generators in enumerate(processes.gathered(own))
        for key, generator in generators.items()
    }
    for name, (optimizer, model) in models.items():
        for key, weight in trained(model):
            found[f"{name}/weight/{key}"] = whole(weight.detach())
            for entry, value in optimizer.state.get(weight, {}).items():
                found[f"{name}/{entry}/{key}"] = whole(value)
    return {key: value.cpu().clone() for key, value in found.items()}


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, weight) of what is trained; frozen weights are as they were loaded."""
    return ((key, weight) for key, weight in model.named_parameters() if weight.requires_grad)


@torch.no_grad()
def restore(models: Models, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `tensors_of` took; the models and optimizers are those of the same work."""
    own = _suffix(processes.number())
    torch.set_rng_state(tensors[f"random/cpu{own}"])
    if f"random/cuda{own}" in tensors:
        torch.cuda.set_rng_state(tensors[f"random/cuda{own}"])
    for name, (optimizer, model) in models.items():
        for key, weight in trained(model):
            weight.copy_(parted_as(tensors[f"{name}/weight/{key}"], weight))
            for entry in ("step", "exp_avg", "exp_avg_sq"):
                if (value := tensors.get(f"{name}/{entry}/{key}")) is not None:
                    # The step count too: the fused AdamW wants it beside the weights.
                    if entry == "step":
                        optimizer.state[weight][entry] = value.to(weight.device, copy=True)
                    else:
                        optimizer.state[weight][entry] = parted_as(value, weight)


def _suffix(number: int) -> str:
    """What the name of a process's own tensor ends with; nothing for the first one."""
    return f"/{number}" if number else ""


def parts_of(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `name/`, without it."""
    start = f"{name}/"
    return {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}
