"""Knobs of `score`."""

from typing import Annotated

from pydantic import Field

from stages.base.knobs import Beta, Compute, Critic, ScoreBatchSize, Section, Temperature

Weight = Annotated[
    float | None, Field(description="Weight of this component in `reward`; null: left out.")
]


class Rewards(Section):
    correctness: Weight
    format: Weight
    length: Weight
    reward_model: Weight


class Knobs(Compute):
    temperature: Temperature
    beta: Beta
    critic: Critic
    rewards: Rewards
    score_batch_size: ScoreBatchSize
