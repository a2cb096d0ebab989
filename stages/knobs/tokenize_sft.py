"""Knobs of `tokenize_sft`."""

from stages.base.knobs import Section, Seed, SftSource, Trust, choice, whole


class Sft(SftSource):
    max_length: whole("Longest row in tokens; longer rows are cut at the end.", ge=2)
    train_on: choice(
        "Which tokens carry a label: those of the last or of all assistant turns, or all"
        " (pre-training: labels are a copy of the ids).",
        "last_assistant",
        "all_assistants",
        "all",
    )


class Knobs(Section):
    seed: Seed
    model: Trust
    sft: Sft
