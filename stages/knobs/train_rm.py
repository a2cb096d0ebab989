"""Knobs of `train_rm`."""

from stages.base.knobs import Memory, Nonfinite, Seed, Training, number


class Rm(Training):
    centering: number(
        "Weight of the squared sum of both scores, which keeps scores around 0.", ge=0
    )


class Knobs(Memory):
    seed: Seed
    nonfinite: Nonfinite
    rm: Rm
