"""Stage `tokenize_preferences`: from preference rows to pairs of ids.

Reads   preference rows (the task's, or what preferences.dataset names), tokenizer and config of
        models/base
Knobs   preferences (source, max_length), seed (which rows max_samples keeps), trust_remote_code
Writes  data/preferences/pairs.parquet (base/tables.py: PAIRS), figures of rows kept and dropped

The split is left to `split_preferences`: another share must not tokenize again.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click

from stages.base import params
from stages.base.command import Stage, paths, say
from stages.base.kept import Kept
from stages.base.metrics import write_json
from stages.base.positions import longest_row
from stages.base.scratch import work_of
from stages.base.tables import PAIRS, write_batches
from stages.base.tokenizers import load_tokenizer
from stages.knobs.tokenize_preferences import Knobs
from stages.rows.canonical import PreferenceRow
from stages.rows.inputs import Intake, files_of_source, open_source, tokenized
from stages.text.chat import encode_pairs
from stages.text.messages import Dropped
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
    files = files_of_source(knobs.preferences, task)
    kept = Kept(work_of("tokenize_preferences", [base, *files], knobs) if files else None)
    encoded = tokenized(rows, encoding, PAIRS, intake, kept)
    provenance = {"stage": "tokenize_preferences", "source": name, "tokenizer": str(base)}
    with kept.watching():
        write_batches(out, PAIRS, encoded, provenance)
    write_json(figures, intake.figures())
    kept.done()
    say(intake.figures())


def encode(tokenizer, max_length: int, rows: list[PreferenceRow]) -> Iterator:
    """Canonical pairs -> each its row of the table and what is counted, or why there is none."""
    pairs = [(row.prompt, row.chosen, row.rejected) for row in rows]
    results = encode_pairs(tokenizer, pairs, max_length, [row.tools for row in rows])
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, Dropped):
            yield result
            continue
        ids = {name: getattr(result, name) for name in ("prompt_ids", "chosen_ids", "rejected_ids")}
        yield (
            ids | {"margin": row.margin},
            {
                "tools_unseen": tools_unseen(tokenizer, [*row.prompt, *row.chosen], row.tools),
                "truncated": result.truncated,
                "masked_by_offsets": result.route == "offsets",
            },
        )


if __name__ == "__main__":
    tokenize_preferences()
