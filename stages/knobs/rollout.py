"""Knobs of `rollout`."""

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from stages.base.knobs import (
    MaxNewTokens,
    NumRollouts,
    PromptSource,
    Reading,
    Seed,
    Temperature,
    Verification,
    choice,
    number,
    regular_expression,
    whole,
)


class Prompts(PromptSource):
    max_length: whole("Longest prompt in tokens; longer prompts are left out and counted.", ge=1)


class Knobs(Reading, Verification):
    seed: Seed
    prompts: Prompts
    prompts_per_step: whole("Prompts sampled in one round.", ge=1)
    num_rollouts: NumRollouts
    sampler: choice(
        "What samples: the pipeline's own engine, or vLLM, found by RLHF_VLLM. It takes no top_p,"
        " top_k or min_p: they change what its log-probs are of.",
        "own",
        "vllm",
    )
    temperature: Temperature
    top_p: number("Keep the likeliest tokens up to this probability; 1: all.", gt=0, le=1)
    top_k: whole("Keep this many of the likeliest tokens; 0: all.", ge=0)
    min_p: number(
        "Keep tokens at least this likely, relative to the likeliest; 0: all.", ge=0, le=1
    )
    max_new_tokens: MaxNewTokens
    rollout_batch_size: whole("Completions decoded side by side.", ge=1)
    dynamic_sampling: whole(
        "DAPO: replace groups whose reward_correctness is all alike by further prompts, drawing at"
        " most this many times prompts_per_step in all; 0: keep every group.",
        ge=0,
    )
    format_pattern: Annotated[
        Annotated[str, AfterValidator(regular_expression)] | None,
        Field(
            description="reward_format is 1 where this pattern matches the whole completion,"
            " else 0."
        ),
    ]
    overlong_buffer: whole(
        "reward_length falls from 0 to -1 over the last so many tokens below max_new_tokens.", ge=0
    )

    @model_validator(mode="after")
    def sampler_keeps_the_support(self) -> Self:
        if self.sampler == "vllm":
            for name, all_of_it in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                if (found := getattr(self, name)) != all_of_it:
                    raise ValueError(
                        f"{name}: found {found}, expected {all_of_it} with sampler vllm: its"
                        " log-probs would be of the tokens that are kept, the policy's are of all"
                    )
        return self

    @model_validator(mode="after")
    def overlong_buffer_fits(self) -> Self:
        if self.overlong_buffer > self.max_new_tokens:
            raise ValueError(
                f"overlong_buffer: found {self.overlong_buffer}, expected at most max_new_tokens"
                f" ({self.max_new_tokens})"
            )
        return self
