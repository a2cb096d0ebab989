"""The loop of SFT and reward model: epochs of optimizer steps over rows, one record a step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from stages.base.command import progress
from stages.base.randomness import seed_everything
from stages.models import processes
from stages.models.sharding import idle_pass, is_sharded, run
from stages.training.batching import cut, dealt, plan_epoch
from stages.training.saving import Saver, restore, tensors_of
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
    train_max_tokens: int | None


@dataclass(frozen=True)
class Fit:
    """A training: its plan of all epochs, and its steps.

    Of several processes each takes its part of every micro-batch.

    lengths     tokens of each row; of a pair, those of its longer side
    loss_of     (micro-batch of rows, divisor) -> its part of the step's loss, a scalar
    divisor_of  (rows of an optimizer step) -> the divisor, by which the loss is divided once
    unit        what the divisor counts: tokens, pairs
    more_of     (divisor) -> further figures of the step that was just taken, of all processes
    sides       rows that are read for each row: 2 of a pair
    """

    accelerator: Accelerator
    model: nn.Module
    rows: Sequence[dict]
    lengths: list[int]
    recipe: Recipe
    loss_of: Callable[[list[dict], int], Tensor]
    divisor_of: Callable[[list[dict]], int]
    unit: str
    more_of: Callable[[int], dict] = lambda divisor: {}
    sides: int = 1

    def plan(self) -> list[list[list[int]]]:
        """Row numbers of each micro-batch of each optimizer step, epoch after epoch."""
        recipe = self.recipe
        sizes = (recipe.train_batch_size, recipe.batch_acc, recipe.drop_last)
        steps = (
            step
            for epoch in range(recipe.epochs)
            for step in plan_epoch(self.lengths, *sizes, recipe.seed, recipe.stage, epoch)
        )
        limits = (self.lengths, recipe.train_max_tokens, self.sides)
        return [[part for batch in step for part in cut(batch, *limits)] for step in steps]

    def run(self, log: Callable[[dict], None], saver: Saver | None = None) -> list[dict]:
        """Train; returns one row of figures per optimizer step, each logged as it comes."""
        records = []
        bar = progress(self.steps(saver), self.recipe.stage, len(self.plan()))
        for record in bar:
            records.append(record)
            log(record)
            shown = {"loss": record["loss_ema"], "accuracy": record.get("accuracy")}
            bar.tell(record[self.unit], self.unit, **shown)
        return records

    def steps(self, saver: Saver | None = None) -> Iterator[dict]:
        """Train, yielding step, loss, loss_ema, lr, grad_norm, skipped, the unit and more of each.

        With a saver a training that was cut off goes on: the steps that it took are yielded again,
        without being taken. The model is in training mode meanwhile, in evaluation mode afterwards.
        """
        recipe, plan = self.recipe, self.plan()
        optimizer = adamw(self.model, recipe.lr, recipe.weight_decay)
        models = {"model": (optimizer, self.model)}
        own = [processes.number()] if processes.number() else []  # one process: as it always was
        seed_everything(recipe.seed, recipe.stage, "dropout", *own)
        found = saver.found() if saver else None
        records = found.values["records"] if found else []
        if found:
            restore(models, found.tensors)
        self.model.train()
        yield from records
        for done, step in enumerate(plan[len(records) :], start=len(records)):
            records.append(self._step(optimizer, step, done, len(plan), records[-1:]))
            yield records[-1]
            if saver:
                saver.after_step(len(records), partial(tensors_of, models), {"records": records})
        self.model.eval()

    def _step(self, optimizer, step: list[list[int]], done: int, total: int, last: list) -> dict:
        """One optimizer step after `done` of `total`; `last` holds the record before it."""
        recipe, batches = self.recipe, [[self.rows[i] for i in batch] for batch in step]
        divisor = self.divisor_of([row for batch in batches for row in batch])
        lr = rate_of_update(done, recipe.lr, recipe.warmup_steps, total)
        with self.accelerator.autocast():
            losses = (self._own_loss(batch, divisor) for batch in batches)
            limits = (recipe.max_norm, recipe.nonfinite)
            result = update(self.accelerator, self.model, optimizer, losses, lr, *limits)
        return {
            "step": done + 1,
            "loss": result.loss,
            "loss_ema": ema(last[0]["loss_ema"] if last else None, result.loss),
            "lr": lr,
            "grad_norm": result.grad_norm,
            "skipped": result.skipped,
            self.unit: divisor,
        } | self.more_of(divisor)

    def _own_loss(self, batch: list[dict], divisor: int) -> Tensor:
        """What this process's part of a micro-batch adds to the step's loss; 0 without a row."""
        own = dealt(batch, processes.number(), processes.count())
        if own:
            return run(self.model, lambda: self.loss_of(own, divisor))
        if is_sharded(self.model):
            return idle_pass(self.model)
        return torch.zeros((), device=self.accelerator.device)
