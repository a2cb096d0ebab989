"""The loop of SFT and reward model: epochs of optimizer steps over rows, one record a step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from accelerate import Accelerator
from torch import Tensor, nn

from stages.base.randomness import seed_everything
from stages.training.batching import plan_epoch
from stages.training.steps import adamw, ema, rate_of_update, update


@dataclass(frozen=True)
class Recipe:
    """Plain values of a training; the names are those of params.yaml, `stage` names its streams."""

    stage: str
    seed: int
    epochs: int
    train_batch_size: int
    batch_acc: int
    drop_last: bool
    lr: float
    warmup_steps: int
    weight_decay: float
    max_norm: float
    nonfinite: str


@dataclass(frozen=True)
class Fit:
    """A training: its plan of all epochs, and its steps.

    loss_of     (micro-batch of rows, divisor) -> its part of the step's loss, a scalar
    divisor_of  (rows of an optimizer step) -> the divisor, by which the loss is divided once
    """

    accelerator: Accelerator
    model: nn.Module
    rows: Sequence[dict]
    lengths: list[int]
    recipe: Recipe
    loss_of: Callable[[list[dict], int], Tensor]
    divisor_of: Callable[[list[dict]], int]

    def plan(self) -> list[list[list[int]]]:
        """Row numbers of each micro-batch of each optimizer step, epoch after epoch."""
        recipe = self.recipe
        sizes = (recipe.train_batch_size, recipe.batch_acc, recipe.drop_last)
        return [
            step
            for epoch in range(recipe.epochs)
            for step in plan_epoch(self.lengths, *sizes, recipe.seed, recipe.stage, epoch)
        ]

    def steps(self) -> Iterator[dict]:
        """Train, yielding step, loss, loss_ema, lr, grad_norm, count and skipped of each update.

        The model is in training mode meanwhile and in evaluation mode afterwards.
        """
        recipe, plan = self.recipe, self.plan()
        optimizer = adamw(self.model, recipe.lr, recipe.weight_decay)
        seed_everything(recipe.seed, recipe.stage, "dropout")
        self.model.train()
        average = None
        for done, step in enumerate(plan):
            batches = [[self.rows[i] for i in batch] for batch in step]
            count = self.divisor_of([row for batch in batches for row in batch])
            lr = rate_of_update(done, recipe.lr, recipe.warmup_steps, len(plan))
            with self.accelerator.autocast():
                losses = (self.loss_of(batch, count) for batch in batches)
                result = update(
                    self.accelerator,
                    self.model,
                    optimizer,
                    losses,
                    lr,
                    recipe.max_norm,
                    recipe.nonfinite,
                )
            average = ema(average, result.loss)
            yield {
                "step": done + 1,
                "loss": result.loss,
                "loss_ema": average,
                "lr": lr,
                "grad_norm": result.grad_norm,
                "count": count,
                "skipped": result.skipped,
            }
        self.model.eval()
