"""Stage `tokenize_sft`: from SFT rows to ids and labels.

Reads   SFT rows (the task's, or what sft.dataset names), tokenizer and config of models/base
Knobs   sft (source, max_length, train_on), seed (which rows max_samples keeps),
        trust_remote_code
Writes  data/sft.parquet (base/tables.py: SFT), figures of rows kept and dropped

Batching and shuffling are left to `train_sft`: another batch size must not tokenize again.
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
from stages.base.tables import IGNORED, SFT, write_batches
from stages.base.tokenizers import load_tokenizer
from stages.knobs.tokenize_sft import Knobs
from stages.rows.canonical import SftRow
from stages.rows.inputs import Intake, files_of_source, open_source, tokenized
from stages.text.chat import TrainOn, encode_conversations, encode_texts
from stages.text.messages import Dropped
from stages.text.templates import tools_unseen

SUMS = ("tokens", "trained_tokens", "truncated", "masked_by_offsets")


@click.command(cls=Stage)
@paths("--task", "--base", "--out", "--figures")
def tokenize_sft(task: Path, base: Path, out: Path, figures: Path) -> None:
    """Tokenize SFT rows."""
    knobs = params.load(Knobs)
    trust = knobs.model.trust_remote_code
    tokenizer = load_tokenizer(base, trust)
    name, rows = open_source("sft", knobs.sft, task, knobs.seed)
    intake = Intake(name, *SUMS)
    longest = longest_row(
        base, knobs.sft.max_length, "sft.max_length", knobs.model.trust_remote_code
    )
    encoding = partial(encode, tokenizer, knobs.sft.train_on, longest)
    files = files_of_source(knobs.sft, task)
    kept = Kept(work_of("tokenize_sft", [base, *files], knobs) if files else None)
    encoded = tokenized(rows, encoding, SFT, intake, kept)
    provenance = {"stage": "tokenize_sft", "source": name, "tokenizer": str(base)}
    with kept.watching():
        write_batches(out, SFT, encoded, provenance)
    write_json(figures, intake.figures())
    kept.done()
    say(intake.figures())


def encode(tokenizer, train_on: TrainOn, max_length: int, rows: list[SftRow]) -> Iterator:
    """Canonical rows -> each its row of the table and what is counted, or why there is none."""
    texts = [row.text for row in rows]
    if any(text is not None for text in texts):
        results = encode_texts(tokenizer, texts, max_length)
    else:
        conversations, tools = [row.messages for row in rows], [row.tools for row in rows]
        results = encode_conversations(tokenizer, conversations, train_on, max_length, tools)
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, Dropped):
            yield result
            continue
        labels = result.labels
        yield (
            {"input_ids": result.input_ids, "labels": labels},
            {
                "tools_unseen": tools_unseen(tokenizer, row.messages, row.tools),
                "tokens": len(labels),
                "trained_tokens": len(labels) - labels.count(IGNORED),
                "truncated": result.truncated,
                "masked_by_offsets": result.route == "offsets",
            },
        )


if __name__ == "__main__":
    tokenize_sft()
