"""Prompts to sample from: read, rendered and tokenized, with what the reward rules need."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from stages.base.chunks import chunks
from stages.base.errors import BadKnob, InputError
from stages.base.knobs import Source
from stages.base.positions import positions_of
from stages.rollouts.engine import Prompt
from stages.rollouts.rewards import Rules
from stages.rows.canonical import PromptRow
from stages.rows.formats import BATCH
from stages.rows.inputs import Intake, open_source, settle
from stages.text.chat import encode_prompts
from stages.text.messages import Dropped
from stages.text.templates import tools_unseen


def load_prompts(
    source: Source, task_file: Path, tokenizer, max_length: int, seed: int
) -> tuple[list[Prompt], Intake]:
    """Knobs of a source -> its prompts of up to `max_length` ids; others are counted as dropped."""
    name, rows = open_source("prompts", source, task_file, seed)
    intake, prompts = Intake(name), []
    for batch in chunks(rows, BATCH):
        kept, *found = settle(partial(encode, tokenizer, max_length), batch)
        intake.add(kept, *found)
        prompts += [Prompt(number, *rest) for number, rest in kept]
    intake.close()
    return prompts, intake


def encode(tokenizer, max_length: int, rows: list[PromptRow]) -> Iterator:
    """Canonical rows -> each the rest of its prompt and what is counted, or why there is none."""
    tools = [row.tools for row in rows]
    results = encode_prompts(tokenizer, [row.messages for row in rows], tools)
    for row, ids in zip(rows, results, strict=True):
        if isinstance(ids, Dropped):
            yield ids
            continue
        if len(ids) > max_length:
            yield Dropped(f"prompt longer than {max_length} tokens")
            continue
        unseen = tools_unseen(tokenizer, row.messages, row.tools)
        yield (ids, tokenizer.decode(ids), row.answer, row.entry), {"tools_unseen": unseen}


def reward_columns(rules: Rules, verifier: str, prompt: Prompt, text: str, length: int) -> dict:
    """A completion's rule columns; InputError with the prompt's row where a verifier raises."""
    try:
        return rules.components(text, length, prompt.answer, prompt.entry)
    except Exception as error:
        raise InputError(
            f"prompt {prompt.index}: the verifier {verifier!r} raised {error!r} on {text!r}"
        ) from error


def context_limit(model, max_new_tokens: int) -> int:
    """Longest prompt that leaves room for `max_new_tokens` in the model's positions."""
    positions = positions_of(model.config)
    if positions is None:
        return 10**9
    if positions <= max_new_tokens:
        raise BadKnob(
            "max_new_tokens",
            f"found {max_new_tokens}, but the model has only {positions} positions",
        )
    return positions - max_new_tokens
