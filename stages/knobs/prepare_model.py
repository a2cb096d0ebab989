"""Knobs of `prepare_model`."""

from stages.base.knobs import (
    Attention,
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
