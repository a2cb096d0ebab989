"""Parts of a sequence or stream, each small enough to be in memory."""

from collections.abc import Iterable, Iterator
from itertools import islice


def chunks(items: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` consecutive items, read as they are asked for; the last holds the rest."""
    items = iter(items)
    while part := list(islice(items, size)):
        yield part
