"""Knobs of `tokenize_preferences`."""

from stages.base.knobs import PreferenceSource, Section, Seed, Trust, whole


class Preferences(PreferenceSource):
    max_length: whole(
        "Longest prompt and answer together, in tokens; longer answers are cut.", ge=2
    )


class Knobs(Section):
    seed: Seed
    model: Trust
    preferences: Preferences
