"""What a frozen buffer asks of the policy: shaped rewards, advantages and returns.

Letters: N completions of the buffer, T completion tokens. Measurements come from the buffer's
columns, choices from the settings of the round; no model is needed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.rl.advantages import (
    rows_of_groups,
    shape_sequence_rewards,
    shape_token_rewards,
    whiten,
)
from stages.rl.correction import Correction, factors, gap_of
from stages.rl.kl import kl_estimate
from stages.rl.objectives import Clip, Objective


@dataclass(frozen=True)
class Settings:
    """Plain values of one round; the names are those of params.yaml."""

    objective: Objective
    aggregation: str
    kl_placement: str
    clip: Clip
    clip_eps_val: float
    gamma: float
    lam: float
    beta: float
    skip_wrong_groups: bool
    kl_estimator: str
    sampler_correction: Correction
    sampler_correction_cap: float
    temperature: float
    max_new_tokens: int
    ppo_epochs: int
    target_kl: float | None
    train_batch_size: int
    batch_acc: int
    train_max_tokens: int | None
    lr: float
    lr_critic: float
    warmup_steps: int
    decay_steps: int | None
    max_norm: float
    nonfinite: str
    seed: int
    round_number: int


@dataclass(frozen=True)
class Targets:
    """What a buffer asks of the policy, one entry a completion.

    advantages  (T,) each: per token for PPO, else one value repeated
    returns     (T,) each, what the critic learns; None without one
    values_old  (T,) each, as the buffer has them; None without a critic
    rewards     (N,) shaped reward of the whole completion (NaN: unscorable)
    used        (N,) False for completions that are unscorable, or that the objective leaves out:
                they have advantages of 0 and count in no divisor
    groups      (N,) which prompt a completion answers
    lengths     (N,) tokens of each completion
    gaps        (T,) each, log old - log sampler; None where our own sampler drew the rows
    factors     (T,) each, what a token's loss is multiplied by for that; None: nothing
    """

    advantages: list[Tensor]
    returns: list[Tensor] | None
    values_old: list[Tensor] | None
    rewards: Tensor
    used: Tensor
    groups: Tensor
    lengths: Tensor
    gaps: list[Tensor] | None = None
    factors: list[Tensor] | None = None

    @property
    def scorable(self) -> Tensor:
        """(N,) bool: the completion has a reward."""
        return ~self.rewards.isnan()

    def units(self, pairs: bool) -> dict[int, list[int]]:
        """First row -> rows that belong together: those of a pair, or each used row by itself."""
        found = [[row] for row in self.used.nonzero()[:, 0].tolist()]
        if pairs:
            found = [rows.tolist() for rows in rows_of_groups(self.groups, self.used) if len(rows)]
        return {rows[0]: rows for rows in found}


def make_targets(rows: Iterable[dict], settings: Settings) -> Targets:
    """Rewards, KL shaping and advantages of a whole buffer, from its columns alone, in one pass.

    An estimator compares completions, so it sees all N, but only numbers: no ids and no text are
    kept.
    """
    beta = settings.beta if settings.kl_placement == "reward" else 0.0
    critic = settings.objective.critic
    rewards, groups, kl, values, gaps, right = [], [], [], [], [], []
    for row in rows:
        rewards.append(torch.nan if row["reward"] is None else row["reward"])
        groups.append(row["group"])
        kl.append(_kl_of(row, beta, settings.kl_estimator))
        values.append(torch.tensor(row["values_old"]) if critic else None)
        gaps.append(gap_of(row))
        right.append(settings.skip_wrong_groups and (row["reward_correctness"] or 0.0) >= 1)
    rewards, groups = torch.tensor(rewards), torch.tensor(groups)  # (N,)
    lengths, used = torch.tensor([len(x) for x in kl]), ~rewards.isnan()
    mask = torch.arange(int(lengths.max())) < lengths[:, None]  # (N, T)
    shaped = shape_sequence_rewards(rewards, stack(kl, mask), mask, beta)
    sampler = {}
    if gaps[0] is not None:
        # Of chosen completions no mean over the policy is taken, so there is nothing to weigh.
        correction = "none" if settings.objective.selects else settings.sampler_correction
        how = (correction, settings.sampler_correction_cap)
        sampler = {"gaps": gaps, "factors": factors(gaps, *how)}
    if not critic:
        compared = shaped
        if settings.objective.selects and settings.skip_wrong_groups:
            compared = _without_wrong_groups(shaped, groups, torch.tensor(right))
        advantages = settings.objective.estimator(compared, groups)  # (N,)
        used = used & ~advantages.isnan()
        advantages = torch.where(used, advantages, 0.0)[:, None].expand(mask.shape)
        advantages = cut(advantages, lengths)
        return Targets(advantages, None, None, shaped, used, groups, lengths, **sampler)
    scored = mask & used[:, None]
    token_rewards = shape_token_rewards(rewards, stack(kl, mask), scored, beta)
    advantages, returns = settings.objective.estimator(
        token_rewards, stack(values, mask), scored, settings.gamma, settings.lam
    )
    advantages, returns = cut(whiten(advantages, scored), lengths), cut(returns, lengths)
    return Targets(advantages, returns, values, shaped, used, groups, lengths, **sampler)


def _without_wrong_groups(rewards: Tensor, groups: Tensor, right: Tensor) -> Tensor:
    """(N,), (N,), (N,) bool -> (N,): the rewards, NaN in groups without a right answer."""
    return torch.where(torch.isin(groups, groups[right]), rewards, torch.nan)


def _kl_of(row: dict, beta: float, estimator: str) -> Tensor:
    """(T,): the KL that the reward pays for each token; 0 where it pays none."""
    old = torch.tensor(row["log_probs_old"])
    if not beta > 0:
        return torch.zeros(len(old))
    return kl_estimate(old, torch.tensor(row["log_probs_ref"]), estimator)


def cut(padded: Tensor, lengths: Tensor) -> list[Tensor]:
    """(N, T), (N,) -> N tensors of true length."""
    return [padded[i, :length] for i, length in enumerate(lengths.tolist())]


def stack(parts: Sequence[Tensor], mask: Tensor) -> Tensor:
    """N tensors of true length, mask (N, T) -> (N, T) float32 on the mask's device, padded by 0."""
    padded = torch.zeros(mask.shape)
    for i, part in enumerate(parts):
        padded[i, : len(part)] = part
    return padded.to(mask.device)
