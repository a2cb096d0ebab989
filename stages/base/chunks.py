"""Parts of a sequence or stream, each small enough to be in memory."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice


def chunks(items: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` consecutive items, read as they are asked for; the last holds the rest."""
    items = iter(items)
    while part := list(islice(items, size)):
        yield part


def within(units: Iterable[Sequence[int]], limit: int | None) -> Iterator[list[int]]:
    """Units of row lengths -> numbers of neighbours that one pass reads, at most `limit` tokens.

    A unit holds the lengths of rows that stay together (one, or the two of a pair). A pass pads its
    rows to the longest, and the padding counts. A unit above the limit goes alone; None: no limit.
    """
    part, rows, longest = [], 0, 0
    for number, lengths in enumerate(units):
        rows, longest = rows + len(lengths), max(longest, *lengths)
        if part and limit is not None and rows * longest > limit:
            yield part
            part, rows, longest = [], len(lengths), max(lengths)
        part.append(number)
    if part:
        yield part
