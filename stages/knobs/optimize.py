"""Knobs of `optimize`."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from stages.base.knobs import (
    BatchAcc,
    Beta,
    Critic,
    KeepWeights,
    LearningRate,
    LoraKnob,
    Loss,
    MaxNewTokens,
    MaxNorm,
    Memory,
    Nonfinite,
    NumRollouts,
    Seed,
    Temperature,
    TrainBatchSize,
    WarmupSteps,
    WeightDecay,
    choice,
    flag,
    number,
    whole,
)


class Knobs(Memory):
    seed: Seed
    nonfinite: Nonfinite
    lora: LoraKnob
    keep_weights: KeepWeights
    keep_moments: choice(
        "AdamW's moments in trainer/: float32 (exact), bf16 (rounded, half as large), or none (the"
        " next round starts with fresh ones). See docs/disk.md.",
        "float32",
        "bf16",
        "none",
    )
    loss: Loss
    loss_aggregation: choice(
        "How token losses become one number; default: as the objective defines it.",
        "default",
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "constant",
    )
    ppo_epochs: whole("Passes over the frozen buffer in one round.", ge=1)
    allow_off_policy: flag("Allow ppo_epochs above 1 for objectives without a trust region.")
    target_kl: Annotated[
        float | None,
        Field(
            description="Stop a round's passes once the mean KL to the old policy exceeds this.",
            gt=0,
        ),
    ]
    num_rollouts: NumRollouts
    max_new_tokens: MaxNewTokens
    temperature: Temperature
    train_batch_size: TrainBatchSize
    batch_acc: BatchAcc
    lr: LearningRate
    lr_critic: LearningRate
    warmup_steps: WarmupSteps
    decay_steps: Annotated[
        int | None,
        Field(
            description="Step at which the cosine reaches 0; null: constant after warm-up.", ge=1
        ),
    ]
    weight_decay: WeightDecay
    max_norm: MaxNorm
    clip_eps_lo: number("The ratio is clipped below at 1 - clip_eps_lo.", ge=0, le=1)
    clip_eps_hi: number("The ratio is clipped above at 1 + clip_eps_hi.", ge=0)
    tau_pos: number("SAPO: steepness of its gate where the advantage is above 0.", gt=0)
    tau_neg: number("SAPO: steepness of its gate elsewhere.", gt=0)
    clip_eps_val: number("Values are clipped to the old value +- clip_eps_val.", ge=0)
    gamma: number("Discount per token.", ge=0, le=1)
    lam: number("Lambda of generalised advantage estimation.", ge=0, le=1)
    beta: Beta
    kl_estimator: choice(
        "Estimator of the KL to the reference (Schulman 2020); default: what fits its place, k3 in"
        " the loss and k1 in the reward. Others are refused where they estimate no gradient.",
        "default",
        "k1",
        "k2",
        "k3",
    )
    kl_placement: choice(
        "Where the KL penalty goes; default: as the objective defines it.",
        "default",
        "reward",
        "loss",
    )
    skip_wrong_groups: flag(
        "raft, online_dpo: leave out groups in which no answer is right (reward_correctness 1)."
    )
    critic: Critic
    sampler_correction: choice(
        "Where vLLM sampled, weigh losses by old / sampler probability: of each token, of the whole"
        " completion (sequence), or not.",
        "token",
        "sequence",
        "none",
    )
    sampler_correction_cap: number("Largest weight of that correction.", ge=1)

    @model_validator(mode="after")
    def objective_fits(self) -> Self:
        from stages.rl.kl import FITTING
        from stages.rl.objectives import OBJECTIVES

        if self.loss not in OBJECTIVES:
            raise ValueError(f"loss: found {self.loss!r}, expected one of {', '.join(OBJECTIVES)}")
        needs = OBJECTIVES[self.loss]
        if needs.groups and self.num_rollouts < 2:
            raise ValueError(
                f"num_rollouts: found {self.num_rollouts}, but loss {self.loss} compares the"
                " completions of one prompt and needs at least 2"
            )
        if needs.critic and self.critic is None:
            raise ValueError(
                f"critic: found null, but loss {self.loss} needs one: reward_model or policy"
            )
        if self.kl_placement not in ("default", *needs.kl_places):
            raise ValueError(
                f"kl_placement: found {self.kl_placement!r}, but loss {self.loss} trains on a few"
                " chosen completions, from which no KL can be estimated; expected"
                f" {' or '.join(['default', *needs.kl_places])}"
            )
        if needs.pairs and self.beta == 0:
            raise ValueError(
                f"beta: found 0, but loss {self.loss} compares with models/sft, and beta multiplies"
                " its log-ratios; expected a number above 0"
            )
        if needs.pairs and self.loss_aggregation != "default":
            raise ValueError(
                f"loss_aggregation: found {self.loss_aggregation!r}, but loss {self.loss} is a"
                " mean over pairs; expected default"
            )
        placement = needs.kl_placement if self.kl_placement == "default" else self.kl_placement
        if self.beta > 0 and self.kl_estimator not in ("default", *FITTING[placement]):
            raise ValueError(
                f"kl_estimator: found {self.kl_estimator!r}, but the KL goes into the {placement},"
                f" where its expected gradient is not that of a KL; expected default or"
                f" {' or '.join(FITTING[placement])}"
            )
        if self.beta > 0 and placement == "reward" and not needs.negative_rewards:
            raise ValueError(
                f"kl_placement: found {self.kl_placement!r}, but loss {self.loss} needs rewards of"
                " at least 0, and a KL in the reward makes them negative; expected loss or default"
            )
        if not needs.trust_region and self.ppo_epochs > 1 and not self.allow_off_policy:
            raise ValueError(
                f"ppo_epochs: found {self.ppo_epochs}, but loss {self.loss} has no ratio that is"
                " bounded, so a second pass would be off-policy; set ppo_epochs to 1, or"
                " allow_off_policy to true if that is meant"
            )
        return self
