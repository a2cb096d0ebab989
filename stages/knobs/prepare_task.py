"""Knobs of `prepare_task`."""

from typing import Annotated, Any

from pydantic import Field

from stages.base.knobs import (
    PreferenceSource,
    PromptSource,
    Section,
    Seed,
    SftSource,
    Verification,
    Weight,
    number,
    text,
    whole,
)


class Task(Section):
    name: text("A dataset of reasoning-gym, by its registered name.", min_length=1)
    config: Annotated[
        dict[str, Any], Field(description="Options of that dataset, such as min_word_len.")
    ]
    system: Annotated[str | None, Field(description="System turn of every prompt; null: none.")]
    sft_rows: whole("Rows for SFT.", ge=1)
    sft_wrong_share: number(
        "Share of the SFT answers that hold a slip, as collected data does.", ge=0, lt=1
    )
    preference_rows: whole("Preference pairs for the reward model.", ge=2)
    prompt_rows: whole("Prompts for reinforcement learning.", ge=1)
    heldout_rows: whole("Prompts that only evaluation sees.", ge=1)


class Rewards(Section):
    correctness: Weight


class Knobs(Verification):
    seed: Seed
    task: Task
    rewards: Rewards
    sft: SftSource
    preferences: PreferenceSource
    prompts: PromptSource
    evaluate: PromptSource
