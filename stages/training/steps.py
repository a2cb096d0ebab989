"""One optimizer step, whatever is trained: schedule, gradient accumulation, clipping, update.

A loss is divided once, by the count that its definition names, over the whole optimizer step. The
losses of micro-batches that come in here therefore add up to the step's, and their number never
changes a gradient.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from stages.base.errors import InputError, Lost
from stages.models import processes
from stages.models.compute import all_finite
from stages.models.sharding import is_sharded, own_part, whole

EMA_DECAY = 0.9


class NonFinite(InputError):
    """A NaN or infinite loss or gradient under `nonfinite: stop`."""

    advice = (
        "a lower lr or a longer warm-up; `nonfinite: skip` leaves such batches out and counts them"
    )


def stop_of(loss: float, place: str = "") -> NonFinite:
    """What `nonfinite: stop` raises for a loss; `place` names the rows at fault where known."""
    return NonFinite(f"{place}the loss is {loss}; nonfinite: stop. Nothing was saved")


@dataclass(frozen=True)
class StepFigures:
    """loss (sum over micro-batches), gradient norm before clipping (L2), micro-batches left out."""

    loss: float
    grad_norm: float
    skipped: int


def learning_rate(step: int, peak: float, warmup_steps: int, total_steps: int | None) -> float:
    """Rate after `step` of `total_steps`: linear to `peak`, then a cosine to 0.

    The form is that of transformers. `total_steps` None keeps `peak` after the warm-up.
    """
    if step < warmup_steps:
        return peak * step / max(1, warmup_steps)
    if total_steps is None:
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def rate_of_update(done: int, peak: float, warmup_steps: int, total: int | None) -> float:
    """Rate of the update that follows `done` updates: neither the first nor the last one is 0."""
    return learning_rate(done + 1, peak, warmup_steps, None if total is None else total + 1)


def adamw(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over the model's parameters; vectors (norms, biases) are not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def update(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Iterable[Tensor],
    lr: float,
    max_norm: float,
    nonfinite: str,
) -> StepFigures:
    """Take one optimizer step over micro-batch losses that add up, each backpropagated as it comes.

    With several processes each brings its part of the same micro-batches (0 where it has no row of
    one) and the gradients are summed, so their divisor must count the rows of all processes. Raises
    `NonFinite` for a loss or gradient that is not finite, unless `nonfinite` is "skip": then that
    micro-batch is left out, by all processes; a step with none left, or whose summed gradient is
    not finite, changes nothing.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    total, kept, skipped = torch.zeros((), device=accelerator.device), 0, 0
    for loss in losses:
        finite = bool(torch.isfinite(loss))
        if nonfinite == "stop" and not finite:
            raise stop_of(loss.item())
        if not processes.everywhere(finite):
            if nonfinite == "stop":
                raise Lost("another process met a loss that is not finite")
            skipped += 1
            continue
        if loss.requires_grad:
            with processes.together():
                accelerator.backward(loss)
        total, kept = total + loss.detach(), kept + 1
    if not is_sharded(model):
        processes.sum_gradients(parameters)
    loss = processes.total(total.item())
    with processes.together():
        norm = accelerator.clip_grad_norm_(parameters, max_norm)
        norm = float(whole(norm)) if norm is not None else 0.0
    if not math.isfinite(norm):
        optimizer.zero_grad()
        if nonfinite == "stop":
            raise NonFinite(f"the gradient's norm is {norm}; nonfinite: stop. Nothing was saved")
        return StepFigures(loss, norm, skipped + kept)
    if kept:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad()
    return StepFigures(loss, norm, skipped)


def check_weights(model: nn.Module, name: str) -> None:
    """Raise `NonFinite` if any weight is NaN or infinite: such a model is never saved."""
    for key, weight in model.named_parameters():
        if not all_finite(own_part(weight)):
            raise NonFinite(f"{name}: weight {key} is not finite after training. Nothing was saved")


def ema(average: float | None, value: float) -> float:
    """Exponential moving average for the eye: decay 0.9, starting at the first value."""
    return value if average is None else EMA_DECAY * average + (1 - EMA_DECAY) * value
