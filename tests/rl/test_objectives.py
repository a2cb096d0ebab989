import math
from dataclasses import fields

import pytest
import torch

from stages.rl.advantages import gae
from stages.rl.kl import kl_penalty
from stages.rl.objectives import (
    OBJECTIVES,
    Clip,
    Objective,
    clipped_ratio_loss,
    clipped_weight_loss,
    pair_loss,
    policy_gradient_loss,
    ratio_diagnostics,
    sequence_ratio_loss,
    soft_gate_loss,
    token_weights,
    value_loss,
)

CLIP = Clip(clip_eps_lo=0.2, clip_eps_hi=0.28, tau_pos=1.0, tau_neg=1.05)
LOSSES = [
    policy_gradient_loss,
    clipped_ratio_loss,
    sequence_ratio_loss,
    clipped_weight_loss,
    soft_gate_loss,
]
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
each_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
OF_ROWS = {name: objective for name, objective in OBJECTIVES.items() if not objective.pairs}
each_objective_of_rows = pytest.mark.parametrize("objective", OF_ROWS.values(), ids=OF_ROWS)
each_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)


def one_token(loss, ratio, advantage, clip=CLIP):
    """Loss, its gradient by the log-prob, `clipped`; of one token that was sampled at 0.2."""
    log_probs_old = torch.tensor([[math.log(0.2)]], dtype=torch.float64)
    log_probs = (log_probs_old + math.log(ratio)).requires_grad_()
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    per_token, clipped = loss(log_probs, log_probs_old, advantages, mask, clip)
    gradient = torch.autograd.grad(per_token.sum(), log_probs)[0]
    return per_token.item(), gradient.item(), clipped.item()


def batch(dtype=torch.float32):
    """Six rows of 6, 4, 1, 3, 2 and 5 action tokens (a hole in the last), moved by up to 0.5."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 3, 2, 6])[:, None]
    mask[5, 2] = False
    old = -3 * torch.rand(6, 6, generator=generator, dtype=dtype)
    new = old + torch.rand(6, 6, generator=generator, dtype=dtype) - 0.5
    ref = old + torch.rand(6, 6, generator=generator, dtype=dtype) - 0.5
    advantages = torch.tensor([1.25, -0.75, 0.0, -0.5, 0.9, -1.1], dtype=dtype)[:, None]
    return new, old, ref, advantages, mask


# Ratio, advantage -> loss, gradient by the log-prob, whether the clip is active.
@pytest.mark.parametrize(
    "ratio, advantage, wanted",
    [
        (1.0, 2.0, (-2.0, -2.0, False)),
        (1.2, 2.0, (-2.4, -2.4, False)),
        (1.5, 2.0, (-2.56, 0.0, True)),
        (0.5, 2.0, (-1.0, -1.0, False)),
        (1.5, -2.0, (3.0, 3.0, False)),
        (0.5, -2.0, (1.6, 0.0, True)),
        (1.5, 0.0, (0.0, 0.0, False)),
        (5.0, -2.0, (10.0, 10.0, False)),
    ],
)
def test_ppo_clips_only_what_would_go_too_far(ratio, advantage, wanted):
    assert one_token(clipped_ratio_loss, ratio, advantage) == pytest.approx(wanted)


def test_clip_higher_is_the_upper_bound_alone():
    lower_bound_only = Clip(0.2, 9.0, 1.0, 1.0)
    assert one_token(clipped_ratio_loss, 3.0, 1.0, lower_bound_only)[2] is False
    assert one_token(clipped_ratio_loss, 0.7, -1.0, lower_bound_only)[2] is True
    upper_bound_only = Clip(1.0, 0.28, 1.0, 1.0)
    assert one_token(clipped_ratio_loss, 1.3, 1.0, upper_bound_only)[2] is True
    assert one_token(clipped_ratio_loss, 0.01, -1.0, upper_bound_only)[2] is False


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5])
def test_policy_gradient_looks_at_no_ratio(ratio):
    wanted = (-2.0 * math.log(0.2 * ratio), -2.0, False)
    assert one_token(policy_gradient_loss, ratio, 2.0) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "ratio, clip_eps_lo, weight, clipped",
    [
        (1.1, 0.2, 1.1, False),
        (3.0, 0.2, 1.28, True),
        (0.5, 0.2, 0.8, True),
        (0.5, 1.0, 0.5, False),
    ],
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_bounds_the_weight_and_keeps_the_gradient(
    ratio, clip_eps_lo, weight, clipped, advantage
):
    clip = Clip(clip_eps_lo, 0.28, 1.0, 1.0)
    wanted = (-weight * advantage * math.log(0.2 * ratio), -weight * advantage, clipped)
    assert one_token(clipped_weight_loss, ratio, advantage, clip) == pytest.approx(wanted)


def test_sapo_has_the_policy_gradient_at_ratio_1_and_a_gate_for_each_sign():
    assert one_token(soft_gate_loss, 1.0, 2.0) == pytest.approx((-4.0, -2.0, False))
    assert one_token(soft_gate_loss, 1.0, -2.0) == pytest.approx((4 / 1.05, 2.0, False))
    gate = 1 / (1 + math.exp(-1.05 * 0.5))
    wanted = 4 / 1.05 * gate * 2.0
    gradient = 4 * gate * (1 - gate) * 1.5 * 2.0
    assert one_token(soft_gate_loss, 1.5, -2.0) == pytest.approx((wanted, gradient, False))


def test_gspo_clips_whole_sequences_by_the_mean_log_ratio():
    # Ratios 2 and 0.5 cancel out; 2 and 1 have a geometric mean of 1.41, which is clipped.
    old = torch.zeros(2, 3, dtype=torch.float64)
    new = torch.tensor([[2.0, 0.5, 7.0], [2.0, 1.0, 7.0]], dtype=torch.float64).log()
    new.requires_grad_()
    mask = torch.tensor([[True, True, False]] * 2)
    loss, clipped = sequence_ratio_loss(new, old, torch.ones(2, 1).double(), mask, CLIP)
    assert loss.tolist() == [pytest.approx([-1.0, -1.0, 0.0]), pytest.approx([-1.28, -1.28, 0.0])]
    assert clipped.tolist() == [[False, False, False], [True, True, False]]
    weights = token_weights(mask.sum(1), mask.any(1), "seq-mean-token-mean", 3)
    gradient = torch.autograd.grad((loss * weights[:, None]).sum(), new)[0]
    # -A s / length, and half of that for two rows.
    assert gradient.tolist() == [pytest.approx([-0.25, -0.25, 0.0]), [0.0, 0.0, 0.0]]


@each_loss
def test_new_equal_to_old_has_the_policy_gradient_and_clips_nothing(loss):
    _, old, _, advantages, mask = batch(torch.float64)
    new = old.clone().requires_grad_()
    per_token, clipped = loss(new, old, advantages, mask, CLIP)
    gradient = torch.autograd.grad(per_token.sum(), new)[0]
    torch.testing.assert_close(gradient, torch.where(mask, -advantages, 0.0))
    assert not clipped.any()


@each_loss
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 500.0])
def test_junk_outside_the_mask_changes_neither_loss_nor_gradient(loss, junk):
    new, old, _, advantages, mask = batch()
    dirty = [torch.where(mask, x, junk) for x in (new, old, advantages.expand(6, 6))]
    new, dirty_new = new.requires_grad_(), dirty[0].requires_grad_()
    wanted, wanted_clipped = loss(new, old, advantages, mask, CLIP)
    got, clipped = loss(*dirty, mask, CLIP)
    assert torch.equal(got, wanted) and torch.equal(clipped, wanted_clipped)
    assert got[~mask].eq(0).all() and not clipped[~mask].any()
    got_gradient = torch.autograd.grad(got.sum(), dirty_new)[0]
    assert torch.equal(got_gradient, torch.autograd.grad(wanted.sum(), new)[0])


@each_loss
def test_a_nan_on_an_action_token_is_not_hidden(loss):
    new, old, _, advantages, mask = batch()
    new[0, 1] = math.nan
    assert loss(new, old, advantages, mask, CLIP)[0][0, 1].isnan()


FAR = [200.0, 80.0, 8.0, -200.0]  # log-ratios: the first overflows float32


@each_loss
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("shape", ["token", "sequence"])
def test_n18_a_token_of_advantage_0_is_as_if_it_were_not_there_whatever_its_ratio(loss, far, shape):
    new, old, _, advantages, mask = batch()  # row 2 has an advantage of 0
    place = (2, 0)
    if shape == "token" and loss is not sequence_ratio_loss:
        advantages, place = advantages.repeat(1, 6), (0, 3)
        advantages[place] = 0.0
    moved = old.clone()
    moved[place] = new[place] - far
    results = []
    for log_probs_old in (old, moved):
        leaf = new.clone().requires_grad_()
        per_token, _ = loss(leaf, log_probs_old, advantages, mask, CLIP)
        results.append((per_token.detach(), torch.autograd.grad(per_token.sum(), leaf)[0]))
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)
        if loss is not soft_gate_loss:
            assert after[place] == 0.0


@each_loss
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_n18_one_ratio_however_far_leaves_loss_and_gradient_finite_and_bounded(
    loss, far, advantage
):
    new = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    old = new.detach() - torch.tensor([[0.0, far, 0.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    per_token, clipped = loss(new, old, torch.tensor([[advantage]]), mask, CLIP)
    gradient = torch.autograd.grad(per_token.sum(), new)[0]
    assert per_token.isfinite().all() and per_token.abs().max() <= 2.0 * 100.001
    assert gradient.isfinite().all() and gradient.abs().max() <= 2.0 * 100.001
    if loss is clipped_ratio_loss and far > 5:
        # Within the clip for A > 0, at the limit of 100 for A < 0; neither pulls on the policy.
        wanted = -2.56 if advantage > 0 else 200.0
        assert per_token[0, 1].item() == pytest.approx(wanted)
        assert gradient[0, 1].item() == 0.0 and clipped[0].tolist() == [False, True, False]


def test_a_negative_advantage_is_paid_in_full_up_to_the_limit_of_the_ratio():
    assert one_token(clipped_ratio_loss, 99.0, -2.0) == pytest.approx((198.0, 198.0, False))
    assert one_token(clipped_ratio_loss, 101.0, -2.0) == pytest.approx((200.0, 0.0, True))
    assert one_token(sequence_ratio_loss, 101.0, -2.0) == pytest.approx((200.0, 0.0, True))


@each_loss
def test_advantages_of_0_give_no_gradient(loss):
    new, old, _, advantages, mask = batch()
    new.requires_grad_()
    per_token, clipped = loss(new, old, torch.zeros_like(advantages), mask, CLIP)
    assert torch.autograd.grad(per_token.sum(), new)[0].eq(0).all()


@each_loss
def test_float64_stays_float64_and_its_gradient_is_right(loss):
    new, old, _, advantages, mask = batch(torch.float64)
    per_token, _ = loss(new, old, advantages, mask, CLIP)
    assert per_token.dtype == torch.float64
    if loss is not clipped_weight_loss:  # its weight is held constant on purpose
        new.requires_grad_()
        assert torch.autograd.gradcheck(lambda x: loss(x, old, advantages, mask, CLIP)[0], new)


@each_objective_of_rows
@pytest.mark.parametrize("sizes", [[2, 2, 2], [4, 2], [1] * 6])
@each_aggregation
def test_micro_batches_add_up_to_the_gradient_of_the_whole(objective, sizes, aggregation):
    new, old, ref, advantages, mask = batch()
    used = torch.tensor([True, True, True, True, False, True])
    weights = token_weights(mask.sum(1), used, aggregation, max_length=6)

    def gradient(sizes):
        leaf, total, start = new.clone().requires_grad_(), 0, 0
        for size in sizes:
            rows = slice(start, start + size)
            inputs = (leaf[rows], old[rows], advantages[rows], mask[rows])
            loss = objective.loss(*inputs, CLIP)[0]
            loss = loss + 0.1 * kl_penalty(leaf[rows], ref[rows], mask[rows], "k3")
            total = total + torch.autograd.grad((loss * weights[rows, None]).sum(), leaf)[0]
            start += size
        return total

    torch.testing.assert_close(gradient(sizes), gradient([6]), rtol=1e-6, atol=1e-8)
    assert gradient(sizes)[4].eq(0).all()
    assert gradient(sizes)[0].ne(0).all()


def weights_of(lengths, aggregation, used=None, max_length=10):
    used = [True] * len(lengths) if used is None else used
    return token_weights(
        torch.tensor(lengths, dtype=torch.int64),
        torch.tensor(used, dtype=torch.bool),
        aggregation,
        max_length,
    )


@pytest.mark.parametrize(
    "aggregation, wanted",
    [
        ("token-mean", [1 / 9, 1 / 9]),
        ("seq-mean-token-mean", [1 / 16, 1 / 2]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2]),
        ("constant", [1 / 20, 1 / 20]),
    ],
)
def test_weights_of_rows_of_8_and_1_tokens(aggregation, wanted):
    weights = weights_of([8, 1], aggregation)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(wanted)
    with_unused_rows = weights_of([5, 8, 0, 1], aggregation, [False, True, False, True])
    assert with_unused_rows.tolist() == pytest.approx([0, wanted[0], 0, wanted[1]])


def test_token_mean_is_not_the_mean_of_micro_batch_means():
    # 8 tokens at loss 1, then 1 token at loss 5: 13 / 9, where the mean of means is 3.
    weights = weights_of([8, 1], "token-mean")
    assert (weights * torch.tensor([8 * 1.0, 1 * 5.0])).sum().item() == pytest.approx(13 / 9)


@each_aggregation
def test_nothing_used_weighs_nothing(aggregation):
    assert weights_of([8, 1], aggregation, [False, False]).tolist() == [0.0, 0.0]
    assert weights_of([], aggregation, []).tolist() == []
    assert weights_of([0], aggregation).isfinite().all()


@each_objective
def test_a_batch_with_nothing_used_has_loss_0_and_gradient_0(objective):
    new, old, _, advantages, _ = batch()
    new.requires_grad_()
    mask = torch.zeros(6, 6, dtype=torch.bool)
    weights = token_weights(mask.sum(1), mask.any(1), objective.aggregation, 6)
    loss = (objective.loss(new, old, advantages, mask, CLIP)[0] * weights[:, None]).sum()
    assert loss.item() == 0.0
    assert torch.autograd.grad(loss, new)[0].eq(0).all()


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="'mean'"):
        weights_of([1], "mean")


def one_value(value, old, return_, clip_eps_val):
    values = torch.tensor([[value]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = value_loss(values, torch.tensor([[old]]), torch.tensor([[return_]]), mask, clip_eps_val)
    return loss.item(), torch.autograd.grad(loss.sum(), values)[0].item()


def test_value_loss_takes_the_larger_error():
    assert one_value(1.0, 0.0, 1.0, 0.2) == pytest.approx((0.32, 0.0))
    assert one_value(0.1, 0.0, 1.0, 0.2) == pytest.approx((0.405, -0.9))
    assert one_value(-1.0, 0.0, 1.0, 0.2) == pytest.approx((2.0, -2.0))
    assert one_value(1.0, 0.0, 1.0, 5.0) == pytest.approx((0.0, 0.0))


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_junk_outside_the_mask_does_not_reach_the_value_loss(junk):
    values, old, returns, _, mask = batch()
    dirty = [torch.where(mask, x, junk) for x in (values, old, returns)]
    values, dirty_values = values.requires_grad_(), dirty[0].requires_grad_()
    wanted, got = value_loss(values, old, returns, mask, 0.2), value_loss(*dirty, mask, 0.2)
    assert torch.equal(got, wanted) and got[~mask].eq(0).all()
    got_gradient = torch.autograd.grad(got.sum(), dirty_values)[0]
    assert torch.equal(got_gradient, torch.autograd.grad(wanted.sum(), values)[0])


def test_diagnostics_of_two_rows_by_hand():
    old = torch.zeros(3, 3)
    new = torch.tensor([[2.0, 1.0, 99.0], [0.5, 99.0, 99.0], [99.0, 99.0, 99.0]]).log()
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    clipped = torch.tensor([[True, False, True], [False, True, True], [True, True, True]])
    rows = ratio_diagnostics(new, old, clipped, mask)
    assert rows.ratio_mean.tolist() == pytest.approx([1.5, 0.5, 1.0])
    assert rows.ratio_max.tolist() == pytest.approx([2.0, 0.5, 1.0])
    assert rows.clipped_fraction.tolist() == pytest.approx([0.5, 0.0, 0.0])
    # Mean over tokens of ratio - 1 - log ratio: KL(old || new) from tokens that old sampled.
    wanted = [(2 - 1 - math.log(2)) / 2, 0.5 - 1 - math.log(0.5), 0.0]
    assert rows.kl.tolist() == pytest.approx(wanted)


def test_diagnostics_do_not_move_with_padding_or_with_batch_mates():
    new, old, _, advantages, mask = batch()
    clipped = clipped_ratio_loss(new, old, advantages, mask, CLIP)[1]
    wanted = ratio_diagnostics(new, old, clipped, mask)
    padded = [torch.cat([x, x.new_full((6, 50), fill)], 1) for x, fill in ((new, 9), (old, -9))]
    padded += [torch.cat([x, x.new_zeros(6, 50)], 1) for x in (clipped, mask)]
    for got, row in zip(ratio_diagnostics(*padded), wanted, strict=True):
        torch.testing.assert_close(got, row)
    for b in range(6):
        alone = ratio_diagnostics(
            new[b : b + 1], old[b : b + 1], clipped[b : b + 1], mask[b : b + 1]
        )
        for got, row in zip(alone, wanted, strict=True):
            torch.testing.assert_close(got[0], row[b])
    assert (wanted.kl >= 0).all()
    assert ((wanted.clipped_fraction >= 0) & (wanted.clipped_fraction <= 1)).all()


def test_the_objectives_need_what_their_papers_say():
    assert list(OBJECTIVES) == [
        *("reinforce", "rloo", "ppo", "grpo", "drgrpo", "dapo", "gspo", "cispo", "sapo", "maxrl"),
        *("raft", "online_dpo"),
    ]

    def named(field, value):
        return {name for name, o in OBJECTIVES.items() if getattr(o, field) == value}

    assert named("critic", True) == named("estimator", gae) == {"ppo"}
    assert named("groups", False) == {"reinforce", "ppo"}
    assert named("trust_region", False) == {"reinforce", "rloo", "maxrl"}
    assert named("loss", policy_gradient_loss) == named("trust_region", False) | {"raft"}
    assert named("selects", True) == named("kl_placement", "nowhere") == {"raft", "online_dpo"}
    assert named("pairs", True) == named("loss", pair_loss) == {"online_dpo"}
    assert named("kl_placement", "reward") == {"reinforce", "rloo", "ppo"}
    assert named("aggregation", "token-mean") == {"ppo", "dapo", "cispo", "raft"}
    assert named("aggregation", "constant") == {"drgrpo"}


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("reinforce", 0.625, -0.375),
        ("rloo", 0.714286, -0.428571),
        ("grpo", 1.20738, -0.72443),
        ("drgrpo", 0.625, -0.375),
        ("dapo", 1.20738, -0.72443),
        ("gspo", 1.20738, -0.72443),
        ("cispo", 1.20738, -0.72443),
        ("sapo", 1.20738, -0.72443),
        ("maxrl", 1.666667, -1.0),
    ],
)
def test_each_objective_estimates_its_own_advantage(name, right, wrong):
    rewards = torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0])
    advantages = OBJECTIVES[name].estimator(rewards, torch.zeros(8, dtype=torch.int64))
    assert advantages.tolist() == pytest.approx([right] * 3 + [wrong] * 5, abs=1e-5)


def test_objectives_cannot_be_changed_in_passing():
    assert {field.name for field in fields(Objective)} >= {"loss", "estimator", "aggregation"}
    with pytest.raises(AttributeError):
        OBJECTIVES["grpo"].critic = True
