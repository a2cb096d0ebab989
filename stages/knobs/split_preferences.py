"""Knobs of `split_preferences`."""

from stages.base.knobs import Section, Seed, Trust, number


class Preferences(Section):
    validation_share: number("Share of the prompts held out for validation.", gt=0, lt=1)


class Knobs(Section):
    seed: Seed
    model: Trust
    preferences: Preferences
