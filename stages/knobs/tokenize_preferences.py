"""Knobs of `tokenize_preferences`."""

from stages.knobs.base import Section, Seed, Source, whole


class Preferences(Source):
    max_length: whole(
        "Longest prompt and answer together, in tokens; longer answers are cut.", ge=2
    )


class Knobs(Section):
    seed: Seed
    preferences: Preferences
