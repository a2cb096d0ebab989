"""The few rows of large tables that the report shows; no table is ever read whole."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from stages.base.tables import (
    BUFFERS,
    EVALUATIONS,
    UPDATES,
    iterate_batches,
)

REWARDS = [name for name in BUFFERS.names if name.startswith("reward")]


def changed_prompts(first: Path, last: Path, count: int) -> list[tuple[int, float]]:
    """(prompt_index, change) of the `count` held-out prompts that got worst, then best.

    The change is that of the share of right answers from one evaluation to the other; with ties,
    and where nothing changed, the prompts that come first stand for the rest.
    """
    before, after = right_shares(first), right_shares(last)
    changes = [(number, after[number] - before[number]) for number in before if number in after]
    worst = sorted(changes, key=lambda pair: (pair[1], pair[0]))[:count]
    best = sorted(changes, key=lambda pair: (-pair[1], pair[0]))[:count]
    return list(dict.fromkeys([*worst, *best]))


def right_shares(path: Path) -> dict[int, float]:
    """prompt_index -> share of right answers among all of that prompt, greedy and sampled."""
    total: dict[int, list[int]] = {}
    for row in _rows(path, EVALUATIONS, ["prompt_index", "correct"]):
        total.setdefault(row["prompt_index"], []).append(row["correct"])
    return {number: sum(right) / len(right) for number, right in total.items()}


def answers(path: Path, prompts: Sequence[int]) -> dict[int, list[dict]]:
    """prompt_index -> its rows of an evaluation, the greedy answer first, for the prompts asked."""
    columns = [name for name in EVALUATIONS.names if name != "completion_ids"]
    return _gathered(path, EVALUATIONS, columns, "prompt_index", prompts)


def telling_groups(path: Path, count: int) -> dict[str, list[int]]:
    """Groups of a buffer by mean reward: the `count` worst and best, and the one of widest spread.

    A group is named once, under the first heading that it fits; one without any reward under none.
    """
    rewards: dict[int, list[float]] = {}
    for row in _rows(path, BUFFERS, ["group", "reward"]):
        if row["reward"] is not None:
            rewards.setdefault(row["group"], []).append(row["reward"])
    mean = {group: sum(found) / len(found) for group, found in rewards.items()}
    spread = {group: max(found) - min(found) for group, found in rewards.items()}
    chosen = {
        "worst": sorted(mean, key=lambda group: (mean[group], group))[:count],
        "best": sorted(mean, key=lambda group: (-mean[group], group))[:count],
        "widest spread": sorted(spread, key=lambda group: (-spread[group], group))[:1],
    }
    seen: set[int] = set()
    for name, groups in chosen.items():
        chosen[name] = [group for group in groups if group not in seen]
        seen.update(groups)
    return chosen


def completions(buffer: Path, updates: Path, groups: Sequence[int]) -> dict[int, list[dict]]:
    """group -> its completions with rewards and what the update did to them, highest reward first.

    `advantage` is the mean over the tokens of a completion.
    """
    columns = ["group", "sample", "prompt", "answer", "completion", "finished", *REWARDS]
    found = _gathered(buffer, BUFFERS, columns, "group", groups)
    columns = ["group", "sample", "advantage", "ratio_max", "clipped_fraction", "kl", "used"]
    for group, rows in _gathered(updates, UPDATES, columns, "group", groups).items():
        done = {row["sample"]: row for row in rows}
        for row in found.get(group, []):
            row |= done.get(row["sample"], {})
            tokens = row.get("advantage")
            row["advantage"] = sum(tokens) / len(tokens) if tokens else None
    for rows in found.values():
        rows.sort(key=lambda row: (row["reward"] is None, -(row["reward"] or 0), row["sample"]))
    return found


def _gathered(
    path: Path, schema: pa.Schema, columns: list[str], key: str, wanted: Sequence[int]
) -> dict[int, list[dict]]:
    found: dict[int, list[dict]] = {number: [] for number in wanted}
    for row in _rows(path, schema, columns, key, wanted):
        found[row[key]].append(row)
    return {number: rows for number, rows in found.items() if rows}


def _rows(
    path: Path,
    schema: pa.Schema,
    columns: list[str],
    key: str | None = None,
    wanted: Sequence[int] = (),
) -> Iterator[dict]:
    """Rows with some of the columns; with a key only those whose value is wanted."""
    for batch in iterate_batches(path, schema, columns=columns):
        if key is None:
            yield from batch.to_pylist()
            continue
        for index, value in enumerate(batch[key].to_pylist()):
            if value in wanted:
                yield batch.slice(index, 1).to_pylist()[0]
