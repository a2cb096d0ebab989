"""The policy objectives: what `loss: grpo` in params.yaml means. Start at `OBJECTIVES`, below.

Letters: B completions, T completion tokens, G samples of one prompt. Log-probs are in nats, ratios
are new / old.

GRPO (Shao et al. 2024), whole, with the function that does each line:

    y_1 .. y_G ~ old(. | x)                           sample       rollouts/engine.py
    r_i = sum_c weight_c * component_c(y_i)           reward       score.py: total_reward
    A_i = (r_i - mean(r)) / (std(r) + 1e-4)           advantage    advantages.py: group_advantages
    rho_it = new(y_it | x, y_i<t) / old(the same)     ratio        clipped_ratio_loss, below
    l_it = -min(rho_it A_i, clip(rho_it, 1 - lo, 1 + hi) A_i)      clipped_ratio_loss
    d_it = log new - log reference                    log-ratio of the token to models/sft
    k_it = exp(-d_it) - 1 + d_it                      KL (k3)      kl.py: kl_penalty
    L = 1/B sum_i 1/T_i sum_t (l_it + beta k_it)      aggregation  token_weights
    new <- AdamW(new, gradient of L)                  update       training/steps.py: update

The first three lines happen once a round, the others once an update: targets.py prepares A,
epochs.py goes over the buffer. In the first update of a round old is new, so every rho is 1 and the
gradient is that of plain policy gradient. Each other objective changes one or two of the lines: PPO
takes A from a critic (`gae`) and the KL into the reward, Dr. GRPO drops the std, RLOO leaves r_i
out of its mean and has no rho. RAFT and online DPO keep one or two answers of each group and drop
the others, whose A is NaN.

Every loss function here has one signature, so that the training loop knows none of them by name:

    (log_probs, log_probs_old, advantages, action_mask, clip) -> (loss, clipped)

`log_probs`, `log_probs_old` and `action_mask` are (B, T); `advantages` is (B, T), or (B, 1) where
a completion has one; `loss` is (B, T) and to be made smaller; `clipped` is (B, T) bool: the clip
holds this token's gradient back. Outside `action_mask` the inputs may hold anything, NaN included,
and the outputs are 0 and False. Where the advantage is 0 the loss and its gradient are 0 whatever
the ratio is. A loss of pairs takes the reference's log-probs for the old ones, and rows that belong
together as neighbours. The loss of an optimizer step is then, over all its rows,

    sum(loss * token_weights(lengths, used, aggregation, max_length)[:, None])

with weights computed once for the step: each micro-batch adds its part, so that its size changes
no gradient. A KL penalty in the loss (`kl_penalty` times beta) is added per token before that sum.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from stages.rl.advantages import (
    batch_advantages,
    best_and_worst,
    best_of_group,
    gae,
    group_advantages,
)
from stages.rl.kl import kl_penalty

# A ratio this far from 1 is an accident of the buffer, not an update: what an objective leaves
# unbounded ends here, with a gradient of 0, so that one token can neither overflow the loss nor
# outweigh all others.
RATIO_LIMIT = 100.0

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


@dataclass(frozen=True)
class Clip:
    """How far a ratio may go. A loss function takes what it knows and leaves the rest.

    clip_eps_lo, clip_eps_hi  the ratio's range is 1 - lo .. 1 + hi; lo >= 1 means no lower bound
    tau_pos, tau_neg          temperatures of SAPO's gate, for advantages above 0 and the others
    beta                      online DPO: what log-ratios to the reference are multiplied by
    """

    clip_eps_lo: float
    clip_eps_hi: float
    tau_pos: float
    tau_neg: float
    beta: float = 0.0


def policy_gradient_loss(
    log_probs: Tensor, log_probs_old: Tensor, advantages: Tensor, action_mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """(B, T) x4 -> (B, T), (B, T): -A log pi (REINFORCE, Williams 1992).

    There is no ratio: right only for samples of the very policy that is trained, which is why its
    objectives have no trust region and refuse several inner epochs. With A = 1 it is fine-tuning
    (RAFT), which has no such limit. Nothing is ever clipped.
    """
    log_probs = torch.where(action_mask, log_probs, 0.0)
    loss = -_on_actions(advantages, action_mask) * log_probs
    return loss, torch.zeros_like(action_mask)


def clipped_ratio_loss(
    log_probs: Tensor, log_probs_old: Tensor, advantages: Tensor, action_mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """(B, T) x4 -> (B, T), (B, T): -min(r A, clip(r) A) per token.

    PPO, Schulman et al. 2017, eq. 7. The range may be lopsided (DAPO's clip-higher, Yu et al. 2025,
    eq. 8). For A < 0 the paper bounds no ratio above 1; here it ends at RATIO_LIMIT.
    """
    log_ratio = _log_ratio(log_probs, log_probs_old, action_mask)
    return _pessimistic(log_ratio, _on_actions(advantages, action_mask), clip)


def sequence_ratio_loss(
    log_probs: Tensor, log_probs_old: Tensor, advantages: Tensor, action_mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """(B, T) x4 -> (B, T), (B, T): -min(s A, clip(s) A), s of the whole completion.

    GSPO, Zheng et al. 2025. s is the exponential of the mean log-ratio over the action tokens
    (eq. 7); the completion's loss (eq. 5) is written to each of them, so that their mean under
    `seq-mean-token-mean` is the paper's loss, with its gradient -A s / length per token. s lies
    much closer to 1 than a token's ratio: the paper clips at 3e-4 and 4e-4.
    """
    lengths = action_mask.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
    log_ratio = _log_ratio(log_probs, log_probs_old, action_mask).sum(1, keepdim=True) / lengths
    advantages = _on_actions(advantages, action_mask)
    return _pessimistic(log_ratio.expand_as(log_probs), advantages, clip)


def clipped_weight_loss(
    log_probs: Tensor, log_probs_old: Tensor, advantages: Tensor, action_mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """(B, T) x4 -> (B, T), (B, T): -stop(clip(r)) A log pi (CISPO, MiniMax 2025, eq. 4 and 5).

    The clip bounds the weight of a token but never takes its gradient away; `clipped` says where
    it did so. The paper's formula bounds both sides, its runs only the upper: clip_eps_lo >= 1.
    """
    ratio = _log_ratio(log_probs, log_probs_old, action_mask).exp().detach()
    weight = ratio.clamp(1 - clip.clip_eps_lo, 1 + clip.clip_eps_hi)
    log_probs = torch.where(action_mask, log_probs, 0.0)
    loss = -weight * _on_actions(advantages, action_mask) * log_probs
    return loss, action_mask & (weight != ratio)


def soft_gate_loss(
    log_probs: Tensor, log_probs_old: Tensor, advantages: Tensor, action_mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """(B, T) x4 -> (B, T), (B, T): -(4 / tau) sigmoid(tau (r - 1)) A (SAPO, Gao et al. 2025).

    A smooth gate in place of the clip: its slope is 1 at r = 1 and dies away on both sides, faster
    for a larger tau. tau is tau_pos where A > 0, else tau_neg. Nothing is ever clipped.
    """
    advantages = _on_actions(advantages, action_mask)
    ratio = _bounded_exp(_log_ratio(log_probs, log_probs_old, action_mask))
    tau = torch.full_like(ratio, clip.tau_neg).masked_fill(advantages > 0, clip.tau_pos)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages
    return loss, torch.zeros_like(action_mask)


def pair_loss(
    log_probs: Tensor, log_probs_ref: Tensor, advantages: Tensor, action_mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """(B, T) x4 -> (B, T), (B, T): -log sigmoid(beta (lc - lr)) of rows 0 and 1, 2 and 3, ...

    DPO, Rafailov et al. 2023, eq. 7, on pairs that the policy sampled (Guo et al. 2024). lc and lr
    are the log-ratios to the reference of the whole better and worse answer, whose advantages are 1
    and -1, in either order. The pair's loss is written to each token of both rows, so that their
    mean under `seq-mean-token-mean` is the mean over pairs. Bounded slope, nothing is ever clipped.
    """
    log_ratio = _log_ratio(log_probs, log_probs_ref, action_mask)
    gaps = (_on_actions(advantages, action_mask) * log_ratio).sum(1)  # (B,): lc or -lr
    of_pairs = -logsigmoid(clip.beta * gaps.view(-1, 2).sum(1))  # (B / 2,)
    loss = torch.where(action_mask, of_pairs.repeat_interleave(2)[:, None], 0.0)
    return loss, torch.zeros_like(action_mask)


@dataclass(frozen=True)
class Objective:
    """One objective: how advantages are estimated, its loss, and what it needs from the pipeline.

    loss              one of the functions above
    estimator         (rewards (B,), groups (B,)) -> (B,), NaN: the row takes no part; `gae` where
                      `critic` is true
    aggregation       the default of `token_weights`
    kl_placement      where `beta` puts the KL against the reference: in the reward or in the loss
    kl_places         where the knob of that name may put it
    negative_rewards  bears rewards below 0, which a KL in the reward makes
    critic            needs values and returns
    groups            needs at least two samples a prompt
    trust_region      bears several inner epochs over one buffer
    selects           its estimator leaves rows out
    pairs             its rows are two of a group, which no micro-batch parts; its loss takes the
                      reference's log-probs in place of the old ones, and `beta` is its temperature
    """

    loss: Callable[[Tensor, Tensor, Tensor, Tensor, Clip], tuple[Tensor, Tensor]]
    estimator: Callable
    aggregation: Aggregation
    kl_placement: Literal["reward", "loss", "nowhere"] = "loss"
    kl_places: tuple[str, ...] = ("reward", "loss")
    negative_rewards: bool = True
    critic: bool = False
    groups: bool = True
    trust_region: bool = True
    selects: bool = False
    pairs: bool = False


_mean_over_std = partial(group_advantages, baseline="mean", scale="std")
_mean = partial(group_advantages, baseline="mean", scale="none")
_mean_over_mean = partial(group_advantages, baseline="mean", scale="mean")
_leave_one_out = partial(group_advantages, baseline="leave-one-out", scale="none")

OBJECTIVES: dict[str, Objective] = {
    "reinforce": Objective(
        policy_gradient_loss,
        batch_advantages,
        "seq-mean-token-sum",
        kl_placement="reward",
        groups=False,
        trust_region=False,
    ),
    "rloo": Objective(
        policy_gradient_loss,
        _leave_one_out,
        "seq-mean-token-sum",
        kl_placement="reward",
        trust_region=False,
    ),
    "ppo": Objective(
        clipped_ratio_loss,
        gae,
        "token-mean",
        kl_placement="reward",
        critic=True,
        groups=False,
    ),
    "grpo": Objective(clipped_ratio_loss, _mean_over_std, "seq-mean-token-mean"),
    "drgrpo": Objective(clipped_ratio_loss, _mean, "constant"),
    "dapo": Objective(clipped_ratio_loss, _mean_over_std, "token-mean"),
    "gspo": Objective(sequence_ratio_loss, _mean_over_std, "seq-mean-token-mean"),
    "cispo": Objective(clipped_weight_loss, _mean_over_std, "token-mean"),
    "sapo": Objective(soft_gate_loss, _mean_over_std, "seq-mean-token-mean"),
    "maxrl": Objective(
        policy_gradient_loss,
        _mean_over_mean,
        "seq-mean-token-sum",
        negative_rewards=False,
        trust_region=False,
    ),
    "raft": Objective(
        policy_gradient_loss,
        best_of_group,
        "token-mean",
        kl_placement="nowhere",
        kl_places=("reward",),
        selects=True,
    ),
    "online_dpo": Objective(
        pair_loss,
        best_and_worst,
        "seq-mean-token-mean",
        kl_placement="nowhere",
        kl_places=(),
        selects=True,
        pairs=True,
    ),
}


def value_loss(
    values: Tensor,
    values_old: Tensor,
    returns: Tensor,
    action_mask: Tensor,
    clip_eps_val: float,
) -> Tensor:
    """(B, T) x4 -> (B, T): half the larger squared error, of the value or of the clipped value.

    The clipped value stays within `clip_eps_val` of `values_old`, the buffer's. OpenAI baselines'
    form (Engstrom et al. 2020); the PPO paper has neither the clip nor the half. 0 outside
    `action_mask`.
    """
    values = torch.where(action_mask, values, 0.0)
    values_old = torch.where(action_mask, values_old, 0.0)
    returns = torch.where(action_mask, returns, 0.0)
    clipped = values_old + (values - values_old).clamp(-clip_eps_val, clip_eps_val)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def token_weights(
    lengths: Tensor,
    used: Tensor,
    aggregation: Aggregation,
    max_length: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(B,) int, (B,) bool -> (B,) `dtype`: what each token of a row counts in the step's loss.

    `lengths` are the rows' action tokens, B all rows of one optimizer step (of all processes).

    token-mean           1 / tokens: every token alike (DAPO, eq. 8)
    seq-mean-token-mean  1 / (rows * length): every row alike, its tokens share (GRPO, eq. 3)
    seq-mean-token-sum   1 / rows: the row's summed log-prob (REINFORCE, RLOO)
    constant             1 / (rows * max_length): as above, scaled (Dr. GRPO's code)

    Rows not used weigh 0 and count in no divisor; with none used all weights are 0, and so is the
    loss. A used row of length 0 counts as a row. Raises ValueError for an unknown aggregation.
    """
    lengths = torch.where(used, lengths, 0).to(dtype)
    rows = used.sum().clamp(min=1).to(dtype)
    if aggregation == "token-mean":
        weights = 1 / lengths.sum().clamp(min=1).expand_as(lengths)
    elif aggregation == "seq-mean-token-mean":
        weights = 1 / (rows * lengths.clamp(min=1))
    elif aggregation == "seq-mean-token-sum":
        weights = 1 / rows.expand_as(lengths)
    elif aggregation == "constant":
        weights = 1 / (rows * max_length).expand_as(lengths)
    else:
        raise ValueError(
            f"loss aggregation is {aggregation!r}, expected 'token-mean', 'seq-mean-token-mean', "
            "'seq-mean-token-sum' or 'constant'"
        )
    return torch.where(used, weights, 0.0)


class RatioDiagnostics(NamedTuple):
    """What an update did to each completion, over its action tokens. All (B,).

    kl                k3 estimate of KL(old || new), mean over tokens, never negative
    ratio_mean        mean of the token ratios new / old
    ratio_max         the largest of them
    clipped_fraction  share of tokens whose clip was active
    """

    kl: Tensor
    ratio_mean: Tensor
    ratio_max: Tensor
    clipped_fraction: Tensor


@torch.no_grad()
def ratio_diagnostics(
    log_probs: Tensor, log_probs_old: Tensor, clipped: Tensor, action_mask: Tensor
) -> RatioDiagnostics:
    """(B, T) x4 -> four (B,): how far each row has moved from the policy that sampled it.

    `clipped` is the loss function's. Weigh rows by their length for a mean over tokens. A row
    without action tokens reads as one that has not moved: kl 0, ratios 1, nothing clipped.
    """
    lengths = action_mask.sum(1)
    ratio = _log_ratio(log_probs, log_probs_old, action_mask).exp()  # 1 outside the mask
    kl = kl_penalty(log_probs_old, log_probs, action_mask, "k3")

    def row_mean(x: Tensor) -> Tensor:
        return torch.where(action_mask, x, 0.0).sum(1) / lengths.clamp(min=1)

    return RatioDiagnostics(
        kl=row_mean(kl),
        ratio_mean=torch.where(lengths > 0, row_mean(ratio), 1.0),
        ratio_max=torch.where(
            lengths > 0, torch.where(action_mask, ratio, -torch.inf).amax(1), 1.0
        ),
        clipped_fraction=row_mean(clipped.to(ratio.dtype)),
    )


def _log_ratio(log_probs: Tensor, log_probs_old: Tensor, action_mask: Tensor) -> Tensor:
    """(B, T) x3 -> (B, T): log of new / old on action tokens, 0 elsewhere; select before exp."""
    return torch.where(action_mask, log_probs - log_probs_old, 0.0)


def _on_actions(advantages: Tensor, action_mask: Tensor) -> Tensor:
    """(B, T) or (B, 1), (B, T) -> (B, T): the advantage of each action token, 0 elsewhere."""
    return torch.where(action_mask, advantages, 0.0)


def _pessimistic(log_ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """(B, T), (B, T) -> (B, T), (B, T): the worse of the plain and the clipped surrogate."""
    ratio = _bounded_exp(log_ratio)
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip.clip_eps_lo, 1 + clip.clip_eps_hi) * advantages
    clipped = bounded < plain
    beyond = (log_ratio > math.log(RATIO_LIMIT)) & (advantages != 0)
    return -torch.where(clipped, bounded, plain), clipped | beyond


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    """(B, T) -> (B, T): the ratio, at most RATIO_LIMIT; bounded before exp can overflow."""
    return log_ratio.clamp(max=math.log(RATIO_LIMIT)).exp()
