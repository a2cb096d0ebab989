"""Knobs of `tokenize_labelled`."""

from stages.base.knobs import PairLength, Section, Trust


class Preferences(Section):
    max_length: PairLength


class Knobs(Section):
    model: Trust
    preferences: Preferences
