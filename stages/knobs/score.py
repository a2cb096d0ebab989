"""Knobs of `score`."""

from stages.base.knobs import Beta, Critic, Reading, ScoreBatchSize, Section, Temperature, Weight


class Rewards(Section):
    correctness: Weight
    format: Weight
    length: Weight
    reward_model: Weight


class Knobs(Reading):
    temperature: Temperature
    beta: Beta
    critic: Critic
    rewards: Rewards
    score_batch_size: ScoreBatchSize
