import math

import pytest
import torch

from stages.rl.kl import kl_estimate, kl_penalty

POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
# Sum of p log(p / q) by hand: of the policy against the reference, and the other way.
KL = 0.5 * math.log(2.5) + 0.3 * math.log(1.5) + 0.2 * math.log(1 / 3)
KL_OTHER_WAY = 0.2 * math.log(0.4) + 0.2 * math.log(2 / 3) + 0.6 * math.log(3)


@pytest.mark.parametrize("estimator, wanted", [("k1", 1.0), ("k2", 0.5), ("k3", 0.367879)])
def test_policy_at_minus_1_and_reference_at_minus_2(estimator, wanted):
    kl = kl_estimate(torch.tensor([-1.0]), torch.tensor([-2.0]), estimator)
    assert kl.item() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expectation_under_the_policy_is_the_exact_kl_of_a_small_categorical(estimator):
    assert KL_OTHER_WAY - KL > 0.03
    kl = kl_estimate(POLICY.log(), REFERENCE.log(), estimator)
    assert (POLICY * kl).sum().item() == pytest.approx(KL, abs=1e-12)
    swapped = kl_estimate(REFERENCE.log(), POLICY.log(), estimator)
    assert (REFERENCE * swapped).sum().item() == pytest.approx(KL_OTHER_WAY, abs=1e-12)


def test_k3_as_a_loss_has_the_exact_kls_gradient_sign_and_k1_has_none():
    logits = POLICY.log().requires_grad_()

    def expected_gradient(estimator):
        log_probs = logits.log_softmax(-1)
        weight = log_probs.exp().detach()
        loss = (weight * kl_estimate(log_probs, REFERENCE.log(), estimator)).sum()
        return torch.autograd.grad(loss, logits)[0]

    exact = (logits.log_softmax(-1).exp() * (logits.log_softmax(-1) - REFERENCE.log())).sum()
    exact = torch.autograd.grad(exact, logits)[0]
    assert expected_gradient("k1").abs().max() < 1e-12
    assert (expected_gradient("k2") - exact).abs().max() < 1e-12
    assert expected_gradient("k3") @ exact > 0


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_k2_and_k3_are_never_negative_and_not_clamped(estimator, dtype):
    x = torch.logspace(-12, 1.5, 10_000, dtype=dtype)
    x = torch.cat([x, -x])
    kl = kl_estimate(x, torch.zeros_like(x), estimator)
    assert (kl >= 0).all()
    assert kl.max() > 100


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_log_probs_give_exactly_0(estimator):
    log_probs = torch.tensor([-0.1, -3.3, -17.7])
    assert kl_estimate(log_probs, log_probs.clone(), estimator).tolist() == [0.0, 0.0, 0.0]


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(POLICY, POLICY, "k4")


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_junk_outside_the_mask_changes_neither_penalty_nor_gradient(estimator, junk):
    mask = torch.tensor([[True, False, True], [True, False, False]])
    clean = torch.tensor([[-1.0, 0.0, -2.0], [-0.5, 0.0, 0.0]])
    ref = torch.tensor([[-2.0, 0.0, -1.5], [-0.5, 0.0, 0.0]])
    dirty = torch.where(mask, clean, junk).requires_grad_()
    clean.requires_grad_()
    penalty = kl_penalty(dirty, torch.where(mask, ref, -junk), mask, estimator)
    wanted = kl_penalty(clean, ref, mask, estimator)
    assert torch.equal(penalty, wanted)
    assert penalty[~mask].eq(0).all()
    got_grad = torch.autograd.grad(penalty.sum(), dirty)[0]
    assert torch.equal(got_grad, torch.autograd.grad(wanted.sum(), clean)[0])


def test_gradients_in_float64():
    log_probs = -torch.rand(5, dtype=torch.float64).requires_grad_()
    ref = -torch.rand(5, dtype=torch.float64)
    for estimator in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x, e=estimator: kl_estimate(x, ref, e), log_probs)
