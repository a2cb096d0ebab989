"""Stage `tokenize_preferences`: from preference rows to pairs of ids.

Reads   preference rows (the task's, or what preferences.dataset names), models/base's tokenizer
Knobs   preferences (source, max_length), seed (which rows max_samples keeps)
Writes  data/preferences/pairs.parquet (store/tables.py: PAIRS), figures of rows kept and dropped

The split is left to `split_preferences`: another share must not tokenize again.
"""

from collections.abc import Iterator
from pathlib import Path

import click

from stages.core.errors import InputError
from stages.core.text.chat import encode_pairs
from stages.core.text.messages import Dropped
from stages.knobs.tokenize_preferences import Knobs
from stages.store.common import params
from stages.store.common.command import Stage, progress, say
from stages.store.common.metrics import write_json
from stages.store.sources.inputs import Intake, batches, open_source, usable
from stages.store.sources.tokenizers import load_tokenizer
from stages.store.tables import PAIRS, write_table


@click.command(cls=Stage)
@click.option("--task", type=click.Path(path_type=Path), required=True)
@click.option("--base", type=click.Path(path_type=Path), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--figures", type=click.Path(path_type=Path), required=True)
def tokenize_preferences(task: Path, base: Path, out: Path, figures: Path) -> None:
    """Tokenize preference pairs."""
    knobs = params.load(Knobs)
    tokenizer = load_tokenizer(base)
    name, rows = open_source("preferences", knobs.preferences, task, knobs.seed)
    intake = Intake(name)
    totals = {"truncated": 0, "masked_by_offsets": 0}
    rows = progress(rows, "tokenize")
    encoded = encode(tokenizer, rows, knobs.preferences.max_length, intake, totals)
    provenance = {"stage": "tokenize_preferences", "source": name, "tokenizer": str(base)}
    write_table(out, PAIRS, encoded, provenance)
    intake.report()
    if not intake.kept:
        raise InputError(f"{name}: no pair was kept of {intake.rows}")
    write_json(figures, intake.figures() | totals)
    say(intake.figures() | totals)


def encode(tokenizer, rows, max_length: int, intake: Intake, totals: dict) -> Iterator[dict]:
    """Canonical pairs -> rows of the table, a batch of 1000 at a time; counts on the way."""
    for batch in batches(rows):
        numbers, kept = usable(batch, intake)
        pairs = [(row.prompt, row.chosen, row.rejected) for row in kept]
        results = encode_pairs(tokenizer, pairs, max_length, [row.tools for row in kept])
        for number, row, result in zip(numbers, kept, results, strict=True):
            if isinstance(result, Dropped):
                intake.drop(number, result.reason)
                continue
            intake.keep()
            totals["truncated"] += result.truncated
            totals["masked_by_offsets"] += result.route == "offsets"
            yield {
                "prompt_ids": result.prompt_ids,
                "chosen_ids": result.chosen_ids,
                "rejected_ids": result.rejected_ids,
                "margin": row.margin,
            }


if __name__ == "__main__":
    tokenize_preferences()
