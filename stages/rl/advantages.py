"""Advantages: how much better a completion (or a token) did than expected, in reward units.

Letters: B completions, T completion tokens, G samples of one prompt (one group).

A reward of NaN means unscorable: the row gets advantage 0 and counts in no mean, deviation or
group size. Rewards that are all equal, up to rounding, give advantages of exactly 0: the test is
on their spread (max - min), because dividing by a tiny deviation turns rounding into a signal.
"""

from typing import Literal

import torch
from torch import Tensor

GRPO_EPS = 1e-4
WHITEN_EPS = 1e-8
# Rounding of a weighted sum of float32 rewards stays below this share of the largest reward.
RELATIVE_SPREAD = 1e-6

Baseline = Literal["mean", "leave-one-out"]
Scale = Literal["std", "mean", "none"]


def group_advantages(
    rewards: Tensor, groups: Tensor, *, baseline: Baseline, scale: Scale
) -> Tensor:
    """(B,), (B,) int -> (B,): each reward against the other samples of its prompt.

    baseline  `mean`: the group's mean, the row included (GRPO, Shao et al. 2024, sec. 4.1.2);
              `leave-one-out`: the mean of the others (RLOO, Ahmadian et al. 2024).
    scale     `std`: divide by the sample deviation (n - 1) plus 1e-4, as TRL does; the GRPO paper
              fixes neither. `none`: Dr. GRPO (Liu et al. 2025), RLOO. `mean`: divide by the
              group's mean reward (MaxRL, Tajwar et al. 2026), for rewards >= 0.

    Rows of a group need not be neighbours. A group with fewer than two usable rewards, or without
    spread, gets 0. Raises ValueError for an infinite reward, for an unknown baseline or scale, and
    for a negative reward under `scale="mean"`, where a negative mean would flip every sign.
    """
    if baseline not in ("mean", "leave-one-out"):
        raise ValueError(f"baseline is {baseline!r}, expected 'mean' or 'leave-one-out'")
    if scale not in ("std", "mean", "none"):
        raise ValueError(f"scale is {scale!r}, expected 'std', 'mean' or 'none'")
    _refuse_infinite(rewards)
    if scale == "mean" and (rewards < 0).any():
        lowest = rewards[rewards < 0].min().item()
        raise ValueError(f"a reward is {lowest:g}, but scale 'mean' (MaxRL) needs rewards >= 0")
    advantages = torch.zeros_like(rewards)
    usable = ~rewards.isnan()
    for rows in rows_of_groups(groups, usable):
        advantages[rows] = _advantages_of_one_group(rewards[rows], baseline, scale)
    return advantages


def best_of_group(rewards: Tensor, groups: Tensor) -> Tensor:
    """(B,), (B,) int -> (B,): 1 for the best completion of each group, NaN for the others.

    RAFT (Dong et al. 2023, best-of-n). NaN means that the row takes no part. Of equal rewards the
    first row is the best, so that a group without spread gives its first row. Raises ValueError
    for an infinite reward.
    """
    _refuse_infinite(rewards)
    picked = torch.full_like(rewards, torch.nan)
    for rows in rows_of_groups(groups, ~rewards.isnan()):
        if len(rows):
            picked[rows[rewards[rows].argmax()]] = 1.0
    return picked


def best_and_worst(rewards: Tensor, groups: Tensor) -> Tensor:
    """(B,), (B,) int -> (B,): 1 and -1 for the best and the worst of a group, else NaN (no part).

    Pairs of online DPO as Online-RLHF (Dong et al. 2024) makes them. Of equal rewards the first
    row is taken. A group without spread, or with fewer than two usable rewards, gives no pair.
    Raises ValueError for an infinite reward.
    """
    _refuse_infinite(rewards)
    picked = torch.full_like(rewards, torch.nan)
    for rows in rows_of_groups(groups, ~rewards.isnan()):
        if has_spread(rewards[rows]):
            picked[rows[rewards[rows].argmax()]] = 1.0
            picked[rows[rewards[rows].argmin()]] = -1.0
    return picked


def _refuse_infinite(rewards: Tensor) -> None:
    if rewards.isinf().any():
        raise ValueError("a reward is infinite, expected finite rewards, or NaN for unscorable")


def rows_of_groups(groups: Tensor, usable: Tensor) -> list[Tensor]:
    """(B,) int, (B,) bool -> the usable row numbers of each group, in order of group and row.

    A group without a usable row gives an empty tensor.
    """
    order = groups.argsort(stable=True)
    sizes = groups.unique(return_counts=True)[1].tolist()
    return [rows[usable[rows]] for rows in order.split(sizes)]


def _advantages_of_one_group(rewards: Tensor, baseline: Baseline, scale: Scale) -> Tensor:
    if not has_spread(rewards):
        return torch.zeros_like(rewards)
    size = len(rewards)
    centered = rewards - rewards.mean()
    if baseline == "leave-one-out":
        # r - (sum - r) / (n - 1) is (r - mean) * n / (n - 1).
        centered = centered * (size / (size - 1))
    if scale == "std":
        return centered / (rewards.std() + GRPO_EPS)
    if scale == "mean":
        return centered / rewards.mean()
    return centered


def batch_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """(B,), (B,) int -> (B,): reward minus the mean of all usable rewards (REINFORCE).

    Williams 1992 allows any baseline; this one lowers the variance and needs neither critic nor
    groups, so that one sample per prompt will do. The row counts in its own baseline, which scales
    the gradient by 1 - 1/B and changes no sign. `groups` is not looked at: it is there so that all
    estimators without a critic are called alike. One usable row, or no spread, gives 0.
    """
    return group_advantages(rewards, torch.zeros_like(groups), baseline="mean", scale="none")


def gae(
    rewards: Tensor, values: Tensor, action_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(B, T) x3 -> (B, T), (B, T): advantages and returns (Schulman et al. 2016, eq. 16).

        delta[t] = rewards[t] + gamma * values[t+1] - values[t]
        advantages[t] = delta[t] + gamma * lam * advantages[t+1]
        returns[t] = advantages[t] + values[t]

    t+1 is the next action token: places without an action in between (a tool's tokens) are passed
    over, undiscounted. After the last one both value and advantage are 0, also where the answer
    was cut off at the length cap: it is treated as finished, because what it would have become
    earns no reward here. Places outside `action_mask` give 0 and may hold anything, NaN included.
    """
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        action = action_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(action, values[:, t], next_value)
        next_advantage = torch.where(action, advantage, next_advantage)
        advantages[:, t] = torch.where(action, advantage, 0.0)
    return advantages, torch.where(action_mask, advantages + values, 0.0)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(B, T), (B, T) bool -> (B, T): mean 0 and variance 1 over the masked-in places, 0 elsewhere.

    Sample variance (n - 1) with 1e-8 inside the root, as in TRL and verl; not in the PPO paper.
    Fewer than two valid places: those are left as they are. No spread: exactly 0.
    """
    valid = x[mask]
    if len(valid) < 2:
        return torch.where(mask, x, 0.0)
    if not has_spread(valid):
        return torch.zeros_like(x)
    whitened = (x - valid.mean()) * torch.rsqrt(valid.var() + WHITEN_EPS)
    return torch.where(mask, whitened, 0.0)


def shape_sequence_rewards(rewards: Tensor, kl: Tensor, action_mask: Tensor, beta: float) -> Tensor:
    """(B,), (B, T), (B, T) -> (B,): rewards - beta * sum over action tokens of `kl`.

    Ahmadian et al. 2024: the penalty is the log-ratio of the whole sequence, a sum and not
    a mean, so longer completions can pay more. `kl` is `kl_estimate` of the policy that sampled
    against the reference. An unscorable row (NaN) stays NaN.
    """
    return rewards - beta * torch.where(action_mask, kl, 0.0).sum(1)


def shape_token_rewards(rewards: Tensor, kl: Tensor, action_mask: Tensor, beta: float) -> Tensor:
    """(B,), (B, T), (B, T) -> (B, T): -beta * `kl` on each action token, the reward on the last.

    Ouyang et al. 2022 (InstructGPT), eq. 2, per token as its PPO code does. 0 outside
    `action_mask`; the last action token is found from the mask, so padding and holes never get the
    score. A row without action tokens is all 0: leave unscorable rows (NaN) out through the mask.
    """
    places = torch.arange(action_mask.shape[1], device=action_mask.device)
    last = torch.where(action_mask, places, -1).amax(1, keepdim=True)
    score = torch.where(places == last, rewards[:, None], 0.0)
    return torch.where(action_mask, score - beta * kl, 0.0)


def has_spread(x: Tensor) -> bool:
    """(N,) -> whether the values differ by more than rounding; False for fewer than two."""
    if len(x) < 2:
        return False
    largest = max(1.0, x.abs().max().item())
    return (x.max() - x.min()).item() > RELATIVE_SPREAD * largest
