"""Knobs of `score_answers`."""

from typing import Annotated

from pydantic import Field

from stages.base.knobs import MaxNewTokens, PromptSource, Reading, ScoreBatchSize, Seed


class Knobs(Reading):
    seed: Seed
    max_new_tokens: MaxNewTokens
    score_batch_size: ScoreBatchSize
    evaluate: PromptSource
    rounds: Annotated[dict[str, str], Field(description="Which rounds were evaluated.")]
    branches: Annotated[dict[str, str], Field(description="Which branches were evaluated.")]
