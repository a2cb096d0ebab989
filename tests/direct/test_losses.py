"""Direct alignment losses against peers' numbers, hand arithmetic and each other."""

import json
import math

import pytest
import torch

from stages.direct.losses import (
    LOSSES,
    LossKnobs,
    PairLogProbs,
    implicit_rewards,
    negative_log_likelihood,
)
from tests.helpers.shared import SHARED

VECTORS = SHARED / "vectors" / "direct.json"
NAMES = {
    ("dpo", "reduce=sum"): "dpo",
    ("cdpo", "noise=smoothed"): "dpo",
    ("robust_dpo", "noise=unbiased"): "dpo",
    ("offset_dpo", "offset=margin"): "dpo",
    ("rpo", "nll=row-mean"): "dpo",
    ("dpo_norm", "reduce=token-mean"): "dpo_norm",
    ("ipo", "reduce=token-mean"): "ipo",
    ("ipo", "reduce=sum"): "ipo_sum",
    ("hinge", "margin=1"): "hinge",
    ("apo_zero", "constant=0"): "apo_zero",
    ("apo_down", "constant=0"): "apo_down",
    ("simpo", "gamma=absolute"): "simpo",
    ("orpo", "nll=row-mean"): "orpo",
}


def cases() -> list:
    if not VECTORS.is_file():
        return []
    found = []
    for case in json.loads(VECTORS.read_text()):
        kind, _, name = case["kind"].partition(".")
        loss = NAMES.get((name, case["convention"]["name"]))
        if kind == "preference_loss" and loss:
            found.append(pytest.param(case, loss, id=case["id"]))
    return found


def knobs_of(inputs: dict, robust: bool) -> LossKnobs:
    return LossKnobs(
        beta=inputs["beta"],
        label_smoothing=inputs.get("label_smoothing", 0.0),
        label_noise="robust" if robust else "conservative",
        margin_weight=1.0 if "margin" in inputs else 0.0,
        dpop_weight=0.0,
        gamma=inputs.get("gamma", 0.0),
    )


def summed(inputs: dict, side: str, dtype) -> tuple:
    """Leaf of log-probs per token, their masked sum, the reference's, the number of tokens."""
    mask = torch.tensor(inputs[f"{side}_mask"], dtype=torch.bool)
    leaf = torch.tensor(inputs[f"{side}_logp"], dtype=dtype, requires_grad=True)
    total = torch.where(mask, leaf, 0.0).sum(1)
    reference = None
    if f"ref_{side}_logp" in inputs:
        values = torch.tensor(inputs[f"ref_{side}_logp"], dtype=dtype)
        reference = torch.where(mask, values, 0.0).sum(1)
    return leaf, total, reference, mask.sum(1).clamp(min=1)


@pytest.mark.skipif(not VECTORS.is_file(), reason="no vectors beside the checkout")
def test_every_case_whose_convention_is_ours_is_there():
    assert len(cases()) >= 35
    assert {loss for case in cases() for loss in [case.values[1]]} == set(LOSSES) - {"sft"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("case", "loss"), cases())
def test_losses_gradients_and_rewards_are_the_peers(case, loss, dtype):
    inputs, expected = case["inputs"], case["expected"]
    tolerance = case["tolerance"][str(dtype).removeprefix("torch.")]
    chosen_leaf, chosen, chosen_ref, nc = summed(inputs, "chosen", dtype)
    rejected_leaf, rejected, rejected_ref, nr = summed(inputs, "rejected", dtype)
    margin = torch.tensor(inputs.get("margin", [0.0] * len(chosen)), dtype=dtype)
    pairs = PairLogProbs(chosen, rejected, chosen_ref, rejected_ref, nc, nr, margin)
    knobs = knobs_of(inputs, case["kind"].endswith("robust_dpo"))
    losses = LOSSES[loss].per_pair(pairs, knobs)
    if "alpha" in inputs:
        losses = losses + inputs["alpha"] * negative_log_likelihood(pairs)
    losses.mean().backward()

    def close(found, wanted):
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=dtype), **tolerance)

    close(losses.detach(), expected["losses"])
    close(chosen_leaf.grad, expected["grad_chosen_logp"])
    close(rejected_leaf.grad, expected["grad_rejected_logp"])
    better, worse = implicit_rewards(pairs, LOSSES[loss], knobs.beta)
    close(better.detach(), expected["chosen_rewards"])
    close(worse.detach(), expected["rejected_rewards"])


@pytest.mark.skipif(not VECTORS.is_file(), reason="no vectors beside the checkout")
def test_shares_of_unlike_micro_batches_of_pairs_are_the_peers():
    (case,) = [c for c in json.loads(VECTORS.read_text()) if c["kind"] == "pair_accumulation"]
    inputs, expected, dtype = case["inputs"], case["expected"], torch.float64
    for split, wanted in expected["splits"].items():
        chosen_leaf, chosen, chosen_ref, nc = summed(inputs, "chosen", dtype)
        rejected_leaf, rejected, rejected_ref, nr = summed(inputs, "rejected", dtype)
        columns = [chosen, rejected, chosen_ref, rejected_ref, nc, nr, torch.zeros(4, dtype=dtype)]
        sizes = [int(size) for size in split.split("+")]
        shares = [
            LOSSES["dpo"].per_pair(PairLogProbs(*part), knobs_of(inputs, False)).sum() / 4
            for part in zip(*(column.split(sizes) for column in columns), strict=True)
        ]
        sum(shares).backward()
        assert [share.item() for share in shares] == pytest.approx(wanted["micro_share"])
        assert sum(shares).item() == pytest.approx(expected["loss"])
        for leaf, side in ((chosen_leaf, "chosen"), (rejected_leaf, "rejected")):
            gradient = torch.tensor(expected[f"grad_{side}_logp"], dtype=dtype)
            torch.testing.assert_close(leaf.grad, gradient, **case["tolerance"]["float64"])


def one_pair(c, r, c0=-2.0, r0=-3.0, nc=2, nr=4, margin=0.0) -> PairLogProbs:
    values = [torch.tensor([float(x)], dtype=torch.float64) for x in (c, r, c0, r0, nc, nr, margin)]
    return PairLogProbs(*values)


KNOBS = LossKnobs(0.5, 0.0, "conservative", 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("dpo", math.log(2)),
        ("dpo_norm", math.log(2)),
        ("hinge", 1.0),
        ("ipo", 1.0),
        ("ipo_sum", 1.0),
    ]
    + [("apo_zero", 0.0), ("apo_down", 0.0)],
)
def test_a_policy_that_is_its_reference_has_the_loss_of_the_textbook(loss, expected):
    found = LOSSES[loss].per_pair(one_pair(-2.0, -3.0), KNOBS)
    assert found.item() == pytest.approx(expected, abs=1e-12)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def odds(x: float) -> float:
    return math.exp(x) / (1 - math.exp(x))


BY_HAND = {  # lc = -1, lr = -1.5; means -0.5 and -0.375, of log-probs -1.5 and -1.125; beta 0.5
    "dpo": softplus(-0.25),
    "dpo_norm": softplus(0.0625),
    "ipo": 1.125**2,
    "ipo_sum": 0.25,
    "hinge": 0.75,
    "apo_zero": sigmoid(-0.75) - sigmoid(-0.5),
    "apo_down": sigmoid(-0.5) - sigmoid(0.25),
    "simpo": softplus(0.1875 + 0.25),
    "orpo": 1.5 + 0.5 * softplus(math.log(odds(-1.125)) - math.log(odds(-1.5))),
    "sft": 1.5,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_policy_away_from_its_reference_has_the_loss_of_hand_arithmetic(loss):
    knobs = LossKnobs(0.5, 0.0, "conservative", 0.0, 0.0, 0.25)
    found = LOSSES[loss].per_pair(one_pair(-3.0, -4.5), knobs)
    assert found.item() == pytest.approx(BY_HAND[loss], abs=1e-12)


@pytest.mark.parametrize("loss", ["dpo", "dpo_norm"])
def test_margins_and_wrong_labels_by_hand(loss):
    """A margin of 0.3 at weight 2 takes 0.6 off the logit z; a fifth of the labels is wrong."""
    pairs, z = one_pair(-3.0, -4.5, margin=0.3), {"dpo": 0.25, "dpo_norm": -0.0625}[loss] - 0.6
    right, wrong = softplus(-z), softplus(z)
    for noise, expected in (
        ("conservative", 0.8 * right + 0.2 * wrong),
        ("robust", (0.8 * right - 0.2 * wrong) / 0.6),
    ):
        found = LOSSES[loss].per_pair(pairs, LossKnobs(0.5, 0.2, noise, 2.0, 0.0, 0.0))
        assert found.item() == pytest.approx(expected, abs=1e-12)


def test_dpop_takes_off_what_the_chosen_answer_lost():
    """c fell by 1, r by 3: beta * (2 - 4 * 1) = -1 inside the sigmoid."""
    knobs = LossKnobs(0.5, 0.0, "conservative", 0.0, 4.0, 0.0)
    found = LOSSES["dpo"].per_pair(one_pair(-3.0, -6.0), knobs)
    assert found.item() == pytest.approx(math.log(1 + math.exp(1)), abs=1e-12)
    rose = LOSSES["dpo"].per_pair(one_pair(-1.0, -6.0), knobs)
    assert rose.item() == pytest.approx(math.log(1 + math.exp(-2)), abs=1e-12)


def test_sft_is_the_mean_log_prob_of_the_chosen_answer_alone():
    pairs = one_pair(-3.0, -6.0, nc=4)
    assert LOSSES["sft"].per_pair(pairs, KNOBS).item() == 0.75
    assert LOSSES["sft"].per_pair(one_pair(-3.0, -1.0, nc=4), KNOBS).item() == 0.75


def test_on_pairs_kto_with_its_reference_point_at_0_is_apo_zero():
    """KTO (Ethayarajh et al. 2024, eq. 8) has one row a side: 1 - sigmoid(beta (l - K)), and the
    rejected one 1 - sigmoid(beta (K - l)).
    """
    pairs, knobs = one_pair(-3.0, -4.0), KNOBS
    lc, lr = -3.0 - -2.0, -4.0 - -3.0
    rows = [1 - 1 / (1 + math.exp(-0.5 * lc)), 1 - 1 / (1 + math.exp(0.5 * lr))]
    found = LOSSES["apo_zero"].per_pair(pairs, knobs).item()
    assert found == pytest.approx(sum(rows) - 1, abs=1e-12)


@pytest.mark.parametrize("x", [-1e-9, -1e-4, -0.69, -0.7, -30.0, 0.0])
def test_orpo_is_finite_and_has_a_finite_gradient_up_to_certainty(x):
    leaf = torch.tensor([x], requires_grad=True)
    ones = torch.ones(1)
    pairs = PairLogProbs(leaf, torch.tensor([-1.0]), None, None, ones, ones, 0 * ones)
    loss = LOSSES["orpo"].per_pair(pairs, KNOBS)
    loss.sum().backward()
    assert loss.isfinite().all() and leaf.grad.isfinite().all()


def test_losses_without_a_reference_do_not_look_at_one():
    bare = PairLogProbs(
        *[torch.tensor([-2.0]), torch.tensor([-3.0]), None, None],
        *[torch.tensor([2.0]), torch.tensor([3.0]), torch.zeros(1)],
    )
    for loss in LOSSES.values():
        if not loss.reference:
            assert loss.per_pair(bare, KNOBS).isfinite().all()
