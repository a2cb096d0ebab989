"""Per-token estimates of KL(policy || reference), in nats, from tokens that the policy sampled.

Letters: B sequences, T completion tokens.

Source: Schulman, "Approximating KL divergence" (2020), with ratio = reference / policy and
x = log policy - log reference:

    k1 = x                 unbiased, any sign
    k2 = x^2 / 2           biased, never negative
    k3 = exp(-x) - 1 + x   unbiased, never negative

None is clamped: a token far from the reference shows as such.

An estimator of the KL need not estimate its gradient; which one does depends on its place
(`FITTING`). In the reward, times grad log policy, k1 has the gradient of KL(policy || reference),
the one that the objective asks for. There the first order of k3 cancels (what is left is
grad KL(policy || reference) - grad KL(reference || policy)) and k2 has a square for a slope: both
let the policy leave the reference at will. As a differentiable loss k1 has an expected gradient of
0, k2 that of KL(policy || reference), and k3 that of KL(reference || policy), which is the same
close to the reference.
"""

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

# Place of the penalty -> the estimators whose expected gradient is that of a KL, the default first.
# Nowhere: the KL is only measured, and each estimates it.
FITTING: dict[str, tuple[Estimator, ...]] = {
    "reward": ("k1",),
    "loss": ("k3", "k2"),
    "nowhere": ("k3", "k2", "k1"),
}


def kl_estimate(log_probs: Tensor, log_probs_ref: Tensor, estimator: Estimator) -> Tensor:
    """(...), (...) -> (...): KL estimate per token, exactly 0 where the two are equal.

    Swap the arguments and it estimates the other direction: KL(old || policy) over tokens that
    `old` sampled is `kl_estimate(log_probs_old, log_probs, ...)`. Raises ValueError for an
    unknown estimator.
    """
    x = log_probs - log_probs_ref
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    if estimator == "k3":
        return torch.expm1(-x) + x
    raise ValueError(f"KL estimator is {estimator!r}, expected 'k1', 'k2' or 'k3'")


def kl_penalty(
    log_probs: Tensor, log_probs_ref: Tensor, action_mask: Tensor, estimator: Estimator
) -> Tensor:
    """(B, T) x3 -> (B, T): `kl_estimate` on action tokens, 0 elsewhere, whatever stands there.

    Selected before the estimate, so that neither the value nor the gradient of junk leaks.
    """
    return kl_estimate(
        torch.where(action_mask, log_probs, 0.0),
        torch.where(action_mask, log_probs_ref, 0.0),
        estimator,
    )
