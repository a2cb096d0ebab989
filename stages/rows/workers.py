"""Batches of rows worked on by as many processes as there are cores, their results in order.

Only text is handled here, where every row stands alone: what comes out does not depend on how many
processes there are. joblib would read its input to the end, however slowly results are taken, and
leave its processes running where their parent is killed.
"""

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, islice
from typing import TypeVar

from stages.base.command import stop_with

Batch, Result = TypeVar("Batch"), TypeVar("Result")

_work: list[Callable] = []


def in_order(work: Callable[[Batch], Result], batches: Iterable[Batch]) -> Iterator[Result]:
    """`map(work, batches)` by several processes, reading no more than two batches a core ahead.

    The first batch is worked on here. The processes inherit what it loads, and where it is the only
    one there are none. `work` must be a function of a module, or a partial of one.
    """
    batches, cores = iter(batches), _cores()
    yield from map(work, islice(batches, 1))
    first = list(islice(batches, 1))
    if not first or cores == 1:
        yield from map(work, chain(first, batches))
        return
    pool = ProcessPoolExecutor(cores, initializer=_start, initargs=(work, os.getpid()))
    try:
        waiting = deque()
        for batch in chain(first, batches):
            waiting.append(pool.submit(_run, batch))
            if len(waiting) == 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(work: Callable, parent: int) -> None:
    stop_with(parent, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they end the stage, which ends these
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _work.append(work)


def _run(batch):
    return _work[0](batch)
