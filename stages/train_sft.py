"""Stage `train_sft`: supervised fine-tuning of the base model.

Reads   data/sft.parquet, models/base
Knobs   sft (training), seed, nonfinite, device, precision, threads, attention
Writes  models/sft, a curve of loss and learning rate by step, figures

Masks and truncation were settled by `tokenize_sft`: a label of -100 is read and not learned.
"""

from pathlib import Path

import click
import torch

from stages.core.models.compute import accelerator as make_accelerator
from stages.core.randomness import seed_everything
from stages.core.sft import loss_share, predicted
from stages.core.training.batching import plan_epoch
from stages.core.training.steps import adamw, check_weights, ema, rate_of_update, update
from stages.knobs.train_sft import Knobs
from stages.store.checkpoints import load_policy, save_model
from stages.store.common import params
from stages.store.common.command import Stage, progress, say
from stages.store.common.files import replacing
from stages.store.common.metrics import write_curve, write_json
from stages.store.sources.tokenizers import load_tokenizer
from stages.store.tables import SFT, random_access


@click.command(cls=Stage)
@click.option("--data", type=click.Path(path_type=Path), required=True)
@click.option("--base", type=click.Path(path_type=Path), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--curve", type=click.Path(path_type=Path), required=True)
@click.option("--figures", type=click.Path(path_type=Path), required=True)
def train_sft(data: Path, base: Path, out: Path, curve: Path, figures: Path) -> None:
    """Fine-tune the base model on labelled tokens."""
    knobs = params.load(Knobs)
    with random_access(data, SFT) as rows:
        accelerator = make_accelerator(knobs.device, knobs.precision, knobs.threads)
        policy = load_policy(base, knobs.attention, accelerator.device)
        steps = train(accelerator, policy, rows, knobs)
        check_weights(policy, "models/sft")
    with replacing(out, folder=True) as folder:
        save_model(folder, policy, load_tokenizer(base))
    write_curve(curve, steps)
    found = summary(steps)
    write_json(figures, found)
    say(found)


def train(accelerator, policy, rows, knobs: Knobs) -> list[dict]:
    """All epochs; returns one row of figures per optimizer step."""
    sft = knobs.sft
    plan = [
        step
        for epoch in range(sft.epochs)
        for step in plan_epoch(
            rows.lengths("input_ids"),
            sft.train_batch_size,
            sft.batch_acc,
            sft.drop_last,
            knobs.seed,
            "train_sft",
            epoch,
        )
    ]
    optimizer = adamw(policy, sft.lr, sft.weight_decay)
    seed_everything(knobs.seed, "train_sft", "dropout")
    policy.train()
    records, average = [], None
    bar = progress(plan, "sft")
    for done, step in enumerate(bar):
        batches = [[rows[i] for i in batch] for batch in step]
        count = sum(predicted(row["labels"]) for batch in batches for row in batch)
        lr = rate_of_update(done, sft.lr, sft.warmup_steps, len(plan))
        with accelerator.autocast():
            shares = (loss_share(policy, batch, count) for batch in batches)
            result = update(
                accelerator, policy, optimizer, shares, lr, sft.max_norm, knobs.nonfinite
            )
        average = ema(average, result.loss)
        records.append(
            {
                "step": done + 1,
                "loss": result.loss,
                "loss_ema": average,
                "lr": lr,
                "grad_norm": result.grad_norm,
                "tokens": count,
                "skipped": result.skipped,
            }
        )
        bar.set_postfix(loss=f"{average:.3f}", refresh=False)
    policy.eval()
    return records


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
