"""Which rows go into which optimizer step and micro-batch; plain row numbers in and out."""

from collections.abc import Iterable, Sequence

from stages.base.chunks import chunks, within
from stages.base.randomness import shuffled

WINDOW = 16


def plan_epoch(
    lengths: list[int], batch_size: int, batch_acc: int, drop_last: bool, seed: int, *names: object
) -> list[list[list[int]]]:
    """Row lengths -> optimizer steps, each of up to `batch_acc` micro-batches of row numbers.

    Rows are shuffled by the stream (seed, *names). Within windows of 16 micro-batches rows of like
    length go together, then the micro-batches are shuffled again: less padding, while the order
    stays random. `drop_last` leaves out a last step that is not full; with too few rows for one
    step nothing is left out.
    """
    order = shuffled(len(lengths), seed, *names, "rows")
    window = WINDOW * batch_size
    batches, partial = [], []
    for start in range(0, len(order), window):
        rows = sorted(order[start : start + window], key=lambda row: lengths[row])
        parts = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        batches += [part for part in parts if len(part) == batch_size]
        partial += [part for part in parts if len(part) < batch_size]
    batches = [batches[i] for i in shuffled(len(batches), seed, *names, "batches")] + partial
    steps = [batches[i : i + batch_acc] for i in range(0, len(batches), batch_acc)]
    full = batch_size * batch_acc
    if drop_last and len(steps) > 1 and sum(map(len, steps[-1])) < full:
        steps = steps[:-1]
    return steps


def dealt(batch: list, number: int, count: int) -> list:
    """The rows of a micro-batch that process `number` of `count` takes: every `count`-th.

    Rows stand by length, so that each process gets about as many tokens.
    """
    return batch[number::count]


def neighbours(size: int, number: int, count: int, unit: int = 1) -> slice:
    """The part of `size` rows that process `number` of `count` takes: neighbours, so that prompts
    stay together. Runs of `unit` rows are never torn apart.
    """
    units = -(-size // unit)
    return slice(units * number // count * unit, units * (number + 1) // count * unit)


def plan_groups(
    groups: list[int], batch_size: int, batch_acc: int, seed: int, *names: object
) -> list[list[list[int]]]:
    """Group of each row -> optimizer steps of micro-batches; shuffling never tears a group apart.

    The completions of one prompt stay neighbours, so that a micro-batch reads each prompt once. The
    last step holds what is left.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    keys = list(members)
    rows = [row for i in shuffled(len(keys), seed, *names) for row in members[keys[i]]]
    batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    return [batches[i : i + batch_acc] for i in range(0, len(batches), batch_acc)]


def fill(
    units: Iterable[list[int]], batch_size: int, lengths: Sequence[int] | None, limit: int | None
) -> list[list[int]]:
    """Units of rows that belong together -> micro-batches of row numbers, in order.

    Each holds up to `batch_size` rows and, where there is a `limit`, that many padded tokens by the
    rows' `lengths`: of more, units of like length go together. No unit is parted: one that is too
    large goes alone.
    """
    batches: list[list[list[int]]] = []
    rows = batch_size
    for unit in units:
        if rows + len(unit) > batch_size:
            batches.append([])
            rows = 0
        batches[-1].append(unit)
        rows += len(unit)
    if limit is not None:
        batches = [part for batch in batches for part in _cut_units(batch, lengths, limit)]
    return [[row for unit in batch for row in unit] for batch in batches]


def cut(
    batch: Sequence[int], lengths: Sequence[int], limit: int | None, sides: int = 1
) -> list[list[int]]:
    """A micro-batch of row numbers -> micro-batches of at most `limit` padded tokens.

    `sides` rows are read for each number: 2 of a pair. A row above the limit goes alone. One that
    is within the limit stays as it is; of others rows of like length go together.
    """
    if limit is None:
        return [list(batch)]
    units = [[row] * sides for row in batch]
    return [[unit[0] for unit in part] for part in _cut_units(units, lengths, limit)]


def _cut_units(units: list[list[int]], lengths: Sequence[int], limit: int) -> list[list[list[int]]]:
    """Units of rows -> parts of at most `limit` padded tokens, sorted where they are several."""
    of_units = [[lengths[row] for row in unit] for unit in units]
    if sum(map(len, units)) * max(map(max, of_units)) <= limit:
        return [units]
    order = sorted(range(len(units)), key=lambda place: max(of_units[place]))
    parts = within((of_units[place] for place in order), limit)
    return [[units[order[place]] for place in part] for part in parts]


def in_order(
    lengths: Sequence[int], batch_size: int, limit: int | None, sides: int = 1
) -> list[list[int]]:
    """Row lengths -> micro-batches of rows as they come, cut where they hold too many tokens."""
    batches = chunks(range(len(lengths)), batch_size)
    return [
        [batch[place] for place in part]
        for batch in batches
        for part in within(([lengths[row]] * sides for row in batch), limit)
    ]


def pair_lengths(rows) -> list[int]:
    """Tokens of prompt and longer answer of each pair, by which pairs are batched."""
    sides = (rows.lengths(name) for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
    return [prompt + max(chosen, rejected) for prompt, chosen, rejected in zip(*sides, strict=True)]
