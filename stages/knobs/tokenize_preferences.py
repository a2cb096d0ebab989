"""Knobs of `tokenize_preferences`."""

from stages.base.knobs import PairLength, PreferenceSource, Section, Seed, Trust


class Preferences(PreferenceSource):
    max_length: PairLength


class Knobs(Section):
    seed: Seed
    model: Trust
    preferences: Preferences
