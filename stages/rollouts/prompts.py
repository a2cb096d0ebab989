"""Prompts to sample from: read, rendered and tokenized, with what the reward rules need."""

from pathlib import Path

from stages.base.chunks import chunks
from stages.base.errors import BadKnob, InputError
from stages.base.knobs import Source
from stages.rollouts.engine import Prompt
from stages.rollouts.rewards import Rules
from stages.rows.inputs import BATCH, Intake, open_source, usable
from stages.text.chat import encode_prompts
from stages.text.messages import Dropped
from stages.text.positions import positions_of
from stages.text.templates import tools_unseen


def load_prompts(
    source: Source, task_file: Path, tokenizer, max_length: int, seed: int
) -> tuple[list[Prompt], Intake]:
    """Knobs of a source -> its prompts of up to `max_length` ids; others are counted as dropped."""
    name, rows = open_source("prompts", source, task_file, seed)
    intake, prompts = Intake(name), []
    for batch in chunks(rows, BATCH):
        numbers, kept = usable(batch, intake)
        tools = [row.tools for row in kept]
        ids = encode_prompts(tokenizer, [row.messages for row in kept], tools)
        for number, row, encoded in zip(numbers, kept, ids, strict=True):
            if isinstance(encoded, Dropped):
                intake.drop(number, encoded.reason)
            elif len(encoded) > max_length:
                intake.drop(number, f"prompt longer than {max_length} tokens")
            else:
                intake.keep()
                intake.sums["tools_unseen"] += tools_unseen(tokenizer, row.messages, row.tools)
                prompts.append(
                    Prompt(number, encoded, tokenizer.decode(encoded), row.answer, row.entry)
                )
    intake.close()
    return prompts, intake


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
