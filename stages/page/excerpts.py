"""The few rows of large tables that the report shows, asked for in SQL: no table is held whole."""

import glob
from collections.abc import Sequence
from pathlib import Path

import duckdb
import pyarrow as pa

from stages.base.errors import InputError
from stages.base.tables import BUFFERS, EVALUATIONS, UPDATES, open_table

REWARDS = ", ".join(name for name in BUFFERS.names if name.startswith("reward"))


def changed_prompts(first: Path, last: Path, count: int) -> list[tuple[int, float]]:
    """(prompt_index, change) of the `count` held-out prompts that got worst, then best.

    The change is that of the share of right answers from one evaluation to the other; with ties,
    and where nothing changed, the prompts that come first stand for the rest.
    """
    share = "(select prompt_index, avg(correct::int) as share from read_parquet({}) group by all)"
    query = f"""
        select prompt_index, after.share - before.share as change
        from {share.format("$before")} as before join {share.format("$after")} as after
        using (prompt_index) order by prompt_index"""
    rows = _rows(query, before=(first, EVALUATIONS), after=(last, EVALUATIONS))
    changes = [(row["prompt_index"], row["change"]) for row in rows]
    worst = sorted(changes, key=lambda pair: pair[1])[:count]
    best = sorted(changes, key=lambda pair: -pair[1])[:count]
    return list(dict.fromkeys([*worst, *best]))


def answers(path: Path, prompts: Sequence[int]) -> dict[int, list[dict]]:
    """prompt_index -> its rows of an evaluation, the greedy answer first, for the prompts asked."""
    query = """
        select * exclude (completion_ids, file_row_number)
        from read_parquet($rows, file_row_number=true)
        where prompt_index in $wanted order by file_row_number"""
    return _by("prompt_index", prompts, _rows(query, prompts, rows=(path, EVALUATIONS)))


def telling_groups(path: Path, count: int) -> dict[str, list[int]]:
    """Groups of a buffer by mean reward: the `count` worst and best, and the one of widest spread.

    A group is named once, under the first heading that it fits; one without any reward under none.
    """
    query = """
        select "group" as id, avg(reward) as mean, max(reward) - min(reward) as spread
        from read_parquet($rows) where reward is not null group by all order by id"""
    found = _rows(query, rows=(path, BUFFERS))
    orders = {
        "worst": sorted(found, key=lambda row: row["mean"])[:count],
        "best": sorted(found, key=lambda row: -row["mean"])[:count],
        "widest spread": sorted(found, key=lambda row: -row["spread"])[:1],
    }
    seen: dict[int, str] = {}
    for heading, rows in orders.items():
        for row in rows:
            seen.setdefault(row["id"], heading)
    return {heading: [group for group in seen if seen[group] == heading] for heading in orders}


def completions(buffer: Path, updates: Path, groups: Sequence[int]) -> dict[int, list[dict]]:
    """group -> its completions with rewards and what the update did to them, highest reward first.

    `advantage` is the mean over the tokens of a completion.
    """
    query = f"""
        select "group", sample, prompt, answer, completion, finished, {REWARDS},
            list_avg(advantage) as advantage, ratio_max, clipped_fraction, kl, used
        from read_parquet($rows) as b left join read_parquet($updates) as u using ("group", sample)
        where "group" in $wanted order by reward desc nulls last, sample"""
    rows = _rows(query, groups, rows=(buffer, BUFFERS), updates=(updates, UPDATES))
    return _by("group", groups, rows)


def best_of_rollouts(path: Path) -> dict[str, float | None]:
    """Mean, picked and best accuracy over the groups of a buffer; None where nothing is to pick.

    Of each group the completions count that have both a rule's and a model's score. Picked is the
    one of highest `reward_model`; where several share it, the mean of them. Best is 1 where any of
    them is right.
    """
    query = """
        select avg(mean) as accuracy_rollout, avg(picked) as accuracy_picked_rollout,
            avg(best) as accuracy_best_rollout
        from (
            select avg(correct) as mean, max(correct) as best,
                avg(correct) filter (where reward_model = highest) as picked
            from (
                select "group", (reward_correctness >= 1)::int as correct, reward_model,
                    max(reward_model) over (partition by "group") as highest
                from read_parquet($rows)
                where reward_correctness is not null and reward_model is not null
            )
            group by "group" order by "group"
        )"""
    return _rows(query, rows=(path, BUFFERS))[0]


def best_of_answers(path: Path) -> float | None:
    """Share of the prompts of an evaluation with a sampled answer that is right (pass@n).

    None where nothing could check the answers.
    """
    query = """
        select avg(best) as best from (
            select max(correct::int) as best from read_parquet($rows)
            where not greedy and reward_correctness is not null group by prompt_index
        )"""
    return _rows(query, rows=(path, EVALUATIONS))[0]["best"]


def _by(key: str, wanted: Sequence[int], rows: list[dict]) -> dict[int, list[dict]]:
    found = {number: [row for row in rows if row[key] == number] for number in wanted}
    return {number: rows for number, rows in found.items() if rows}


def _rows(
    query: str, wanted: Sequence[int] | None = None, **tables: tuple[Path, pa.Schema]
) -> list[dict]:
    """What a query over tables gives, each checked to be of its schema.

    One thread, so that sums come out the same every time.
    """
    for path, schema in tables.values():
        open_table(path, schema).close()
    values = {name: glob.escape(str(path)) for name, (path, _) in tables.items()}
    values |= {} if wanted is None else {"wanted": list(wanted)}
    try:
        with duckdb.connect(config={"threads": 1}) as database:
            found = database.execute(query, values)
            names = [column[0] for column in found.description]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    except duckdb.Error as error:
        broken = ", ".join(str(path) for path, _ in tables.values())
        raise InputError(f"{broken}: a broken Parquet file ({error})") from error
