"""Knobs of `tokenize_preferences`."""

from stages.knobs.base import Section, Seed, Source, Trust, row_format, whole


class Preferences(Source):
    format: row_format("prompted_pair", "pair")
    max_length: whole(
        "Longest prompt and answer together, in tokens; longer answers are cut.", ge=2
    )


class Knobs(Section):
    seed: Seed
    model: Trust
    preferences: Preferences
