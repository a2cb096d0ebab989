import math

import pytest
import torch

from stages.rl.advantages import (
    batch_advantages,
    gae,
    group_advantages,
    shape_sequence_rewards,
    shape_token_rewards,
    whiten,
)

NAN = math.nan
ESTIMATORS = {
    "grpo": {"baseline": "mean", "scale": "std"},
    "drgrpo": {"baseline": "mean", "scale": "none"},
    "rloo": {"baseline": "leave-one-out", "scale": "none"},
    "maxrl": {"baseline": "mean", "scale": "mean"},
}
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)


def advantages_of(rewards, estimator, groups=None):
    groups = torch.tensor(groups or [0] * len(rewards))
    return group_advantages(torch.tensor(rewards), groups, **ESTIMATORS[estimator]).tolist()


@pytest.mark.parametrize(
    "estimator, right, wrong",
    [
        ("grpo", 1.20738, -0.72443),
        ("drgrpo", 0.625, -0.375),
        ("rloo", 0.714286, -0.428571),
        ("maxrl", 0.625 / 0.375, -1.0),
    ],
)
def test_three_right_out_of_eight(estimator, right, wrong):
    rewards = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    wanted = [right] * 3 + [wrong] * 5
    assert advantages_of(rewards, estimator) == pytest.approx(wanted, abs=1e-5)


def test_the_deviation_is_the_samples_not_the_populations():
    got = advantages_of([1.0, 1.0, 0.0, 0.0], "grpo")
    assert got == pytest.approx([0.865875, 0.865875, -0.865875, -0.865875], abs=1e-6)


def test_leave_one_out_is_the_mean_of_the_others():
    rewards = [0.3, -1.2, 2.0, 0.7, 0.1]
    wanted = []
    for i, reward in enumerate(rewards):
        others = [other for j, other in enumerate(rewards) if j != i]
        wanted.append(reward - sum(others) / len(others))
    assert advantages_of(rewards, "rloo") == pytest.approx(wanted, abs=1e-6)


def test_groups_are_found_by_their_number_wherever_their_rows_stand():
    got = advantages_of([1.0, 5.0, 0.0, 9.0], "drgrpo", groups=[7, 3, 7, 3])
    assert got == [0.5, -2.0, -0.5, 2.0]


def test_unscorable_rows_get_0_and_leave_their_siblings_alone():
    assert advantages_of([1.0, 0.0, NAN, NAN], "drgrpo") == [0.5, -0.5, 0.0, 0.0]
    for estimator in ESTIMATORS:
        got = advantages_of([NAN, 1.0, 0.0, NAN, 0.0], estimator)
        usable = advantages_of([1.0, 0.0, 0.0], estimator)
        assert got == [0.0, usable[0], usable[1], 0.0, usable[2]]


@each_estimator
@pytest.mark.parametrize("rewards", [[0.7], [0.7, NAN, NAN, NAN], [NAN, NAN]])
def test_a_group_with_fewer_than_two_usable_rows_gives_0(estimator, rewards):
    got = group_advantages(
        torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), **estimator
    )
    assert got.tolist() == [0.0] * len(rewards)


@each_estimator
@pytest.mark.parametrize("value, size", [(0.1, 7), (0.3, 9), (1.0, 8), (0.0, 4), (123.456, 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_rewards_give_exactly_0(estimator, value, size, dtype):
    rewards = torch.full((size,), value, dtype=dtype)
    got = group_advantages(rewards, torch.zeros(size, dtype=torch.int64), **estimator)
    assert got.dtype == dtype
    assert got.tolist() == [0.0] * size


@each_estimator
def test_rewards_that_differ_by_rounding_alone_give_exactly_0(estimator):
    rewards = torch.full((4,), 7.3)
    rewards[1:3] = torch.nextafter(rewards[1:3], torch.tensor(8.0))
    assert rewards.unique().numel() == 2
    assert group_advantages(rewards, torch.zeros(4, dtype=torch.int64), **estimator).eq(0).all()


@each_estimator
def test_no_rows_give_no_advantages(estimator):
    nothing = group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), **estimator)
    assert nothing.shape == (0,)


def test_what_cannot_be_an_advantage_is_refused():
    two = torch.tensor([0, 0])
    with pytest.raises(ValueError, match="infinite"):
        group_advantages(torch.tensor([math.inf, 1.0]), two, baseline="mean", scale="std")
    with pytest.raises(ValueError, match=r"-0\.5.*rewards >= 0"):
        group_advantages(torch.tensor([-0.5, 1.0]), two, baseline="mean", scale="mean")
    with pytest.raises(ValueError, match="'median'"):
        group_advantages(torch.tensor([0.0, 1.0]), two, baseline="median", scale="std")
    with pytest.raises(ValueError, match="'max'"):
        group_advantages(torch.tensor([0.0, 1.0]), two, baseline="mean", scale="max")


def test_batch_advantages_look_past_groups():
    rewards = torch.tensor([1.0, 0.0, NAN, 0.5])
    assert batch_advantages(rewards, torch.arange(4)).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert batch_advantages(torch.full((9,), 0.3), torch.arange(9)).tolist() == [0.0] * 9


MASK = torch.tensor([[True, True, False]])


def test_gae_stops_at_the_last_action_token():
    rewards, values = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 100.0]])
    advantages, returns = gae(rewards, values, MASK, 1.0, 0.95)
    assert advantages.tolist() == [pytest.approx([0.95, 1.0, 0.0])]
    assert returns.tolist() == [pytest.approx([0.95, 1.0, 0.0])]


def test_gae_of_an_answer_cut_off_at_the_cap_does_not_bootstrap():
    # All places are actions, as in a row that reaches the length cap: no value follows the last.
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5)
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    assert advantages.tolist() == [pytest.approx([0.45125, 0.475, 0.5])]
    assert returns.tolist() == [pytest.approx([0.95125, 0.975, 1.0])]


def test_gae_is_the_discounted_sum_of_deltas():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    lengths, gamma, lam = [5, 3, 1], 0.9, 0.8
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for b, length in enumerate(lengths):
        deltas = [
            rewards[b, t] + (gamma * values[b, t + 1] if t + 1 < length else 0) - values[b, t]
            for t in range(length)
        ]
        for t in range(length):
            wanted = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length))
            assert advantages[b, t].item() == pytest.approx(wanted.item())
            assert returns[b, t].item() == pytest.approx((wanted + values[b, t]).item())


def test_gae_with_lambda_1_returns_the_rewards_to_come():
    mask = torch.ones(1, 4, dtype=torch.bool)
    rewards = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    _, returns = gae(rewards, torch.randn(1, 4), mask, 1.0, 1.0)
    assert returns.tolist() == [pytest.approx([10.0, 9.0, 7.0, 4.0], abs=1e-5)]


def test_gae_passes_over_a_hole_as_if_it_were_not_there():
    holed = torch.tensor([[True, False, False, True, True]])
    rewards = torch.tensor([[0.1, 9.0, NAN, 0.2, 1.0]])
    values = torch.tensor([[0.5, -9.0, math.inf, 0.4, 0.3]])
    dense = torch.ones(1, 3, dtype=torch.bool)
    got = gae(rewards, values, holed, 0.99, 0.9)
    wanted = gae(rewards[holed][None], values[holed][None], dense, 0.99, 0.9)
    for g, w in zip(got, wanted, strict=True):
        assert torch.equal(g[holed], w[0])
        assert g[~holed].eq(0).all()


@pytest.mark.parametrize("junk", [NAN, math.inf, -1e30])
def test_junk_in_padding_does_not_reach_advantages_returns_or_rewards(junk):
    mask = torch.tensor([[True, True, False, False], [True, True, True, False]])
    x = torch.tensor([[0.1, 0.2, 0.0, 0.0], [0.3, -0.4, 0.5, 0.0]])
    dirty = torch.where(mask, x, junk)
    for g, w in zip(gae(dirty, dirty, mask, 1, 0.95), gae(x, x, mask, 1, 0.95), strict=True):
        assert torch.equal(g, w)
    assert torch.equal(whiten(dirty, mask), whiten(x, mask))
    scores = torch.tensor([1.0, 2.0])
    for shape in (shape_sequence_rewards, shape_token_rewards):
        assert torch.equal(shape(scores, dirty, mask, 0.1), shape(scores, x, mask, 0.1))


def test_whitening_uses_valid_places_only():
    x = torch.tensor([[1.0, 2.0, 3.0, 99.0]])
    mask = torch.tensor([[True, True, True, False]])
    assert whiten(x, mask).tolist() == [pytest.approx([-1.0, 0.0, 1.0, 0.0], abs=1e-6)]


def test_whitening_leaves_fewer_than_two_values_as_they_are():
    x = torch.tensor([[5.0, 99.0]])
    assert whiten(x, torch.tensor([[True, False]])).tolist() == [[5.0, 0.0]]
    assert whiten(x, torch.tensor([[False, False]])).tolist() == [[0.0, 0.0]]


def test_whitening_equal_values_gives_exactly_0():
    x = torch.full((3, 3), 0.3)
    assert whiten(x, torch.ones(3, 3, dtype=torch.bool)).eq(0).all()


def test_sequence_reward_pays_the_sum_of_the_kl_not_its_mean():
    kl = torch.tensor([[1.0, 2.0, 99.0], [0.5, 99.0, 99.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    got = shape_sequence_rewards(torch.tensor([1.0, NAN]), kl, mask, 0.1)
    assert got[0].item() == pytest.approx(0.7)
    assert got[1].isnan()


def test_token_reward_puts_the_score_on_the_last_action_token():
    kl = torch.tensor([[1.0, 2.0, 99.0, 99.0], [1.0, 99.0, -3.0, 99.0]])
    mask = torch.tensor([[True, True, False, False], [True, False, True, False]])
    got = shape_token_rewards(torch.tensor([5.0, 7.0]), kl, mask, 0.1)
    assert got[0].tolist() == pytest.approx([-0.1, 4.8, 0.0, 0.0])
    assert got[1].tolist() == pytest.approx([-0.1, 0.0, 7.3, 0.0])


def test_a_row_without_action_tokens_earns_no_token_reward():
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    got = shape_token_rewards(torch.tensor([NAN]), torch.full((1, 3), NAN), nothing, 0.1)
    assert got.tolist() == [[0.0, 0.0, 0.0]]


def test_drifting_from_the_reference_lowers_the_reward_of_the_drifting_token():
    kl = torch.tensor([[0.0, 1.0, 0.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = shape_token_rewards(torch.tensor([0.0]), kl, mask, 0.5)
    assert got.tolist() == [[0.0, -0.5, 0.0]]
