"""Knobs of `train_sft`."""

from stages.base.knobs import Compute, Nonfinite, Seed, Training


class Knobs(Compute):
    seed: Seed
    nonfinite: Nonfinite
    sft: Training
