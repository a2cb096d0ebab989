"""Where another engine sampled: how far its distribution is from the policy's, and the correction.

Letters: N completions, T completion tokens. A gap is log old - log sampler of a sampled token, in
nats: old by the one log-prob rule, sampler as the engine that drew the token said.

What an objective averages over tokens of the policy was drawn from another distribution. Importance
sampling weighs each token by old / sampler = exp(gap), cut at a cap so that few tokens cannot
outweigh the others (truncated importance sampling, Ionides 2008; for samples of vLLM: Yao et al.
2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). With `sequence` a
completion has one factor, the product of its tokens', cut likewise.

Departure: there the policy gradient alone is weighed. Here it is the token's whole loss, a KL to
the reference in it too, which is a mean over the same tokens. A critic's loss is not weighed.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Correction = Literal["token", "sequence", "none"]

HIGHEST = 80.0  # nats: exp of more is no float32


def gap_of(row: dict) -> Tensor | None:
    """(T,): the gaps of a buffer's row; None where our own sampler drew it."""
    if row["log_probs_sampler"] is None:
        return None
    return torch.tensor(row["log_probs_old"]) - torch.tensor(row["log_probs_sampler"])


def factors(gaps: Sequence[Tensor], correction: Correction, cap: float) -> list[Tensor] | None:
    """N gaps (T,) -> N factors (T,), constants at most `cap`; None for `none`."""
    if correction == "none":
        return None
    return [logs.clamp(max=math.log(cap)).exp() for logs in _logs(gaps, correction)]


def correction_figures(
    gaps: Sequence[Tensor], used: Tensor, correction: Correction, cap: float
) -> dict[str, float]:
    """N gaps (T,), (N,) -> figures of the factors before the cut, over the rows that are used.

    sampler_ratio_mean  over tokens; near 1 where the engine says what it samples from
    sampler_ratio_max   the largest
    sampler_ratio_cut   share of tokens above the cap
    """
    rows = [gap for gap, counts in zip(gaps, used.tolist(), strict=True) if counts]
    ratios = torch.cat(_logs(rows, correction)).clamp(max=HIGHEST).exp()
    return {
        "sampler_ratio_mean": ratios.mean().item(),
        "sampler_ratio_max": ratios.max().item(),
        "sampler_ratio_cut": (ratios > cap).float().mean().item(),
    }


def _logs(gaps: Sequence[Tensor], correction: Correction) -> list[Tensor]:
    """Log of each token's factor: its own gap, or the sum of its row's."""
    if correction == "sequence":
        return [gap.sum().expand(len(gap)) for gap in gaps]
    return list(gaps)
