"""Stages `train_rm`, `train_reward@x`: a reward model on the SFT model's weights.

Reads   what it learns from (kind bradley_terry: data/preferences/train.parquet; kind outcome:
        completions that are right or wrong, from rollouts, a buffer or data/labelled),
        data/preferences/validation.parquet, models/sft
Knobs   rm, seed, nonfinite, device, precision, threads, processes, attention, trust_remote_code
Writes  models/rm (a sequence classifier with one label), a curve by step, figures on the validation
        pairs; kind outcome: also on completions of prompts that it holds out

What a score counts in the reward is left to `score`.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
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
from stages.base.tables import PAIRS, random_access, schema_of
from stages.base.tokenizers import load_tokenizer
from stages.knobs.train_rm import Knobs, Rm
from stages.models import processes
from stages.models.adapters import make_trainable
from stages.models.checkpoints import new_scorer, save_model, saved_bytes
from stages.models.compute import accelerator as make_accelerator
from stages.models.compute import vocabulary_of
from stages.models.recompute import recompute_layers
from stages.models.scorers import scores, state_values
from stages.models.sharding import gather, is_sharded, run, shard, start_device
from stages.reward.bradley_terry import (
    bradley_terry_loss,
    calibration,
    calibration_error,
    gap_histogram,
    preference_accuracy,
    tie_share,
)
from stages.reward.labelled import SCHEMAS, Completions, open_completions
from stages.reward.outcome import EVERY_TOKEN, auc, judged, outcome_losses, ranking
from stages.training.batching import in_order, pair_lengths
from stages.training.saving import Saver
from stages.training.steps import check_weights
from stages.training.supervised import Fit, Recipe
from stages.training.tracking import tracking


@click.command(cls=SharedStage)
@click.option("--kind", type=click.Choice(("bradley_terry", "outcome")), required=True)
@paths("--train train_path", "--validation", "--sft", "--out", "--curve", "--figures")
def train_rm(
    kind: str, train_path: Path, validation: Path, sft: Path, out: Path, curve: Path, figures: Path
) -> None:
    """Train the reward model and validate it on held-out prompts."""
    knobs = params.load(Knobs)
    if launched(knobs.processes, knobs.threads):
        return
    trust = knobs.model.trust_remote_code
    outcome = kind == "outcome"
    schema = schema_of(train_path, *SCHEMAS) if outcome else PAIRS
    tables = {train_path: schema, validation: PAIRS}
    largest = {path: check_contents(path, schema) for path, schema in tables.items()}
    with (
        open_rows(outcome, train_path, knobs) as (rows, completions),
        random_access(validation, PAIRS) as held_out,
    ):
        accelerator = make_accelerator(knobs.device, knobs.precision, knobs.threads)
        seed_everything(knobs.seed, "train_rm", "head")
        device = start_device(accelerator.device, knobs.shard)
        scorer = new_scorer(sft, knobs.attention, device, trust)
        make_trainable(scorer, sft, knobs.rm.lora, "rm.lora")
        tokenizer = load_tokenizer(sft, trust)
        check_room(out, saved_bytes(scorer, knobs.rm.keep_weights))
        if knobs.gradient_checkpointing:
            recompute_layers(scorer)
        for path, found in largest.items():
            check_vocabulary(path, found, vocabulary_of(scorer), sft)
            check_positions(path, tables[path], positions_of(scorer.config), sft)
        if knobs.shard:
            shard(scorer, accelerator.device)
        inputs = [train_path, validation, sft]
        saver = Saver(work_of("train_rm", inputs, knobs, accelerator.device))
        name = "train_rm" if out.name == "rm" else f"train_reward-{out.name}"
        with saver.watching(), tracking(name, knobs.model_dump(), curve) as log:
            learn = train_on_outcomes if outcome else train
            steps = learn(accelerator, scorer, rows, knobs, log, saver)
        check_weights(scorer, str(out))
        with accelerator.autocast():
            found = validate(scorer, held_out, knobs)
            if outcome:
                found |= validate_outcomes(scorer, completions, knobs)
    gather(scorer)
    if processes.number():
        return  # the first one writes
    with replacing(out, folder=True) as folder:
        save_model(folder, scorer, tokenizer, knobs.rm.keep_weights)
    found |= {"steps": len(steps), "skipped": sum(step["skipped"] for step in steps)}
    write_json(figures, found)
    saver.done()
    say(found)


@contextmanager
def open_rows(outcome: bool, path: Path, knobs: Knobs):
    """A context: the rows to train on, and the completions that are held out (of pairs: none)."""
    if outcome:
        with open_completions(path, knobs.rm.held_out_share, knobs.seed) as sides:
            yield sides
    else:
        with random_access(path, PAIRS) as rows:
            yield rows, ()


def recipe_of(knobs: Knobs) -> Recipe:
    names = {field.name for field in fields(Recipe)} & set(Rm.model_fields)
    values = {name: getattr(knobs.rm, name) for name in names}
    shared = {name: getattr(knobs, name) for name in ("seed", "nonfinite", "train_max_tokens")}
    return Recipe(stage="train_rm", **shared, **values)


def accuracy_of(right: list[int]) -> Callable[[int], dict]:
    """What a training logs of a step: the share of its pairs (tokens, ...) that it had right."""

    def accuracy(count: int) -> dict:
        share = processes.total(sum(right)) / count
        right.clear()
        return {"accuracy": share}

    return accuracy


def train(accelerator, scorer, rows, knobs: Knobs, log: Callable, saver=None) -> list[dict]:
    """All epochs; returns one row of figures per optimizer step, each logged as it comes."""
    right: list[int] = []
    fit = Fit(
        accelerator,
        scorer,
        rows,
        pair_lengths(rows),
        recipe_of(knobs),
        loss_of=lambda pairs, count: micro_batch_loss(
            scorer, pairs, count, knobs.rm.centering, right
        ),
        divisor_of=len,
        unit="pairs",
        more_of=accuracy_of(right),
        sides=2,
    )
    return fit.run(log, saver)


def train_on_outcomes(
    accelerator, scorer, rows, knobs: Knobs, log: Callable, saver=None
) -> list[dict]:
    """`train` for completions with a label."""
    right: list[int] = []
    every = knobs.rm.target == EVERY_TOKEN

    def judged_tokens(completions: list[dict]) -> int:
        return sum(len(row["completion_ids"]) if every else 1 for row in completions)

    fit = Fit(
        accelerator,
        scorer,
        rows,
        rows.lengths(),
        recipe_of(knobs),
        loss_of=lambda batch, count: outcome_loss(scorer, batch, count, knobs.rm.target, right),
        divisor_of=judged_tokens,
        unit="tokens" if every else "completions",
        more_of=accuracy_of(right),
    )
    return fit.run(log, saver)


def outcome_loss(scorer, batch: list[dict], divisor: int, target: str, right: list[int]):
    """(B completions) -> scalar: summed cross-entropy / divisor; appends how many tokens are right.

    A logit of exactly 0 says neither, and is a miss.
    """
    ids = ([row[name] for row in batch] for name in ("prompt_ids", "completion_ids"))
    values, lengths = state_values(scorer, *ids)
    logits = values[:, 1:]  # (B, T): having read each token
    mask = torch.arange(logits.shape[1], device=logits.device) < lengths[:, None]
    labels = torch.tensor([row["label"] for row in batch], device=logits.device)
    counted = judged(mask, target)
    agrees = torch.where(labels[:, None] == 1, logits > 0, logits < 0)
    right.append(int((agrees & counted).sum()))
    return outcome_losses(logits, mask, labels, target).sum() / divisor


def micro_batch_loss(scorer, pairs: list[dict], divisor: int, centering: float, right: list[int]):
    """(B pairs) -> scalar: summed Bradley-Terry loss / divisor; appends how many rank rightly."""
    chosen, rejected = pair_scores(scorer, pairs)
    margin = torch.tensor([pair["margin"] for pair in pairs], device=chosen.device)
    right.append(int((chosen > rejected).sum()))
    return bradley_terry_loss(chosen, rejected, margin, centering).sum() / divisor


def pair_scores(scorer, pairs: list[dict]):
    """(B pairs) -> scores (B,) of the chosen, (B,) of the rejected answers, in one forward pass."""
    prompts = [pair["prompt_ids"] for pair in pairs] * 2
    answers = [pair[side] for side in ("chosen_ids", "rejected_ids") for pair in pairs]
    return scores(scorer, prompts, answers).chunk(2)


@torch.no_grad()
def validate_outcomes(scorer, rows: Completions, knobs: Knobs) -> dict:
    """How the scores of held-out completions tell right from wrong ones.

    Where the completions come from a buffer, the same of the reward model that scored that buffer.
    """
    found, labels, rivals, prompts = [], [], [], []
    sizes = (knobs.rm.train_batch_size, knobs.train_max_tokens)
    for numbers in in_order(rows.lengths(), *sizes):
        batch = [rows[i] for i in numbers]
        prompts += [tuple(row["prompt_ids"]) for row in batch]
        ids = [[row[name] for row in batch] for name in ("prompt_ids", "completion_ids")]
        found.append(run(scorer, partial(scores, scorer, *ids)).cpu())
        labels += [row["label"] for row in batch]
        rivals += [row["rival"] for row in batch]
    own, labels = torch.cat(found), torch.tensor(labels)
    best, ordered = ranking(own, labels, prompts)
    figures = {
        "outcome_accuracy": torch.where(labels == 1, own > 0, own < 0).double().mean().item(),
        "outcome_auc": auc(own, labels),
        "outcome_ranking": ordered,
        "outcome_best": best,
        "outcome_right": labels.double().mean().item(),
        "outcome_completions": len(rows),
    }
    if None not in rivals:
        theirs = torch.tensor(rivals)
        best, ordered = ranking(theirs, labels, prompts)
        figures |= {"buffer_auc": auc(theirs, labels)}
        figures |= {"buffer_ranking": ordered, "buffer_best": best}
    return figures


@torch.no_grad()
def validate(scorer, rows, knobs: Knobs) -> dict:
    """Accuracy (a tie is a miss), ties, loss without centring, mean gap and calibration error.

    All are of pairs on held-out prompts.
    """

    def scored(batch: Sequence[int]) -> list[torch.Tensor]:
        found = run(scorer, lambda: pair_scores(scorer, [rows[i] for i in batch]))
        return [side.cpu() for side in found]

    sizes = (knobs.rm.train_batch_size, knobs.train_max_tokens, 2)
    batches = in_order(pair_lengths(rows), *sizes)
    parts = processes.in_turn(scored, batches, in_step=is_sharded(scorer))
    chosen, rejected = (torch.cat(side) for side in zip(*parts, strict=True))
    margin = torch.tensor([rows[i]["margin"] for i in range(len(rows))])
    return {
        "validation_accuracy": preference_accuracy(chosen, rejected),
        "validation_ties": tie_share(chosen, rejected),
        "validation_loss": bradley_terry_loss(chosen, rejected, margin, 0.0).mean().item(),
        "validation_margin": (chosen - rejected).mean().item(),
        "calibration_error": calibration_error(chosen, rejected),
        "calibration": calibration(chosen, rejected),
        "gaps": gap_histogram(chosen, rejected),
        "score_mean": torch.cat([chosen, rejected]).mean().item(),
        "score_std": torch.cat([chosen, rejected]).std().item(),
        "validation_pairs": len(rows),
    }


if __name__ == "__main__":
    train_rm()
