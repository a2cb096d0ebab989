"""Knobs of `score_pairs`."""

from stages.base.knobs import Reading, ScoreBatchSize


class Knobs(Reading):
    score_batch_size: ScoreBatchSize
