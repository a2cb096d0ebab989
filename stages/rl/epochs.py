"""One round of optimization: inner epochs over a frozen buffer.

Letters: N completions of the buffer, B of a micro-batch, T completion tokens. The objective itself
(advantages and loss) is an entry of `OBJECTIVES`; nothing here knows one by name.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from stages.models.forward import States, completion_states, head_logits
from stages.models.log_probs import token_entropy, token_log_probs
from stages.models.scorers import action_values
from stages.rl import objectives
from stages.rl.advantages import shape_sequence_rewards, shape_token_rewards, whiten
from stages.rl.kl import kl_estimate, kl_penalty
from stages.rl.objectives import Clip, Objective, token_weights
from stages.training.batching import plan_groups
from stages.training.steps import StepFigures, rate_of_update, update


@dataclass(frozen=True)
class Settings:
    """Plain values of one round; the names are those of params.yaml."""

    objective: Objective
    aggregation: str
    kl_placement: str
    clip: Clip
    clip_eps_val: float
    vf_coef: float
    gamma: float
    lam: float
    beta: float
    kl_estimator: str
    temperature: float
    max_new_tokens: int
    ppo_epochs: int
    target_kl: float | None
    train_batch_size: int
    batch_acc: int
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
    used        (N,) False for unscorable completions, which count in no divisor
    groups      (N,) which prompt a completion answers
    lengths     (N,) tokens of each completion
    """

    advantages: list[Tensor]
    returns: list[Tensor] | None
    values_old: list[Tensor] | None
    rewards: Tensor
    used: Tensor
    groups: Tensor
    lengths: Tensor


@dataclass
class Seen:
    """Per completion, as it stood when last trained on; NaN where it never was. All (N,).

    `ratios` holds new / old of each token: (T,) a completion, None where it never was trained on.
    """

    count: int
    ratios: list[Tensor | None] = field(init=False)
    ratio_mean: Tensor = field(init=False)
    ratio_max: Tensor = field(init=False)
    clipped_fraction: Tensor = field(init=False)
    kl: Tensor = field(init=False)
    kl_ref: Tensor = field(init=False)
    entropy: Tensor = field(init=False)

    def __post_init__(self):
        for name in ("ratio_mean", "ratio_max", "clipped_fraction", "kl", "kl_ref", "entropy"):
            setattr(self, name, torch.full((self.count,), torch.nan))
        self.ratios = [None] * self.count


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step: epoch, figures of policy and critic, rates, mean KL to the old policy."""

    epoch: int
    policy: StepFigures
    critic: StepFigures | None
    lr: float
    kl: float
    clipped_fraction: float


def targets(rows: Iterable[dict], settings: Settings) -> Targets:
    """Rewards, KL shaping and advantages of a whole buffer, from its columns alone, in one pass.

    An estimator compares completions, so it sees all N, but only numbers: no ids and no text are
    kept.
    """
    objective = settings.objective
    in_reward = settings.beta > 0 and settings.kl_placement == "reward"
    rewards, groups, kl, values = [], [], [], []
    for row in rows:
        rewards.append(torch.nan if row["reward"] is None else row["reward"])
        groups.append(row["group"])
        old = torch.tensor(row["log_probs_old"])
        estimate = torch.zeros(len(old))
        if in_reward:
            estimate = kl_estimate(old, torch.tensor(row["log_probs_ref"]), settings.kl_estimator)
        kl.append(estimate)
        values.append(torch.tensor(row["values_old"]) if objective.critic else None)
    rewards, groups = torch.tensor(rewards), torch.tensor(groups)
    lengths, used = torch.tensor([len(x) for x in kl]), ~rewards.isnan()
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    beta = settings.beta if in_reward else 0.0
    shaped = shape_sequence_rewards(rewards, _stack(kl, mask), mask, beta)
    returns = None
    if objective.critic:
        scored = mask & used[:, None]
        token_rewards = shape_token_rewards(rewards, _stack(kl, mask), scored, beta)
        advantages, returns = objective.estimator(
            token_rewards, _stack(values, mask), scored, settings.gamma, settings.lam
        )
        advantages, returns = _cut(whiten(advantages, scored), lengths), _cut(returns, lengths)
    else:
        advantages = objective.estimator(shaped, groups)[:, None].expand(mask.shape)
        advantages = _cut(advantages, lengths)
    kept = values if objective.critic else None
    return Targets(advantages, returns, kept, shaped, used, groups, lengths)


def optimize(
    accelerator: Accelerator,
    policy: PreTrainedModel,
    critic: PreTrainedModel | None,
    optimizers: dict[str, torch.optim.Optimizer],
    rows: Sequence[dict],
    goal: Targets,
    settings: Settings,
    step: int,
    seen: Seen,
) -> Iterator[StepRecord]:
    """Yield a record per optimizer step; `step` updates were done before this round.

    `optimizers` holds one for "policy" and, with a critic, one for "critic". Both models are in
    evaluation mode: old, new and reference log-probs know no dropout. `seen` is filled on the way.
    Rows are reshuffled in each epoch; after an epoch whose mean KL to the old policy is above
    `target_kl` no further one starts.
    """
    for epoch in range(settings.ppo_epochs):
        names = ("optimize", settings.round_number, "shuffle", epoch)
        steps = plan_groups(
            goal.groups.tolist(),
            settings.train_batch_size,
            settings.batch_acc,
            settings.seed,
            *names,
        )
        for batches in steps:
            numbers = [row for batch in batches for row in batch]
            if not goal.used[numbers].any():
                continue
            with accelerator.autocast():
                yield _step(
                    accelerator,
                    policy,
                    critic,
                    optimizers,
                    rows,
                    batches,
                    goal,
                    settings,
                    step,
                    seen,
                    epoch,
                )
            step += 1
        if (
            settings.target_kl is not None
            and token_mean(seen.kl, goal.lengths) > settings.target_kl
        ):
            return


def _step(
    accelerator, policy, critic, optimizers, rows, batches, goal, settings, step, seen, epoch
) -> StepRecord:
    """One optimizer step of the policy, and one of the critic, over the same micro-batches."""
    numbers = [row for batch in batches for row in batch]
    used, lengths, cap = goal.used[numbers], goal.lengths[numbers], settings.max_new_tokens
    limits = (settings.max_norm, settings.nonfinite)
    rate = _rate(step, settings.lr, settings)
    weights = token_weights(lengths, used, settings.aggregation, cap)
    shares = _policy_shares(policy, rows, batches, weights, goal, settings, seen)
    policy_figures = update(accelerator, policy, optimizers["policy"], shares, rate, *limits)
    critic_figures = None
    if critic is not None:
        weights = token_weights(lengths, used, "token-mean", cap)
        shares = _critic_shares(critic, rows, batches, weights, goal, settings)
        critic_rate = _rate(step, settings.lr_critic, settings)
        critic_figures = update(
            accelerator, critic, optimizers["critic"], shares, critic_rate, *limits
        )
    return StepRecord(
        epoch,
        policy_figures,
        critic_figures,
        rate,
        token_mean(seen.kl[numbers], lengths),
        token_mean(seen.clipped_fraction[numbers], lengths),
    )


def _rate(step: int, peak: float, settings: Settings) -> float:
    return rate_of_update(step, peak, settings.warmup_steps, settings.decay_steps)


def _policy_shares(policy, rows, batches, weights: Tensor, goal: Targets, settings, seen: Seen):
    start = 0
    for batch in batches:
        share = weights[start : start + len(batch)]
        start += len(batch)
        chosen = [rows[i] for i in batch]
        states = completion_states(
            policy.base_model,
            [row["prompt_ids"] for row in chosen],
            [row["completion_ids"] for row in chosen],
        )
        mask = states.action_mask
        log_probs, entropy = _log_probs_and_entropy(policy, states, settings.temperature)
        old = _padded(chosen, "log_probs_old", mask)
        advantages = _stack([goal.advantages[i] for i in batch], mask)
        loss, clipped = settings.objective.loss(log_probs, old, advantages, mask, settings.clip)
        kl_ref = None
        if settings.beta > 0:
            ref = _padded(chosen, "log_probs_ref", mask)
            kl_ref = kl_penalty(log_probs, ref, mask, settings.kl_estimator)
            if settings.kl_placement == "loss":
                loss = loss + settings.beta * kl_ref
        _record(seen, batch, goal.used, log_probs, old, clipped, mask, entropy, kl_ref)
        yield torch.where(mask, loss * share.to(loss.device)[:, None], 0.0).sum()


def _critic_shares(critic, rows, batches, weights: Tensor, goal: Targets, settings):
    start = 0
    for batch in batches:
        share = weights[start : start + len(batch)]
        start += len(batch)
        chosen = [rows[i] for i in batch]
        values, mask = action_values(
            critic, [row["prompt_ids"] for row in chosen], [row["completion_ids"] for row in chosen]
        )
        old = _stack([goal.values_old[i] for i in batch], mask)
        returns = _stack([goal.returns[i] for i in batch], mask)
        loss = objectives.value_loss(values, old, returns, mask, settings.clip_eps_val)
        yield settings.vf_coef * torch.where(mask, loss * share.to(loss.device)[:, None], 0.0).sum()


def _log_probs_and_entropy(policy, states: States, temperature: float) -> tuple[Tensor, Tensor]:
    """-> (B, T) log-probs with gradient, (B, T) entropies without; 0 outside the action mask."""
    mask = states.action_mask
    logits = head_logits(policy, states.hidden[mask])
    zeros = torch.zeros(mask.shape, device=mask.device)
    log_probs = zeros.masked_scatter(mask, token_log_probs(logits, states.ids[mask], temperature))
    with torch.no_grad():
        entropy = zeros.masked_scatter(mask, token_entropy(logits, temperature))
    return log_probs, entropy


@torch.no_grad()
def _record(
    seen: Seen, batch, used: Tensor, log_probs, old, clipped, mask, entropy, kl_ref
) -> None:
    """Note what the micro-batch shows of its rows; unused ones train nothing and stay NaN."""
    diagnostics = objectives.ratio_diagnostics(log_probs, old, clipped, mask)
    figures, lengths = diagnostics._asdict(), mask.sum(1)
    figures["entropy"] = entropy.sum(1) / lengths
    if kl_ref is not None:
        figures["kl_ref"] = kl_ref.sum(1) / lengths
    kept = used[batch]
    rows = torch.tensor(batch)[kept]
    for name, figure in figures.items():
        getattr(seen, name)[rows] = figure.cpu()[kept]
    ratios = _cut((log_probs - old).exp().cpu(), lengths)
    for row, ratio, is_used in zip(batch, ratios, kept.tolist(), strict=True):
        if is_used:
            seen.ratios[row] = ratio


def token_mean(row_means: Tensor, lengths: Tensor) -> float:
    """(N,) token means of rows, (N,) lengths -> mean over all tokens; NaN rows are left out."""
    known = ~row_means.isnan()
    weights = torch.where(known, lengths, 0)
    return (torch.where(known, row_means, 0.0) * weights).sum().item() / max(1, int(weights.sum()))


def explained_variance(values: Sequence[Tensor], returns: Sequence[Tensor]) -> float | None:
    """1 - Var(returns - values) / Var(returns) over all tokens; None if returns have no spread."""
    values, returns = torch.cat(list(values)), torch.cat(list(returns))
    if len(returns) < 2 or returns.max() == returns.min():
        return None
    return 1 - ((returns - values).var() / returns.var()).item()


def _padded(rows: Sequence[dict], column: str, mask: Tensor) -> Tensor:
    """(B, T) float32 of a list column, 0 where padded."""
    return _stack([torch.tensor(row[column]) for row in rows], mask)


def _cut(padded: Tensor, lengths: Tensor) -> list[Tensor]:
    """(N, T), (N,) -> N tensors of true length."""
    return [padded[i, :length] for i, length in enumerate(lengths.tolist())]


def _stack(parts: Sequence[Tensor], mask: Tensor) -> Tensor:
    padded = torch.zeros(mask.shape)
    for i, part in enumerate(parts):
        padded[i, : len(part)] = part
    return padded.to(mask.device)
