"""Stage `tokenize_labelled@x`: from completions labelled right or wrong to ids.

Reads   a file under data/source (prompt, completion, label; or messages, label), tokenizer and
        config of models/base
Knobs   preferences.max_length, trust_remote_code
Writes  data/labelled/x.parquet (base/tables.py: LABELLED), figures of rows kept and dropped

A reward model of kind outcome learns from it; which prompts are held out is left to `train_rm`.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click

from stages.base import params
from stages.base.command import Stage, paths, say
from stages.base.kept import Kept
from stages.base.knobs import Source
from stages.base.metrics import write_json
from stages.base.positions import longest_row
from stages.base.scratch import work_of
from stages.base.tables import IGNORED, LABELLED, write_batches
from stages.base.tokenizers import load_tokenizer
from stages.knobs.tokenize_labelled import Knobs
from stages.rows.canonical import LabelledRow
from stages.rows.inputs import Intake, files_of_source, open_source, tokenized
from stages.text.chat import encode_conversations
from stages.text.messages import Dropped
from stages.text.templates import tools_unseen


@click.command(cls=Stage)
@paths("--rows file", "--base", "--out", "--figures")
def tokenize_labelled(file: Path, base: Path, out: Path, figures: Path) -> None:
    """Tokenize labelled completions."""
    knobs = params.load(Knobs)
    trust = knobs.model.trust_remote_code
    tokenizer = load_tokenizer(base, trust)
    longest = longest_row(base, knobs.preferences.max_length, "preferences.max_length", trust)
    name, rows = open_source("labelled", source_of(file), file, 0)
    intake = Intake(name, "right", "truncated")
    files = files_of_source(source_of(file), file)
    kept = Kept(work_of("tokenize_labelled", [base, *files], knobs) if files else None)
    encoded = tokenized(rows, partial(encode, tokenizer, longest), LABELLED, intake, kept)
    provenance = {"stage": "tokenize_labelled", "source": name, "tokenizer": str(base)}
    with kept.watching():
        write_batches(out, LABELLED, encoded, provenance)
    write_json(figures, intake.figures())
    kept.done()
    say(intake.figures())


def source_of(file: Path) -> Source:
    """A whole file, its columns named as the fields are."""
    unset = dict.fromkeys(("name", "revision", "max_samples", "format", "columns"))
    return Source(dataset=str(file), split="train", **unset)


def encode(tokenizer, max_length: int, rows: list[LabelledRow]) -> Iterator:
    """Canonical rows -> each its row of the table and what is counted, or why there is none."""
    messages, tools = [row.messages for row in rows], [row.tools for row in rows]
    results = encode_conversations(tokenizer, messages, "last_assistant", max_length, tools)
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, Dropped):
            yield result
            continue
        # What a template writes after the answer's stop token is no part of the completion.
        trained = [i for i, label in enumerate(result.labels) if label != IGNORED]
        start, stop = trained[0], trained[-1] + 1
        if not start or stop - start != len(trained):
            yield Dropped("the completion does not follow a prompt in one piece")
            continue
        all_ids = result.input_ids
        ids = {"prompt_ids": all_ids[:start], "completion_ids": all_ids[start:stop]}
        yield (
            ids | {"label": float(row.label)},
            {
                "tools_unseen": tools_unseen(tokenizer, row.messages, row.tools),
                "right": row.label,
                "truncated": result.truncated,
            },
        )


if __name__ == "__main__":
    tokenize_labelled()
