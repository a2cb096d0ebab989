"""Stage `tokenize_preferences`: from preference rows to pairs of ids.

Reads   preference rows (the task's, or what preferences.dataset names), tokenizer and config of
        models/base
Knobs   preferences (source, max_length), seed (which rows max_samples keeps), trust_remote_code
Writes  data/preferences/pairs.parquet (base/tables.py: PAIRS), figures of rows kept and dropped

The split is left to `split_preferences`: another share must not tokenize again.
"""

from functools import partial
from pathlib import Path

import click

from stages.base import params
from stages.base.command import Stage, paths, say
from stages.base.metrics import write_json
from stages.base.tables import PAIRS, write_batches
from stages.base.tokenizers import load_tokenizer
from stages.knobs.tokenize_preferences import Knobs
from stages.rows.inputs import Intake, Part, open_source, tokenized, usable
from stages.text.chat import encode_pairs
from stages.text.messages import Dropped
from stages.text.positions import longest_row
from stages.text.templates import tools_unseen


@click.command(cls=Stage)
@paths("--task", "--base", "--out", "--figures")
def tokenize_preferences(task: Path, base: Path, out: Path, figures: Path) -> None:
    """Tokenize preference pairs."""
    knobs = params.load(Knobs)
    trust = knobs.model.trust_remote_code
    tokenizer = load_tokenizer(base, trust)
    name, rows = open_source("preferences", knobs.preferences, task, knobs.seed)
    intake = Intake(name, "truncated", "masked_by_offsets")
    longest = longest_row(base, knobs.preferences.max_length, "preferences.max_length", trust)
    encoding = partial(encode, tokenizer, longest)
    encoded = tokenized(rows, encoding, PAIRS, intake)
    provenance = {"stage": "tokenize_preferences", "source": name, "tokenizer": str(base)}
    write_batches(out, PAIRS, encoded, provenance)
    write_json(figures, intake.figures())
    say(intake.figures())


def encode(tokenizer, max_length: int, batch: list, part: Part) -> None:
    """Numbered canonical pairs -> rows of the table and what is counted, in `part`."""
    numbers, kept = usable(batch, part)
    pairs = [(row.prompt, row.chosen, row.rejected) for row in kept]
    results = encode_pairs(tokenizer, pairs, max_length, [row.tools for row in kept])
    for number, row, result in zip(numbers, kept, results, strict=True):
        if isinstance(result, Dropped):
            part.drop(number, result.reason)
            continue
        part.keep(
            prompt_ids=result.prompt_ids,
            chosen_ids=result.chosen_ids,
            rejected_ids=result.rejected_ids,
            margin=row.margin,
        )
        part.sums["tools_unseen"] += tools_unseen(tokenizer, [*row.prompt, *row.chosen], row.tools)
        part.sums["truncated"] += result.truncated
        part.sums["masked_by_offsets"] += result.route == "offsets"


if __name__ == "__main__":
    tokenize_preferences()
