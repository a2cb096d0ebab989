"""Knobs of `train_sft`."""

from stages.base.knobs import Memory, Nonfinite, Seed, Training


class Knobs(Memory):
    seed: Seed
    nonfinite: Nonfinite
    sft: Training
