"""Knobs: the validated parameters of a stage, and the types that several stages share.

Each stage has one module here with one class `Knobs` that names exactly the keys it reads. Nested
classes are the sections of params.yaml. No field has a default: params.yaml holds the one default
of each.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A strictly validated, frozen group of knobs: no coercion, unknown keys, NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def number(description: str, **bounds) -> type:
    return Annotated[float, Field(description=description, **bounds)]


def whole(description: str, **bounds) -> type:
    return Annotated[int, Field(description=description, **bounds)]


def text(description: str, **bounds) -> type:
    return Annotated[str, Field(description=description, **bounds)]


def flag(description: str) -> type:
    return Annotated[bool, Field(description=description)]


def choice(description: str, *options: str) -> type:
    return Annotated[Literal[options], Field(description=description)]


def regular_expression(pattern: str) -> str:
    """The pattern, if it is one."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"found {pattern!r}, no regular expression ({error})") from error
    return pattern


Seed = whole("Seed of every random stream; another seed is another run.", ge=0)
Device = text(
    "Where models run: auto (CUDA, else MPS, else CPU), or cpu, cuda, mps.",
    pattern=r"^(auto|cpu|cuda|mps)$",
)
Precision = choice(
    "Arithmetic of the forward and backward passes; weights and optimizer stay float32.",
    "float32",
    "bf16",
)
Threads = whole(
    "CPU threads of torch. Part of the result: another number changes the last bits.", ge=1
)
Processes = whole(
    "Processes that share a training, each with `threads` of its own; on a machine with GPUs each"
    " has one. Part of the result: another number changes the last bits.",
    ge=1,
)
Attention = choice(
    "Attention implementation of transformers.", "sdpa", "eager", "flash_attention_2"
)

Epochs = whole("Passes over the training rows.", ge=1)
TrainBatchSize = whole("Rows (pairs, completions) in one forward and backward pass.", ge=1)
BatchAcc = whole("Forward and backward passes gathered into one optimizer step.", ge=1)
LearningRate = number("Peak learning rate of AdamW.", gt=0)
WarmupSteps = whole("Optimizer steps over which the learning rate rises linearly from 0.", ge=0)
WeightDecay = number("Decoupled weight decay of AdamW.", ge=0)
MaxNorm = number("The gradient is scaled down to this global L2 norm.", gt=0)
DropLast = flag("Leave out the last, partial optimizer step of an epoch.")
PairLength = whole("Longest prompt and answer together, in tokens; longer answers are cut.", ge=2)
ScoreBatchSize = whole("Completions (pairs) in one forward pass of scoring.", ge=1)
Nonfinite = choice(
    "A NaN or infinite loss or gradient: stop (exit code 1, no model), or skip (leave that"
    " micro-batch out, counted in the metrics).",
    "stop",
    "skip",
)

Loss = text("Objective: a name of OBJECTIVES in stages/rl/objectives.py.")
NumRollouts = whole("Completions sampled for each prompt (the group size G).", ge=1)
Temperature = number("Divides the logits, in sampling and in every log-prob alike.", gt=0)
MaxNewTokens = whole("Cap on the length of a completion, in tokens.", ge=1)
Beta = number("Weight of the KL penalty towards models/sft; 0: no reference is run.", ge=0)
Critic = Annotated[
    Literal["reward_model", "policy"] | None,
    Field(
        description="What a critic starts from: the policy, with a head of zeros, or the reward"
        " model with its head (its values are in its logits: where those make most of the reward);"
        " null: no values, so no loss that needs a critic."
    ),
]
Weight = Annotated[
    float | None, Field(description="Weight of this component in `reward`; null: left out.")
]
Verifier = text(
    "Rule behind reward_correctness: task (the task's own), exact, numeric, regex, or"
    " module:function, a module under data/source or an installed one.",
    pattern=r"^(task|exact|numeric|regex|[^:]+:[^:]+)$",
)

Dataset = text(
    "task (the embedded one), a file or folder under data/source, or a hub id.", min_length=1
)
Split = text("Split of a hub dataset.", min_length=1)
Name = Annotated[str | None, Field(description="Configuration name of a hub dataset.")]
Revision = Annotated[str | None, Field(description="Git revision of a hub dataset or model.")]
MaxSamples = Annotated[
    int | None, Field(description="Use at most this many rows, drawn by seed; null: all.", ge=1)
]


def row_format(*names: str) -> type:
    """A knob that takes the name of a row format: a key of FORMATS in stages/rows."""
    description = "Row format where detection cannot tell; null: detect and print it."
    return Annotated[Literal[names] | None, Field(description=description)]


Columns = Annotated[
    dict[str, str] | None,
    Field(
        description="Columns that go by another name, {field: column}, such as {prompt: ask,"
        " completion: reply}; a dot reaches into a mapping (reward_model.ground_truth); null: each"
        " field has a column of its own name."
    ),
]


class Source(Section):
    """Where rows come from."""

    dataset: Dataset
    split: Split
    name: Name
    revision: Revision
    max_samples: MaxSamples
    format: str | None
    columns: Columns


class SftSource(Source):
    format: row_format(
        "messages", "sharegpt", "prompt_completion", "alpaca", "question_answer", "text"
    )


class PreferenceSource(Source):
    format: row_format("prompted_pair", "sharegpt_pair", "pair")


class PromptSource(Source):
    """Prompts to sample from, or to evaluate with."""

    format: row_format("prompt", "question", "messages", "sharegpt")


class Trust(Section):
    """Read wherever a model or a tokenizer loads."""

    trust_remote_code: flag("Run Python code that a model folder brings along.")


class Compute(Section):
    """How models run; every stage that runs one reads these."""

    device: Device
    precision: Precision
    threads: Threads
    attention: Attention
    model: Trust


class Reading(Compute):
    """What a stage reads beside that runs a model without training it."""

    forward_max_tokens: Annotated[
        int | None,
        Field(
            description="Most tokens, padding included, of one batch that is scored or sampled, the"
            " room for max_new_tokens included: larger batches are cut; null: no limit.",
            ge=1,
        ),
    ]


class Memory(Compute):
    """What a training stage reads beside: memory and processes against time."""

    processes: Processes
    shard: flag(
        "Let each process hold its part alone of weights, gradients and moments, and gather a layer"
        " where it runs (FSDP2): for what no one card holds. Needs processes above 1. Prompts are"
        " then not shared."
    )
    gradient_checkpointing: flag(
        "Keep no activations of layers and compute them anew in the backward pass: less memory, for"
        " one more forward pass. Prompts are then not shared."
    )
    train_max_tokens: Annotated[
        int | None,
        Field(
            description="Most tokens, padding included, of one forward and backward pass: a larger"
            " micro-batch is cut, at the same gradients, and a longer row goes alone; null: no"
            " limit.",
            ge=1,
        ),
    ]

    @model_validator(mode="after")
    def parts_have_processes(self) -> Self:
        if self.shard and self.processes == 1:
            raise ValueError("shard: found true, but processes is 1; expected several processes")
        return self


class Lora(Section):
    """The shape of LoRA adapters."""

    rank: Annotated[int, Field(ge=1)]
    alpha: Annotated[float, Field(gt=0)]
    dropout: Annotated[float, Field(ge=0, lt=1)]
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)]


LoraKnob = Annotated[
    Lora | None,
    Field(
        description="Train LoRA adapters alone (docs/lora.md): {rank: 16, alpha: 32, dropout: 0.0,"
        " targets: all-linear}, or targets as a list of modules; null: train all weights."
    ),
]

KeepWeights = choice(
    "Precision of the weights on disk: float32 (exact), or bf16 (rounded, half as large; adapters"
    " stay float32). See docs/disk.md.",
    "float32",
    "bf16",
)


class Training(Section):
    """Supervised training of one model: SFT and reward model."""

    lora: LoraKnob
    keep_weights: KeepWeights
    epochs: Epochs
    train_batch_size: TrainBatchSize
    batch_acc: BatchAcc
    lr: LearningRate
    warmup_steps: WarmupSteps
    weight_decay: WeightDecay
    max_norm: MaxNorm
    drop_last: DropLast


class Verification(Section):
    """How an answer is held against the right one; read wherever completions are sampled."""

    verifier: Verifier
    verifier_pattern: Annotated[
        str | None, Field(description="Pattern of verifier regex: its first group is the answer.")
    ]

    @model_validator(mode="after")
    def pattern_has_a_group(self) -> Self:
        if self.verifier != "regex":
            return self
        pattern = regular_expression(self.verifier_pattern or "")
        if re.compile(pattern).groups < 1:
            raise ValueError(
                f"verifier_pattern: found {self.verifier_pattern!r}, expected a pattern with one"
                " group, the answer"
            )
        return self
