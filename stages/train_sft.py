"""Stage `train_sft`: supervised fine-tuning of the base model.

Reads   data/sft.parquet, models/base
Knobs   sft (training), seed, nonfinite, device, precision, threads, processes, attention,
        trust_remote_code
Writes  models/sft (adapters alone under sft.lora), a curve of loss and learning rate by step,
        figures

Masks and truncation were settled by `tokenize_sft`: a label of -100 is read and not learned.
"""

from collections.abc import Callable
from pathlib import Path

import click
import torch

from stages.base import params
from stages.base.command import SharedStage, launched, paths, say
from stages.base.contents import check_contents, check_positions, check_vocabulary
from stages.base.files import check_room, replacing
from stages.base.metrics import write_json
from stages.base.positions import positions_of
from stages.base.randomness import seed_everything
from stages.base.scratch import work_of
from stages.base.tables import SFT, random_access
from stages.base.tokenizers import load_tokenizer
from stages.knobs.train_sft import Knobs
from stages.models import processes
from stages.models.adapters import make_trainable
from stages.models.checkpoints import load_policy, save_model, saved_bytes
from stages.models.compute import accelerator as make_accelerator
from stages.models.compute import vocabulary_of
from stages.models.recompute import recompute_layers
from stages.models.sharding import gather, shard, start_device
from stages.training.saving import Saver
from stages.training.sft import micro_batch_loss, predicted
from stages.training.steps import check_weights
from stages.training.supervised import Fit, Recipe
from stages.training.tracking import tracking


@click.command(cls=SharedStage)
@paths("--data", "--base", "--out", "--curve", "--figures")
def train_sft(data: Path, base: Path, out: Path, curve: Path, figures: Path) -> None:
    """Fine-tune the base model on labelled tokens."""
    knobs = params.load(Knobs)
    if launched(knobs.processes, knobs.threads):
        return
    trust = knobs.model.trust_remote_code
    largest = check_contents(data, SFT)
    with random_access(data, SFT) as rows:
        accelerator = make_accelerator(knobs.device, knobs.precision, knobs.threads)
        device = start_device(accelerator.device, knobs.shard)
        policy = load_policy(base, knobs.attention, device, trust)
        tokenizer = load_tokenizer(base, trust)
        seed_everything(knobs.seed, "train_sft", "adapters")
        make_trainable(policy, base, knobs.sft.lora, "sft.lora")
        check_room(out, saved_bytes(policy, knobs.sft.keep_weights))
        if knobs.gradient_checkpointing:
            recompute_layers(policy)
        check_vocabulary(data, largest, vocabulary_of(policy), base)
        check_positions(data, SFT, positions_of(policy.config), base)
        if knobs.shard:
            shard(policy, accelerator.device)
        saver = Saver(work_of("train_sft", [data, base], knobs, accelerator.device))
        with saver.watching(), tracking("train_sft", knobs.model_dump(), curve) as log:
            steps = train(accelerator, policy, rows, knobs, log, saver)
        check_weights(policy, "models/sft")
    gather(policy)
    if processes.number():
        return  # the first one writes
    with replacing(out, folder=True) as folder:
        save_model(folder, policy, tokenizer, knobs.sft.keep_weights)
    found = summary(steps)
    write_json(figures, found)
    saver.done()
    say(found)


def train(accelerator, policy, rows, knobs: Knobs, log: Callable, saver=None) -> list[dict]:
    """All epochs; returns one row of figures per optimizer step, each logged as it comes."""
    knobs_of_sft = knobs.sft.model_dump(exclude={"lora", "keep_weights"})
    recipe = Recipe(
        stage="train_sft",
        seed=knobs.seed,
        nonfinite=knobs.nonfinite,
        train_max_tokens=knobs.train_max_tokens,
        **knobs_of_sft,
    )
    fit = Fit(
        accelerator,
        policy,
        rows,
        rows.lengths("input_ids"),
        recipe,
        loss_of=lambda batch, count: micro_batch_loss(policy, batch, count),
        divisor_of=lambda batch: sum(predicted(row["labels"]) for row in batch),
        unit="tokens",
    )
    return fit.run(log, saver)


def summary(steps: list[dict]) -> dict:
    """Means over the first and last tenth of the steps, and totals."""
    tenth = max(1, len(steps) // 10)

    def mean(part: list[dict]) -> float:
        return torch.tensor([step["loss"] for step in part], dtype=torch.float64).mean().item()

    return {
        "steps": len(steps),
        "loss_first": mean(steps[:tenth]),
        "loss_last": mean(steps[-tenth:]),
        "trained_tokens": sum(step["tokens"] for step in steps),
        "skipped": sum(step["skipped"] for step in steps),
    }


if __name__ == "__main__":
    train_sft()
