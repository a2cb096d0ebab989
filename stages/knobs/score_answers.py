"""Knobs of `score_answers`."""

from typing import Annotated

from pydantic import Field

from stages.base.knobs import MaxNewTokens, PromptSource, Reading, ScoreBatchSize, Seed


class Knobs(Reading):
    seed: Seed
    max_new_tokens: MaxNewTokens
    score_batch_size: ScoreBatchSize
    evaluate: PromptSource
    rounds: Annotated[
        dict[str, str],
        Field(
            description="For each round (quoted number) the folder of the policy it starts from."
        ),
    ]
    branches: Annotated[
        dict[str, str],
        Field(
            description="For each branch of direct alignment (a name) the folder of the policy that"
            " it starts from, which is its reference; {}: none."
        ),
    ]
