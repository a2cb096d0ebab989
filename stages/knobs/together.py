"""What must fit between the knobs of different stages; no stage reads these together."""

from typing import Self

from pydantic import model_validator

from stages.knobs.base import Loss, Section
from stages.knobs.score import Rewards


class Together(Section):
    loss: Loss
    rewards: Rewards

    @model_validator(mode="after")
    def rewards_fit_the_objective(self) -> Self:
        """MaxRL divides by a group's mean reward, so that no component may be below 0."""
        weights = self.rewards.model_dump()
        below = [name for name in ("length", "reward_model") if weights[name]]
        below += [name for name, weight in weights.items() if (weight or 0) < 0]
        if self.loss == "maxrl" and below:
            raise ValueError(
                f"rewards.{below[0]}: found {weights[below[0]]}, but loss maxrl needs rewards >= 0"
                " and this component can fall below; expected null"
            )
        return self
