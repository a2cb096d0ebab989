"""Knobs of `train_rm`."""

from stages.base.knobs import Memory, Nonfinite, Seed, Training, choice, number


class Rm(Training):
    centering: number(
        "Weight of the squared sum of both scores, which keeps scores around 0.", ge=0
    )
    target: choice(
        "kind outcome: which logits are held against the outcome, those of every token of a"
        " completion or of its last one.",
        "every_token",
        "last_token",
    )
    held_out_share: number(
        "kind outcome: share of the prompts whose completions are held out.", gt=0, lt=1
    )


class Knobs(Memory):
    seed: Seed
    nonfinite: Nonfinite
    rm: Rm
