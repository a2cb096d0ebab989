"""Knobs of `prepare_model`."""

from datetime import date
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from stages.base.knobs import (
    Attention,
    KeepWeights,
    MaxNewTokens,
    Revision,
    Section,
    Seed,
    Trust,
    flag,
    number,
    text,
    whole,
)


def iso_date(day: str) -> str:
    """The date, if it is one."""
    if len(day) != len("2026-01-31"):
        raise ValueError(f"found {day!r}, expected a date such as 2026-01-31")
    date.fromisoformat(day)
    return day


class Model(Trust):
    source: text(
        "tiny (random weights, below), a hub id, a local folder or a GGUF file; DVC sees those"
        " under models/source change.",
        min_length=1,
    )
    revision: Revision
    ignore_pickles: flag(
        "Accept a model folder that also holds pickled files. They are never read."
    )
    keep_weights: KeepWeights
    date: Annotated[
        text("Day that a chat template is told when it asks for today's (YYYY-MM-DD)."),
        AfterValidator(iso_date),
    ]
    template_options: Annotated[
        dict[str, Any],
        Field(description="What else the chat template is told, such as {enable_thinking: false}."),
    ]
    hidden_size: whole("tiny: width of the residual stream.", ge=2)
    intermediate_size: whole("tiny: width of the feed-forward layers.", ge=1)
    layers: whole("tiny: number of layers.", ge=1)
    heads: whole("tiny: attention heads.", ge=1)
    max_positions: whole("tiny: longest prompt and completion together, in tokens.", ge=8)
    init_std: number("tiny: standard deviation of the initial weights.", gt=0)
    dropout: number("tiny: dropout of the attention weights, in SFT and reward model.", ge=0, lt=1)


class Knobs(Section):
    seed: Seed
    attention: Attention
    max_new_tokens: MaxNewTokens
    model: Model
