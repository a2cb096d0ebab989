"""Two processes optimize as one does, whatever the objective: weights, records and figures."""

import pytest
import torch

from stages.models import processes
from stages.rl.objectives import OBJECTIVES
from stages.rl.stats import FIGURES
from tests.helpers.models import llama
from tests.helpers.together import far_off, together
from tests.rl.test_epochs import make_buffer, run

SAME = 5e-7
TEN = {
    "rewards": [1.0, 0.0, 0.25, 0.75, 0.0, 1.0, 0.5, 0.0, 1.0, 0.25],
    "lengths": [3, 1, 8, 2, 4, 5, 2, 6, 1, 3],
}
KNOBS = {
    "beta": 0.05,
    "lr": 3e-4,
    "lr_critic": 3e-4,
    "train_batch_size": 4,
    "batch_acc": 1,
    "ppo_epochs": 3,
}


def optimized(loss: str, **options) -> dict:
    """Nine steps: micro-batches of four, four and two rows, the last one smaller than its group."""
    rows = make_buffer(llama(), **TEN, moved=0.1)
    found = run(loss, rows, **KNOBS | options)
    figures = {name: getattr(found.stats, name) for name in FIGURES}
    return {
        "weights": found.weights(),
        "records": found.records,
        "figures": figures,
        "ratios": found.stats.ratios,
    }


def all_objectives() -> dict:
    found = {loss: optimized(loss) for loss in OBJECTIVES}
    return found | {"target_kl": optimized("grpo", target_kl=1e-9)}


@pytest.fixture(scope="module")
def two() -> list[dict]:
    return together(2, all_objectives)


def same(one: dict, other: dict) -> None:
    assert far_off(one["weights"], other["weights"]) < SAME
    for record, theirs in zip(one["records"], other["records"], strict=True):
        for name in ("lr", "kl", "clipped_fraction"):
            assert getattr(theirs, name) == pytest.approx(getattr(record, name), rel=1e-3, abs=1e-6)
        for name in ("policy", "critic") if record.critic else ("policy",):
            figures, others = getattr(record, name), getattr(theirs, name)
            assert others.grad_norm == pytest.approx(figures.grad_norm, rel=1e-4)
            assert others.loss == pytest.approx(figures.loss, rel=1e-4, abs=1e-6)
    for name, figure in one["figures"].items():
        torch.testing.assert_close(other["figures"][name], figure, equal_nan=True)
    for ratio, theirs in zip(one["ratios"], other["ratios"], strict=True):
        torch.testing.assert_close(theirs, ratio)


@pytest.mark.parametrize("loss", OBJECTIVES)
def test_two_processes_optimize_as_one_does(two, loss):
    one = optimized(loss)
    assert len(one["records"]) == 9
    for other in two:
        same(one, other[loss])
    assert far_off(two[0][loss]["weights"], two[1][loss]["weights"]) == 0


def test_both_stop_after_the_same_pass_by_the_kl_of_all_rows(two):
    one = optimized("grpo", target_kl=1e-9)
    assert len(one["records"]) == 3
    for other in two:
        same(one, other["target_kl"])


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "ppo"])
def test_three_processes_optimize_as_one_does(loss):
    for other in together(3, optimized, loss):
        same(optimized(loss), other)


def test_the_figures_of_a_single_process_are_its_own():
    assert processes.count() == 1
    assert all(ratio is not None for ratio in optimized("grpo")["ratios"])
