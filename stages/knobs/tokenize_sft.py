"""Knobs of `tokenize_sft`."""

from stages.knobs.base import Section, Seed, Source, Trust, choice, row_format, whole


class Sft(Source):
    format: row_format(
        "messages", "sharegpt", "prompt_completion", "alpaca", "question_answer", "text"
    )
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
