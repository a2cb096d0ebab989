"""Stage `train_rm`: a Bradley-Terry reward model on the SFT model's weights.

Reads   data/preferences/{train,validation}.parquet, models/sft
Knobs   rm, seed, nonfinite, device, precision, threads, processes, attention, trust_remote_code
Writes  models/rm (a sequence classifier with one label), a curve by step, figures on the validation
        pairs

What a score counts in the reward is left to `score`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch

from stages.base import params
from stages.base.command import SharedStage, launched, paths, say
from stages.base.contents import check_contents, check_positions, check_vocabulary
from stages.base.files import replacing
from stages.base.metrics import write_json
from stages.base.positions import positions_of
from stages.base.randomness import seed_everything
from stages.base.scratch import work_of
from stages.base.tables import PAIRS, random_access
from stages.base.tokenizers import load_tokenizer
from stages.knobs.train_rm import Knobs
from stages.models import processes
from stages.models.checkpoints import new_scorer, save_model
from stages.models.compute import accelerator as make_accelerator
from stages.models.compute import vocabulary_of
from stages.models.recompute import recompute_layers
from stages.models.scorers import scores
from stages.training.batching import in_order, pair_lengths
from stages.training.bradley_terry import (
    bradley_terry_loss,
    calibration,
    calibration_error,
    gap_histogram,
    preference_accuracy,
    tie_share,
)
from stages.training.saving import Saver
from stages.training.steps import check_weights
from stages.training.supervised import Fit, Recipe
from stages.training.tracking import tracking


@click.command(cls=SharedStage)
@paths("--train train_path", "--validation", "--sft", "--out", "--curve", "--figures")
def train_rm(
    train_path: Path, validation: Path, sft: Path, out: Path, curve: Path, figures: Path
) -> None:
    """Train the reward model and validate it on held-out prompts."""
    knobs = params.load(Knobs)
    if launched(knobs.processes, knobs.threads):
        return
    trust = knobs.model.trust_remote_code
    largest = {path: check_contents(path, PAIRS) for path in (train_path, validation)}
    with random_access(train_path, PAIRS) as rows, random_access(validation, PAIRS) as held_out:
        accelerator = make_accelerator(knobs.device, knobs.precision, knobs.threads)
        seed_everything(knobs.seed, "train_rm", "head")
        scorer = new_scorer(sft, knobs.attention, accelerator.device, trust)
        tokenizer = load_tokenizer(sft, trust)
        if knobs.gradient_checkpointing:
            recompute_layers(scorer)
        for path, found in largest.items():
            check_vocabulary(path, found, vocabulary_of(scorer), sft)
            check_positions(path, PAIRS, positions_of(scorer.config), sft)
        inputs = [train_path, validation, sft]
        saver = Saver(work_of("train_rm", inputs, knobs, accelerator.device))
        with saver.watching(), tracking("train_rm", knobs.model_dump(), curve) as log:
            steps = train(accelerator, scorer, rows, knobs, log, saver)
        check_weights(scorer, "models/rm")
        with accelerator.autocast():
            found = validate(scorer, held_out, knobs)
    if processes.number():
        return  # the first one writes
    with replacing(out, folder=True) as folder:
        save_model(folder, scorer, tokenizer)
    found |= {"steps": len(steps), "skipped": sum(step["skipped"] for step in steps)}
    write_json(figures, found)
    saver.done()
    say(found)


def train(accelerator, scorer, rows, knobs: Knobs, log: Callable, saver=None) -> list[dict]:
    """All epochs; returns one row of figures per optimizer step, each logged as it comes."""
    knobs_of_rm = knobs.rm.model_dump(exclude={"centering"})
    recipe = Recipe(
        stage="train_rm",
        seed=knobs.seed,
        nonfinite=knobs.nonfinite,
        train_max_tokens=knobs.train_max_tokens,
        **knobs_of_rm,
    )
    right: list[int] = []

    def accuracy(pairs: int) -> dict:
        share = processes.total(sum(right)) / pairs
        right.clear()
        return {"accuracy": share}

    fit = Fit(
        accelerator,
        scorer,
        rows,
        pair_lengths(rows),
        recipe,
        loss_of=lambda pairs, count: micro_batch_loss(
            scorer, pairs, count, knobs.rm.centering, right
        ),
        divisor_of=len,
        unit="pairs",
        more_of=accuracy,
        sides=2,
    )
    return fit.run(log, saver)


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
def validate(scorer, rows, knobs: Knobs) -> dict:
    """Accuracy (a tie is a miss), ties, loss without centring, mean gap and calibration error.

    All are of pairs on held-out prompts.
    """

    def scored(batch: Sequence[int]) -> list[torch.Tensor]:
        return [side.cpu() for side in pair_scores(scorer, [rows[i] for i in batch])]

    sizes = (knobs.rm.train_batch_size, knobs.train_max_tokens, 2)
    parts = processes.in_turn(scored, in_order(pair_lengths(rows), *sizes))
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
