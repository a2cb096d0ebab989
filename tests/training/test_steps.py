import math

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from stages.models import processes
from stages.training.sft import mean_loss, micro_batch_loss, predicted
from stages.training.steps import (
    NonFinite,
    StepFigures,
    adamw,
    check_weights,
    ema,
    learning_rate,
    rate_of_update,
    update,
)
from tests.helpers.models import (
    POLICIES,
    cpu_accelerator,
    llama,
    plain_logits,
    random_ids,
    same_weights,
    weights_of,
)
from tests.helpers.together import together

each_model = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


def vector(*values: float) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.tensor(values))
    return module


def step(model, losses, optimizer=None, lr=1.0, max_norm=100.0, nonfinite="stop") -> StepFigures:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    return update(cpu_accelerator(), model, optimizer, losses, lr, max_norm, nonfinite)


# The schedule.


def test_the_rate_rises_linearly_and_falls_along_a_cosine_to_zero():
    rates = [learning_rate(done, 2.0, 2, 6) for done in range(7)]
    assert rates == pytest.approx([0.0, 1.0, 2.0, 1.70710678, 1.0, 0.29289322, 0.0])
    assert learning_rate(9, 2.0, 2, 6) == 0.0


def test_the_schedule_is_that_of_transformers():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, 40)
    for done in range(40):
        assert learning_rate(done, 3e-4, 5, 40) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_without_an_end_the_rate_stays_at_its_peak_after_the_warm_up():
    rates = [rate_of_update(done, 1.0, 3, None) for done in range(6)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0])


def test_neither_the_first_nor_the_last_update_has_rate_zero():
    rates = [rate_of_update(done, 1.0, 2, 5) for done in range(5)]
    assert rates[:2] == pytest.approx([0.5, 1.0])
    assert rates == pytest.approx([0.5, 1.0, 0.85355339, 0.5, 0.14644661])
    assert rate_of_update(0, 1.0, 0, 1) > 0


# One optimizer step.


def test_the_gradient_norm_is_taken_before_clipping():
    model = vector(0.0, 0.0)
    direction = torch.tensor([3.0, 4.0])
    figures = step(model, [(model.weight * direction).sum()], max_norm=1.0)
    assert figures == StepFigures(loss=0.0, grad_norm=pytest.approx(5.0), skipped=0)
    assert model.weight.tolist() == pytest.approx([-0.6, -0.8], abs=1e-6)


def test_a_gradient_below_the_limit_is_left_alone():
    model = vector(0.0, 0.0)
    figures = step(model, [(model.weight * torch.tensor([0.3, 0.4])).sum()], max_norm=1.0)
    assert figures.grad_norm == pytest.approx(0.5)
    assert model.weight.tolist() == pytest.approx([-0.3, -0.4])


def test_shares_add_up_and_gradients_do_not_linger():
    model = vector(1.0, 2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shares = (model.weight[i] * scale for i, scale in ((0, 1.0), (1, 2.0), (0, 3.0)))
    figures = step(model, shares, optimizer, lr=0.1)
    assert figures.loss == pytest.approx(1 + 4 + 3)
    assert figures.grad_norm == pytest.approx((4**2 + 2**2) ** 0.5)
    assert model.weight.tolist() == pytest.approx([0.6, 1.8])
    figures = step(model, [model.weight[0]], optimizer, lr=0.1)
    assert figures.grad_norm == pytest.approx(1.0)


def test_the_rate_of_the_step_is_the_one_given():
    model = vector(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=123.0)
    step(model, [model.weight.sum()], optimizer, lr=0.25)
    assert model.weight.item() == -0.25


def with_momentum(weight_decay=0.1):
    """A model and AdamW that has taken a step, so that one without gradient would move it too."""
    model = vector(1.0, -2.0)
    model.matrix = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = adamw(model, 0.1, weight_decay)
    step(model, [model.weight.sum() + model.matrix.sum()], optimizer, lr=0.1)
    return model, optimizer, weights_of(model)


def test_a_step_without_any_share_changes_no_weight():
    model, optimizer, before = with_momentum()
    figures = step(model, [], optimizer, lr=0.1)
    assert figures == StepFigures(0.0, 0.0, 0)
    assert same_weights(weights_of(model), before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_loss_that_is_not_finite_stops_before_a_weight_has_changed(bad):
    model, optimizer, before = with_momentum()
    with pytest.raises(NonFinite, match="loss is"):
        step(model, [model.weight.sum(), model.weight.sum() * bad], optimizer)
    assert same_weights(weights_of(model), before)


def test_under_skip_only_the_bad_share_is_left_out():
    model = vector(1.0, 2.0)
    losses = [model.weight[0], model.weight.sum() * torch.nan, 3 * model.weight[1]]
    figures = step(model, losses, lr=0.1, nonfinite="skip")
    assert figures == StepFigures(pytest.approx(7.0), pytest.approx(10**0.5, rel=1e-6), skipped=1)
    assert model.weight.tolist() == pytest.approx([0.9, 1.7])


def test_under_skip_a_step_with_only_bad_shares_changes_no_weight():
    model, optimizer, before = with_momentum()
    losses = [model.weight.sum() * torch.nan] * 2
    assert step(model, losses, optimizer, nonfinite="skip") == StepFigures(0.0, 0.0, 2)
    assert same_weights(weights_of(model), before)


def test_a_gradient_that_is_not_finite_under_a_finite_loss_stops_or_is_skipped_whole():
    def losses(model):
        return [model.weight.sum(), (model.weight - model.weight.detach()).sqrt().sum()]

    model, optimizer, before = with_momentum()
    with pytest.raises(NonFinite, match="gradient's norm is"):
        step(model, losses(model), optimizer)
    assert same_weights(weights_of(model), before)
    figures = step(model, losses(model), optimizer, nonfinite="skip")
    assert figures.skipped == 2
    assert same_weights(weights_of(model), before)
    assert step(model, [model.weight[0]], optimizer).grad_norm == pytest.approx(1.0)


def test_only_matrices_are_decayed():
    model = vector(1.0)
    model.matrix = torch.nn.Parameter(torch.ones(1, 1))
    optimizer = adamw(model, 0.1, 0.5)
    step(model, [0 * model.weight.sum() + 0 * model.matrix.sum()], optimizer, lr=0.1)
    assert model.weight.item() == 1.0
    assert model.matrix.item() == pytest.approx(0.95)


def test_adamw_moves_as_its_paper_says_with_betas_of_09_and_095():
    model = vector(1.0)
    optimizer, w, m, v = adamw(model, 0.1, 0.5), 1.0, 0.0, 0.0
    for number, slope in enumerate((1.0, 3.0, -0.5), start=1):
        step(model, [slope * model.weight.sum()], optimizer, lr=0.1)
        m, v = 0.9 * m + 0.1 * slope, 0.95 * v + 0.05 * slope**2
        w -= 0.1 * (m / (1 - 0.9**number)) / (math.sqrt(v / (1 - 0.95**number)) + 1e-8)
        assert model.weight.item() == pytest.approx(w, rel=1e-5)


def test_weights_that_are_not_finite_are_found():
    check_weights(vector(1.0, 2.0), "policy")
    with pytest.raises(NonFinite, match="policy: weight weight is not finite"):
        check_weights(vector(1.0, torch.nan), "policy")


def test_the_average_for_the_eye_starts_at_the_first_value():
    assert ema(None, 3.0) == 3.0
    assert ema(3.0, 1.0) == pytest.approx(0.9 * 3 + 0.1 * 1)


# Micro-batches of SFT on a real model.

IGNORED = -100


def sft_rows() -> list[dict]:
    """Four rows with 3, 9, 1 and 4 predicted labels, one of them with a label at position 0."""
    ids = random_ids(3, 7, 10, 12, 6)
    trained = [range(4, 7), range(0, 10), range(11, 12), (1, 2, 4, 5)]
    rows = []
    for row, places in zip(ids, trained, strict=True):
        labels = [token if i in places else IGNORED for i, token in enumerate(row)]
        rows.append({"input_ids": row, "labels": labels})
    return rows


def plain_loss(model, rows) -> torch.Tensor:
    """Token mean of the negative log-prob over every label but those at position 0."""
    terms = []
    for row in rows:
        log_probs = torch.log_softmax(
            plain_logits(model, row["input_ids"][:1], row["input_ids"][1:]), -1
        )
        for place, label in enumerate(row["labels"]):
            if place and label != IGNORED:
                terms.append(-log_probs[place - 1, label])
    return torch.stack(terms).mean()


def trained(make, batches, optimizer_of, steps=1):
    model, figures = make(), []
    optimizer = optimizer_of(model)
    rows = sft_rows()
    for _ in range(steps):
        shares = (micro_batch_loss(model, [rows[i] for i in batch], 17) for batch in batches)
        figures.append(step(model, shares, optimizer, lr=optimizer.defaults["lr"]))
    return figures, weights_of(model)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def test_the_label_at_position_zero_is_not_counted():
    assert [predicted(row["labels"]) for row in sft_rows()] == [3, 9, 1, 4]
    assert predicted([5, 6, 7, 8, 9]) == 4
    assert predicted([5, IGNORED]) == predicted([]) == 0


@each_model
def test_five_trained_tokens_give_the_mean_of_four_terms(make):
    model, row = make(), {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9]}
    logits = plain_logits(model, [5], [6, 7, 8, 9])
    wanted = torch.nn.functional.cross_entropy(logits, torch.tensor([6, 7, 8, 9]))
    assert micro_batch_loss(model, [row], predicted(row["labels"])).item() == pytest.approx(
        wanted.item()
    )


@each_model
def test_loss_and_gradient_are_the_token_mean_over_the_whole_step(make):
    model = make()
    loss = plain_loss(model, sft_rows())
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    figures, _ = trained(make, [[0, 1, 2, 3]], sgd)
    assert figures[0].loss == pytest.approx(loss.item(), rel=1e-5)
    assert figures[0].grad_norm == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize(
    "batches", [[[0], [1], [2], [3]], [[3, 1], [0, 2]], [[2, 0, 1], [3]]], ids=str
)
@each_model
def test_micro_batches_change_neither_loss_nor_norm_nor_weights(make, batches):
    wanted, weights = trained(make, [[0, 1, 2, 3]], sgd)
    got, others = trained(make, batches, sgd)
    assert got[0].loss == pytest.approx(wanted[0].loss, rel=1e-5)
    assert got[0].grad_norm == pytest.approx(wanted[0].grad_norm, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-4, atol=1e-5)


def test_micro_batches_change_nothing_over_several_steps_of_adamw():
    wanted, weights = trained(llama, [[0, 1, 2, 3]], lambda m: adamw(m, 1e-3, 0.1), steps=4)
    got, others = trained(llama, [[0], [1], [2], [3]], lambda m: adamw(m, 1e-3, 0.1), steps=4)
    assert [s.loss for s in got] == pytest.approx([s.loss for s in wanted], rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-3, atol=1e-4)


@each_model
def test_the_mean_loss_over_batches_is_the_token_mean(make):
    model, rows = make(), sft_rows()
    wanted = plain_loss(model, rows).item()
    assert mean_loss(model, [rows]) == pytest.approx(wanted, rel=1e-5)
    assert mean_loss(model, [rows[:1], rows[1:]]) == pytest.approx(wanted, rel=1e-5)


# Several processes; more of them in test_processes.py.


def one_of_two(shards: list[list[list[int]]]) -> tuple[StepFigures, dict]:
    """A step over micro-batches of rows; a process without a row of one adds nothing to it."""
    model, rows = llama(), sft_rows()
    shares = (
        micro_batch_loss(model, [rows[i] for i in batch], 17) if batch else torch.zeros(())
        for batch in shards[processes.number()]
    )
    figures = update(cpu_accelerator(), model, sgd(model), shares, 0.5, 100.0, "stop")
    return figures, weights_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shards", [[[[1, 0], [3]], [[2], []]], [[[0, 1, 2, 3]], [[]]]], ids=["uneven", "idle"]
)
def test_two_processes_make_the_step_that_one_makes_over_all_rows(shards):
    wanted, weights = trained(llama, [[0, 1, 2, 3]], sgd)
    for figures, others in together(2, one_of_two, shards):
        assert figures.loss == pytest.approx(wanted[0].loss, rel=1e-5)
        assert figures.grad_norm == pytest.approx(wanted[0].grad_norm, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(others[name], weight, rtol=1e-4, atol=1e-5)
