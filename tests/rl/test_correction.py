"""Factors for samples of another engine, by hand."""

import math

import pytest
import torch

from stages.rl.correction import correction_figures, factors, gap_of

LOG2, LOG3 = math.log(2), math.log(3)
GAPS = [torch.tensor([LOG2, -LOG2, LOG3]), torch.tensor([-LOG3])]


def lists(parts) -> list[list[float]]:
    return [part.tolist() for part in parts]


def near(parts) -> list:
    return [pytest.approx(part, rel=1e-6) for part in parts]


def test_a_gap_is_what_the_policy_says_less_what_the_sampler_said():
    row = {"log_probs_old": [-1.0, -2.0], "log_probs_sampler": [-1.5, -1.25]}
    assert gap_of(row).tolist() == [0.5, -0.75]
    assert gap_of(row | {"log_probs_sampler": None}) is None


@pytest.mark.parametrize(
    "correction, cap, wanted",
    [
        ("token", 10.0, [[2.0, 0.5, 3.0], [1 / 3]]),
        ("token", 2.5, [[2.0, 0.5, 2.5], [1 / 3]]),
        ("sequence", 10.0, [[3.0, 3.0, 3.0], [1 / 3]]),
        ("sequence", 2.5, [[2.5, 2.5, 2.5], [1 / 3]]),
    ],
)
def test_a_factor_is_old_over_sampler_cut_at_the_cap(correction, cap, wanted):
    assert lists(factors(GAPS, correction, cap)) == near(wanted)


def test_without_a_correction_there_are_no_factors():
    assert factors(GAPS, "none", 2.0) is None


def test_an_engine_that_says_the_same_gives_factors_of_one():
    for correction in ("token", "sequence"):
        assert lists(factors([torch.zeros(3)], correction, 1.0)) == [[1.0, 1.0, 1.0]]


def test_a_factor_does_not_overflow_however_far_the_engine_is_off():
    far = [torch.tensor([500.0, 500.0])]
    assert lists(factors(far, "sequence", 2.0)) == near([[2.0, 2.0]])
    figures = correction_figures(far, torch.tensor([True]), "sequence", 2.0)
    assert all(map(math.isfinite, figures.values()))


@pytest.mark.parametrize(
    "correction, ratios",
    [
        ("token", [2.0, 0.5, 3.0, 1 / 3]),
        ("none", [2.0, 0.5, 3.0, 1 / 3]),
        ("sequence", [3.0, 3.0, 3.0, 1 / 3]),
    ],
)
def test_figures_are_of_the_ratios_before_the_cut_over_the_rows_that_count(correction, ratios):
    gaps, used = [*GAPS, torch.tensor([9.0])], torch.tensor([True, True, False])
    assert correction_figures(gaps, used, correction, 2.5) == pytest.approx(
        {
            "sampler_ratio_mean": sum(ratios) / 4,
            "sampler_ratio_max": 3.0,
            "sampler_ratio_cut": sum(ratio > 2.5 for ratio in ratios) / 4,
        }
    )
