"""Stage `score_pairs@x`: what the reference of a branch thinks of both sides of every pair.

Reads   data/preferences/{train,validation}.parquet, the policy that branch x starts from
Knobs   score_batch_size, device, precision, threads, attention, trust_remote_code
Writes  data/direct/x/{train,validation}.parquet (base/tables.py: SCORED_PAIRS), figures

The log-probs are per token and depend on no loss: another loss or beta of `train_direct` reuses
them.
"""

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import click

from stages.base import params
from stages.base.command import Stage, paths, progress, say
from stages.base.contents import check_contents, check_positions, check_vocabulary
from stages.base.kept import Kept
from stages.base.metrics import write_json
from stages.base.positions import positions_of
from stages.base.scratch import work_of
from stages.base.tables import PAIRS, SCORED_PAIRS, iterate_batches, open_table, write_table
from stages.knobs.score_pairs import Knobs
from stages.models.checkpoints import load_policy
from stages.models.compute import accelerator as make_accelerator
from stages.models.compute import vocabulary_of
from stages.models.scorers import by_parts, reference_log_probs

SIDES = ("chosen", "rejected")


@click.command(cls=Stage)
@paths("--train", "--validation", "--reference")
@paths("--train-out", "--validation-out", "--figures")
def score_pairs(
    train: Path,
    validation: Path,
    reference: Path,
    train_out: Path,
    validation_out: Path,
    figures: Path,
) -> None:
    """Write the reference's log-probs beside each pair."""
    knobs = params.load(Knobs)
    accelerator = make_accelerator(knobs.device, knobs.precision, knobs.threads)
    trust = knobs.model.trust_remote_code
    model = load_policy(reference, knobs.attention, accelerator.device, trust, knobs.precision)
    for path in (train, validation):
        check_vocabulary(path, check_contents(path, PAIRS), vocabulary_of(model), reference)
        check_positions(path, PAIRS, positions_of(model.config), reference)
    inputs = [train, validation, reference]
    kept = Kept(work_of("score_pairs", inputs, knobs, accelerator.device))
    found = {}
    for name, pairs, out in (
        ("train", train, train_out),
        ("validation", validation, validation_out),
    ):
        sums = {"pairs": 0, "chosen": 0.0, "rejected": 0.0, "right": 0}
        with kept.watching(), accelerator.autocast():
            sizes = (knobs.score_batch_size, knobs.forward_max_tokens)
            rows = scored(model, pairs, sizes, name, sums, kept)
            provenance = {"stage": "score_pairs", "reference": str(reference)}
            write_table(out, SCORED_PAIRS, rows, provenance)
        found |= {
            f"{name}_pairs": sums["pairs"],
            f"{name}_chosen_log_prob": sums["chosen"] / sums["pairs"],
            f"{name}_rejected_log_prob": sums["rejected"] / sums["pairs"],
            f"{name}_chosen_likelier": sums["right"] / sums["pairs"],
        }
    write_json(figures, found)
    kept.done()
    say(found)


def scored(
    model, path: Path, sizes: tuple[int, int | None], name: str, sums: dict, kept: Kept
) -> Iterator[dict]:
    """The pairs of a table with the reference's log-probs of each token; counted in `sums`."""

    def rest(done: int, _) -> Iterator[tuple[list[dict], dict]]:
        for rows in batches(model, path, sizes, name, done):
            yield rows, {}

    for rows, _ in kept.rows(name, SCORED_PAIRS, rest):
        for row in rows:
            chosen, rejected = (sum(row[f"log_probs_ref_{side}"]) for side in SIDES)
            sums["pairs"] += 1
            sums["chosen"] += chosen
            sums["rejected"] += rejected
            sums["right"] += chosen > rejected
        yield from rows


def batches(
    model, path: Path, sizes: tuple[int, int | None], name: str, done: int = 0
) -> Iterator[list[dict]]:
    """The pairs with both sides' log-probs, batch by batch after the first `done`.

    `sizes` are the pairs of a batch, and the most tokens of a pass, padding included.
    """

    def measure(answers: list[dict]) -> tuple[list]:
        return (reference_log_probs(model, answers, 1.0),)

    batch_size, limit = sizes
    with open_table(path, PAIRS) as file:
        total = math.ceil(file.metadata.num_rows / batch_size)
    pairs = islice(iterate_batches(path, PAIRS, batch_size), done, None)
    bar = progress(pairs, name, total, done)
    for batch in bar:
        rows = batch.to_pylist()
        for side in SIDES:
            answers = [
                {"prompt_ids": row["prompt_ids"], "completion_ids": row[f"{side}_ids"]}
                for row in rows
            ]
            (found,) = by_parts(measure, answers, limit)
            for row, log_probs in zip(rows, found, strict=True):
                row[f"log_probs_ref_{side}"] = log_probs
        yield rows
        bar.tell(len(rows), "pairs")


if __name__ == "__main__":
    score_pairs()
