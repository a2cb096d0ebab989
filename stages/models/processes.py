"""What the processes of a stage tell each other, by torch's collectives.

Each runs the same script and comes to the same calls in the same order. A single process says
nothing, and what it gives comes back as it is.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stages.base.chunks import chunks
from stages.base.errors import Lost

Item, Result = TypeVar("Item"), TypeVar("Result")

BUCKET = 32 << 20  # bytes of gradients that go over the wire at once


def count() -> int:
    """How many processes share the work."""
    return dist.get_world_size() if dist.is_initialized() else 1


def number() -> int:
    """Which of them this one is: 0 writes and prints."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def _together() -> Iterator[None]:
    """Turn whatever a collective raises where a process is gone into `Lost`."""
    try:
        yield
    except RuntimeError as error:
        raise Lost(str(error)) from error


@contextmanager
def together() -> Iterator[None]:
    """Around a pass with collectives of torch's own in it: `Lost` for what these raise alone."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise Lost(str(error)) from error
        raise


def summed(tensor: Tensor) -> Tensor:
    """The sum of all processes' tensors of one shape, written into this one's."""
    if count() > 1:
        with _together():
            dist.all_reduce(tensor)
    return tensor


def total(value: float) -> float:
    """The sum of all processes' numbers, in float64."""
    return summed(torch.tensor(value, dtype=torch.float64)).item() if count() > 1 else value


def everywhere(flag: bool) -> bool:
    """Whether it is so in every process."""
    return total(not flag) == 0


def gathered(value: object) -> list:
    """The values of all processes, in their order; they travel as pickles."""
    if count() == 1:
        return [value]
    found = [None] * count()
    with _together():
        dist.all_gather_object(found, value)
    return found


def in_turn(
    work: Callable[[Item], Result], items: Iterable[Item], in_step: bool = False
) -> Iterator[Result]:
    """`map(work, items)`, each process working on every so many of them; all get all results.

    `in_step` each works as often as the others, on the last item where it has none of its own.
    """
    for turn in chunks(items, count()):
        own = turn[number() : number() + 1] or (turn[-1:] if in_step else [])
        for found in gathered([work(item) for item in own])[: len(turn)]:
            yield from found


def follow(rows: Iterable) -> bool:
    """Take part in making rows that the first process writes; False, and nothing done, there."""
    if number():
        deque(rows, maxlen=0)
    return number() > 0


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum each parameter's gradient over all processes, in flat buckets.

    One without a gradient here counts 0; one without a gradient anywhere keeps none, so that its
    optimizer leaves it alone.
    """
    if count() == 1:
        return
    have = summed(torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32))
    for bucket in _buckets([p for p, any_has in zip(parameters, have, strict=True) if any_has]):
        flat = torch.cat([_gradient(parameter).flatten() for parameter in bucket])
        sizes = [parameter.numel() for parameter in bucket]
        for parameter, part in zip(bucket, summed(flat).split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one type, up to `BUCKET` bytes of them; a larger one stands alone."""
    bucket, size = [], 0
    for parameter in parameters:
        if bucket and (size + parameter.nbytes > BUCKET or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
