"""The loop of SFT and reward model, against plain arithmetic; no two knobs are alike."""

import math
from dataclasses import replace

import pytest
import torch

from stages.training.supervised import Fit, Recipe
from tests.helpers.models import cpu_accelerator

RECIPE = {
    "stage": "train_sft",
    "seed": 5,
    "epochs": 3,
    "train_batch_size": 2,
    "batch_acc": 3,
    "drop_last": False,
    "lr": 0.02,
    "warmup_steps": 1,
    "weight_decay": 0.25,
    "max_norm": 0.7,
    "nonfinite": "stop",
    "train_max_tokens": None,
}
ROWS = [{"x": float(i + 1), "count": 2 * i + 1} for i in range(8)]  # steps of 6 rows and of 2


class Line(torch.nn.Module):
    """Loss of a row: count * (w * x - 1)^2; the mode of the module is written down."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((1, 1), 0.5))
        self.modes = []

    def loss(self, rows, divisor):
        self.modes.append(self.training)
        terms = [row["count"] * (self.w * row["x"] - 1).square().sum() for row in rows]
        return torch.stack(terms).sum() / divisor


def fit(model, **options) -> Fit:
    return Fit(
        cpu_accelerator(),
        model,
        ROWS,
        [row["count"] for row in ROWS],
        Recipe(**RECIPE | options),
        loss_of=model.loss,
        divisor_of=lambda rows: sum(row["count"] for row in rows),
        unit="crumbs",
        more_of=lambda divisor: {"half": divisor / 2},
    )


def test_each_step_has_the_divisor_the_rate_and_the_update_of_plain_adamw():
    model = Line()
    made = fit(model)
    plan, records = made.plan(), list(made.steps())
    assert [len(step) for step in plan] == [3, 1] * 3
    w, m, v, average = 0.5, 0.0, 0.0, None
    for done, (step, record) in enumerate(zip(plan, records, strict=True)):
        rows = [ROWS[i] for batch in step for i in batch]
        divisor = sum(row["count"] for row in rows)
        loss = sum(r["count"] * (w * r["x"] - 1) ** 2 for r in rows) / divisor
        slope = sum(r["count"] * 2 * (w * r["x"] - 1) * r["x"] for r in rows) / divisor
        # A cosine over all six steps, 0 only after the last; a warm-up of one.
        rate = 0.02 * (1.0 if done == 0 else 0.5 * (1 + math.cos(math.pi * done / 6)))
        clipped = slope * min(1.0, 0.7 / (abs(slope) + 1e-6))
        m, v = 0.9 * m + 0.1 * clipped, 0.95 * v + 0.05 * clipped**2
        w -= rate * 0.25 * w
        w -= rate * (m / (1 - 0.9 ** (done + 1))) / (math.sqrt(v / (1 - 0.95 ** (done + 1))) + 1e-8)
        average = loss if average is None else 0.9 * average + 0.1 * loss
        wanted = {"step": done + 1, "loss": loss, "loss_ema": average, "lr": rate, "skipped": 0}
        wanted |= {"grad_norm": abs(slope), "crumbs": divisor, "half": divisor / 2}
        assert record == pytest.approx(wanted, rel=1e-4)
    assert model.w.item() == pytest.approx(w, rel=1e-4)


def test_the_model_is_in_training_mode_only_while_it_trains():
    model = Line().eval()
    list(fit(model).steps())
    assert model.modes == [True] * 12 and not model.training


def test_the_plan_knows_stage_seed_and_epoch():
    plans = [fit(Line(), **options).plan() for options in ({}, {"seed": 6}, {"stage": "train_rm"})]
    assert len({str(plan) for plan in plans}) == 3
    assert len({str(plans[0][start : start + 2]) for start in (0, 2, 4)}) == 3
    assert len(fit(Line(), drop_last=True).plan()) == 3


def test_a_loss_that_is_not_finite_stops_or_is_skipped_as_the_recipe_says():
    class Odd(Line):
        def loss(self, rows, divisor):
            return super().loss(rows, divisor) * (torch.nan if rows[0]["x"] == 1.0 else 1.0)

    with pytest.raises(Exception, match="the loss is nan"):
        list(fit(Odd()).steps())
    records = list(fit(Odd(), nonfinite="skip", train_batch_size=1).steps())
    assert sum(record["skipped"] for record in records) == 3


@pytest.mark.parametrize("limit", [1, 8, 15])
@pytest.mark.parametrize("sides", [1, 2])
def test_a_limit_on_tokens_cuts_micro_batches_and_changes_no_step(limit, sides):
    sizes = {"train_batch_size": 4, "batch_acc": 2, "max_norm": 100.0}
    whole, parts = Line(), Line()
    wanted = fit(whole, **sizes)
    got = replace(fit(parts, **sizes, train_max_tokens=limit), sides=sides)
    assert got.plan() == got.plan()
    counts = [row["count"] for row in ROWS]
    for step, uncut in zip(got.plan(), wanted.plan(), strict=True):
        assert sorted(sum(step, [])) == sorted(sum(uncut, []))
        for batch in step:
            widest = max(counts[row] for row in batch)
            assert len(batch) == 1 or sides * len(batch) * widest <= limit
    assert sum(map(len, got.plan())) > sum(map(len, wanted.plan()))
    for record, other in zip(got.steps(), wanted.steps(), strict=True):
        assert record == pytest.approx(other, rel=1e-5)
    assert parts.w.item() == pytest.approx(whole.w.item(), rel=1e-5)
