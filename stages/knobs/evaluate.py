"""Knobs of `evaluate` and `evaluate_sft`."""

from stages.base.knobs import (
    MaxNewTokens,
    PromptSource,
    Reading,
    Seed,
    Verification,
    number,
    whole,
)


class Evaluate(PromptSource):
    samples: whole("Sampled answers for each held-out prompt, beside one greedy answer.", ge=1)
    temperature: number("Temperature of the sampled answers.", gt=0)
    batch_size: whole("Completions decoded side by side.", ge=1)


class Knobs(Reading, Verification):
    seed: Seed
    max_new_tokens: MaxNewTokens
    evaluate: Evaluate
