"""Stage `train_direct@x`: direct alignment (DPO and kin) of a policy on scored pairs.

Reads   data/direct/x/{train,validation}.parquet, the policy that branch x starts from
Knobs   direct, seed, nonfinite, device, precision, threads, processes, attention,
        trust_remote_code
Writes  models/direct/x, a curve by step, figures on the validation pairs before and after

The reference's log-probs come from `score_pairs`. Answers to held-out prompts are left to
`evaluate_direct`.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
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
from stages.base.tables import SCORED_PAIRS, random_access
from stages.base.tokenizers import load_tokenizer
from stages.direct.losses import LOSSES, LossKnobs
from stages.direct.pairs import chosen_kl, losses, pair_log_probs, sums_of
from stages.knobs.train_direct import Direct, Knobs
from stages.models import processes
from stages.models.adapters import make_trainable
from stages.models.checkpoints import load_policy, save_model, saved_bytes
from stages.models.compute import accelerator as make_accelerator
from stages.models.compute import vocabulary_of
from stages.models.recompute import recompute_layers
from stages.models.sharding import gather, is_sharded, run, shard, start_device
from stages.training.batching import in_order, pair_lengths
from stages.training.saving import Saver
from stages.training.steps import check_weights
from stages.training.supervised import Fit, Recipe
from stages.training.tracking import tracking

FIGURES = ("chosen_log_prob", "rejected_log_prob", "chosen_reward", "rejected_reward", "accuracy")


@click.command(cls=SharedStage)
@paths("--train train_path", "--validation", "--policy start", "--out", "--curve", "--figures")
def train_direct(
    train_path: Path, validation: Path, start: Path, out: Path, curve: Path, figures: Path
) -> None:
    """Train a policy on pairs, without a reward model."""
    knobs = params.load(Knobs)
    if launched(knobs.processes, knobs.threads):
        return
    trust = knobs.model.trust_remote_code
    scored = SCORED_PAIRS
    largest = {path: check_contents(path, scored) for path in (train_path, validation)}
    with random_access(train_path, scored) as rows, random_access(validation, scored) as held_out:
        accelerator = make_accelerator(knobs.device, knobs.precision, knobs.threads)
        device = start_device(accelerator.device, knobs.shard)
        policy = load_policy(start, knobs.attention, device, trust)
        tokenizer = load_tokenizer(start, trust)
        seed_everything(knobs.seed, "train_direct", "adapters")
        make_trainable(policy, start, knobs.direct.lora, "direct.lora")
        check_room(out, saved_bytes(policy, knobs.direct.keep_weights))
        if knobs.gradient_checkpointing:
            recompute_layers(policy)
        for path, found in largest.items():
            check_vocabulary(path, found, vocabulary_of(policy), start)
            check_positions(path, scored, positions_of(policy.config), start)
        if knobs.shard:
            shard(policy, accelerator.device)
        with accelerator.autocast():
            before = validate(policy, held_out, knobs)
        inputs = [train_path, validation, start]
        saver = Saver(work_of("train_direct", inputs, knobs, accelerator.device))
        name = f"train_direct-{out.name}"
        with saver.watching(), tracking(name, knobs.model_dump(), curve) as log:
            steps = train(accelerator, policy, rows, knobs, log, saver)
        check_weights(policy, str(out))
        reference = load_policy(start, knobs.attention, device, trust)
        if knobs.shard:
            shard(reference, accelerator.device)
        with accelerator.autocast():
            after = validate(policy, held_out, knobs)
            after["kl_ref"] = mean_kl(policy, reference, held_out, knobs)
    gather(policy)
    if processes.number():
        return  # the first one writes
    with replacing(out, folder=True) as folder:
        save_model(folder, policy, tokenizer, knobs.direct.keep_weights)
    found = {f"{name}_before": before[name] for name in ("loss", *FIGURES)} | after
    found |= {"validation_pairs": len(held_out), "pairs": len(rows), "steps": len(steps)}
    found["skipped"] = sum(step["skipped"] for step in steps)
    write_json(figures, found)
    saver.done()
    say(found, loss_name=knobs.direct.loss)


def loss_knobs(direct: Direct) -> LossKnobs:
    """The knobs that a loss reads, as plain values."""
    return LossKnobs(**{field.name: getattr(direct, field.name) for field in fields(LossKnobs)})


def train(accelerator, policy, rows, knobs: Knobs, log: Callable, saver=None) -> list[dict]:
    """All epochs; returns one row of figures per optimizer step, each logged as it comes."""
    direct, loss = knobs.direct, LOSSES[knobs.direct.loss]
    names = {field.name for field in fields(Recipe)} & set(Direct.model_fields)
    recipe = Recipe(
        stage="train_direct",
        seed=knobs.seed,
        nonfinite=knobs.nonfinite,
        train_max_tokens=knobs.train_max_tokens,
        **{name: getattr(direct, name) for name in names},
    )
    parts: list[dict] = []

    def loss_of(batch: list[dict], divisor: int):
        pairs = pair_log_probs(policy, batch, loss.reference)
        parts.append(sums_of(pairs, loss, direct.beta))
        return losses(pairs, loss, loss_knobs(direct), direct.nll_weight).sum() / divisor

    def means(pairs: int) -> dict:
        sums = {name: sum(part[name] for part in parts) for name in FIGURES}
        found = {name: processes.total(sums[name]) / pairs for name in FIGURES}
        parts.clear()
        return found

    lengths = pair_lengths(rows)
    fit = Fit(accelerator, policy, rows, lengths, recipe, loss_of, len, "pairs", means, sides=2)
    return fit.run(log, saver)


@torch.no_grad()
def validate(policy, rows, knobs: Knobs) -> dict[str, float]:
    """Mean loss and figures over the held-out pairs."""
    direct = knobs.direct
    loss, total = LOSSES[direct.loss], dict.fromkeys(("loss", *FIGURES), 0.0)

    def sums(numbers: Sequence[int]) -> dict[str, float]:
        batch = [rows[i] for i in numbers]
        pairs = run(policy, lambda: pair_log_probs(policy, batch, loss.reference))
        found = losses(pairs, loss, loss_knobs(direct), direct.nll_weight)
        return sums_of(pairs, loss, direct.beta) | {"loss": found.double().sum().item()}

    for part in processes.in_turn(sums, pair_batches(rows, knobs), in_step=is_sharded(policy)):
        total = {name: total[name] + part[name] for name in total}
    return {name: value / len(rows) for name, value in total.items()}


def mean_kl(policy, reference, rows, knobs: Knobs) -> float:
    """KL(policy || reference) per token of the held-out chosen answers, in nats."""

    def kl(batch: Sequence[int]) -> float:
        measure = partial(chosen_kl, policy, reference, [rows[i] for i in batch])
        return run(policy, lambda: run(reference, measure))

    total = sum(processes.in_turn(kl, pair_batches(rows, knobs), in_step=is_sharded(policy)))
    return total / sum(rows.lengths("chosen_ids"))


def pair_batches(rows, knobs: Knobs) -> list[list[int]]:
    """Pairs of a pass without gradient, as they come."""
    sizes = (knobs.direct.train_batch_size, knobs.train_max_tokens, 2)
    return in_order(pair_lengths(rows), *sizes)


if __name__ == "__main__":
    train_direct()
