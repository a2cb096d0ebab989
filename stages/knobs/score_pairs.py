"""Knobs of `score_pairs`."""

from stages.base.knobs import Compute, ScoreBatchSize


class Knobs(Compute):
    score_batch_size: ScoreBatchSize
