"""Knobs of `score`."""

from stages.knobs.base import Beta, Compute, Critic, Rewards, Temperature, whole


class Knobs(Compute):
    temperature: Temperature
    beta: Beta
    critic: Critic
    rewards: Rewards
    score_batch_size: whole("Completions in one forward pass of scoring.", ge=1)
