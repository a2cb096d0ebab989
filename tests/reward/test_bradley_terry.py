import math

import pytest
import torch

from stages.reward.bradley_terry import (
    bradley_terry_loss,
    calibration,
    calibration_error,
    gap_histogram,
    preference_accuracy,
    tie_share,
)

CHOSEN, REJECTED = torch.tensor([2.0]), torch.tensor([0.5])


def loss(margin, centering):
    margin = None if margin is None else torch.tensor([margin])
    return bradley_terry_loss(CHOSEN, REJECTED, margin, centering).item()


def test_scores_2_and_a_half_with_and_without_a_margin():
    assert loss(1.0, 0.0) == pytest.approx(0.474077, abs=1e-6)
    assert loss(None, 0.0) == pytest.approx(0.201413, abs=1e-6)
    assert loss(0.0, 0.0) == loss(None, 0.0)


def test_centring_is_on_the_squared_sum():
    assert loss(None, 0.01) - loss(None, 0.0) == pytest.approx(0.0625, abs=1e-6)
    assert loss(1.0, 0.01) == pytest.approx(0.474077 + 0.0625, abs=1e-6)


def test_rows_with_and_without_a_margin_stand_in_one_batch():
    got = bradley_terry_loss(
        CHOSEN.expand(2), REJECTED.expand(2), torch.tensor([1.0, 0.0]), centering=0.0
    )
    assert got.tolist() == pytest.approx([0.474077, 0.201413], abs=1e-6)


def test_scores_far_apart_stay_finite():
    got = bradley_terry_loss(
        torch.tensor([1e4, -1e4]), torch.tensor([-1e4, 1e4]), None, centering=0.0
    )
    assert got.tolist() == [0.0, 2e4]


def test_gradients_in_float64():
    scores = torch.randn(2, 4, dtype=torch.float64).requires_grad_()
    margin = torch.rand(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s: bradley_terry_loss(s[0], s[1], margin, 0.01), scores)


def test_a_tie_is_a_miss_and_counted_apart():
    chosen, rejected = torch.tensor([1.0, 0.5, 0.0, 2.0]), torch.tensor([0.0, 0.5, 1.0, 1.0])
    assert preference_accuracy(chosen, rejected) == 0.5
    assert tie_share(chosen, rejected) == 0.25


def test_calibration_of_confidence_that_comes_true():
    # Gap log 3 is a confidence of 0.75: right three times out of four.
    gap = math.log(3) * torch.tensor([1.0, 1.0, 1.0, -1.0])
    assert calibration_error(gap, torch.zeros(4)) == pytest.approx(0.0, abs=1e-6)
    assert calibration_error(gap.abs(), torch.zeros(4)) == pytest.approx(0.25, abs=1e-6)
    assert calibration_error(-gap.abs(), torch.zeros(4)) == pytest.approx(0.75, abs=1e-6)


def test_calibration_weighs_each_bin_by_its_pairs():
    # Two pairs at 0.75, both right (0.25 too shy), and two at near certainty, both right (0).
    gap = torch.tensor([math.log(3), math.log(3), 50.0, 50.0])
    assert calibration_error(gap, torch.zeros(4)) == pytest.approx(0.125, abs=1e-6)


def test_ties_are_calibrated_guesses():
    assert calibration_error(torch.ones(3), torch.ones(3)) == 0.0


def test_no_pairs_give_zeros():
    nothing = torch.zeros(0)
    assert preference_accuracy(nothing, nothing) == tie_share(nothing, nothing) == 0.0
    assert calibration_error(nothing, nothing) == 0.0


def test_the_bins_of_the_calibration_error_are_what_it_is_made_of():
    # Gaps of log 3 (confidence 0.75, bin 5 of 10): three right of four; a tie at 0.5, half right.
    gap = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.0]) * math.log(3)
    found = calibration(gap, torch.zeros(5))
    assert found["confidence"] == pytest.approx([0.5, 0.75])
    assert found["accuracy"] == [0.5, 0.75]
    assert found["pairs"] == [1, 4]
    gap = torch.randn(500, generator=torch.Generator().manual_seed(0))
    found, error = calibration(gap, torch.zeros(500)), 0.0
    for confidence, accuracy, pairs in zip(*found.values(), strict=True):
        error += abs(accuracy - confidence) * pairs / 500
    assert error == pytest.approx(calibration_error(gap, torch.zeros(500)), abs=1e-6)


def test_gaps_are_counted_in_equal_parts_around_0():
    found = gap_histogram(torch.tensor([-1.0, -0.75, 0.25, 2.0]), torch.zeros(4), bins=4)
    assert found == {"edges": [-2.0, -1.0, 0.0, 1.0, 2.0], "pairs": [0, 2, 1, 1]}
    odd = gap_histogram(torch.tensor([6.266602993]), torch.zeros(1), bins=20)
    assert odd["edges"][10] == 0.0 and odd["pairs"][-1] == 1
    for nothing in (torch.ones(3), torch.zeros(0)):
        assert gap_histogram(nothing, nothing) == {"edges": [0.0], "pairs": []}
