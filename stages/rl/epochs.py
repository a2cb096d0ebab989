"""One round of optimization: inner epochs over a frozen buffer.

Letters: N completions of the buffer, B of a micro-batch, T completion tokens. The objective itself
(advantages and loss) is an entry of `OBJECTIVES`; nothing here knows one by name.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from stages.models import processes
from stages.models.forward import States, completion_states
from stages.models.log_probs import head_log_probs
from stages.models.scorers import action_values
from stages.models.sharding import idle_pass, is_sharded, run
from stages.rl.kl import kl_penalty
from stages.rl.objectives import token_weights, value_loss
from stages.rl.stats import CompletionStats, TokenFigures, token_mean
from stages.rl.targets import Settings, Targets, stack
from stages.training.batching import fill, neighbours, plan_groups
from stages.training.steps import StepFigures, rate_of_update, stop_of, update


@dataclass(frozen=True)
class Learner:
    """What a round trains, in evaluation mode: old, new and reference log-probs know no dropout.

    `critic` is None where the objective has none; `optimizers` holds one for each model, by the
    names "policy" and "critic".
    """

    policy: PreTrainedModel
    critic: PreTrainedModel | None
    optimizers: dict[str, torch.optim.Optimizer]


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step: epoch, figures of policy and critic, rates, mean KL to the old policy."""

    epoch: int
    policy: StepFigures
    critic: StepFigures | None
    lr: float
    kl: float
    clipped_fraction: float


@dataclass(frozen=True)
class Round:
    """A learner over the rows of one buffer, which are only read; `stats` fill as it learns."""

    accelerator: Accelerator
    learner: Learner
    rows: Sequence[dict]
    targets: Targets
    settings: Settings
    stats: CompletionStats = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "stats", CompletionStats(len(self.rows)))

    @cached_property
    def _lengths(self) -> list[int]:
        """Tokens of prompt and completion of each row."""
        return [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in self.rows]

    def steps(self, done: int, taken: int = 0) -> Iterator[StepRecord]:
        """Yield a record per optimizer step; `done` updates were taken before this round.

        The first `taken` steps of the round are passed over: a run that was cut off took them, and
        models and stats are as it left them. Rows are reshuffled in each epoch; after an epoch
        whose mean KL to the old policy is above `target_kl` no further one starts. Raises
        `NonFinite`, naming the row, for a loss that is not finite, unless settings say skip.
        """
        limit, left = self.settings.target_kl, taken
        for epoch in range(self.settings.ppo_epochs):
            for batches in self._plan(epoch):
                if left:
                    left -= 1
                else:
                    with self.accelerator.autocast():
                        yield self._step(epoch, batches, done)
                done += 1
            if left:
                continue  # the stats are those of a later epoch
            if limit is not None and token_mean(self.stats.kl, self.targets.lengths) > limit:
                return

    def _plan(self, epoch: int) -> list[list[list[int]]]:
        """Steps of micro-batches of row numbers. A step is a number of completions of the buffer,
        whatever the objective uses of them. Rows that are not used are no part of it: whatever
        stands in one can neither stop a step nor skip its mates. Pairs stay whole.
        """
        settings, units = self.settings, self.targets.units(self.settings.objective.pairs)
        sizes = (settings.train_batch_size, settings.batch_acc)
        names = ("optimize", settings.round_number, "shuffle", epoch)
        plan = plan_groups(self.targets.groups.tolist(), *sizes, settings.seed, *names)
        limit = settings.train_max_tokens
        lengths = None if limit is None else self._lengths
        steps = [[units[row] for row in _flat(step) if row in units] for step in plan]
        return [fill(step, settings.train_batch_size, lengths, limit) for step in steps if step]

    def _step(self, epoch: int, batches: list[list[int]], done: int) -> StepRecord:
        """One optimizer step of the policy, and one of the critic, over the same micro-batches."""
        settings, rows = self.settings, _flat(batches)
        lengths = self.targets.lengths[rows]
        weights = self._weights(batches, settings.aggregation)
        losses = self._own_losses(self.learner.policy, self._policy_loss, batches, weights)
        policy = self._update("policy", losses, done, settings.lr)
        own = _flat([batch[self._own(batch)] for batch in batches])
        self.stats.share(rows, own, self.targets.lengths)
        critic = None
        if self.learner.critic is not None:
            weights = self._weights(batches, "token-mean")
            losses = self._own_losses(self.learner.critic, self._critic_loss, batches, weights)
            critic = self._update("critic", losses, done, settings.lr_critic)
        return StepRecord(
            epoch,
            policy,
            critic,
            self._rate(done, settings.lr),
            token_mean(self.stats.kl[rows], lengths),
            token_mean(self.stats.clipped_fraction[rows], lengths),
        )

    def _own(self, batch: list[int]) -> slice:
        """The part of a micro-batch that this process takes; pairs stay whole."""
        unit = 2 if self.settings.objective.pairs else 1
        return neighbours(len(batch), processes.number(), processes.count(), unit)

    def _own_losses(
        self,
        model: PreTrainedModel,
        loss_of: Callable[[list[int], Tensor], Tensor],
        batches: list[list[int]],
        weights: list[Tensor],
    ) -> Iterator[Tensor]:
        """What this process's rows add to the loss of each micro-batch; 0 where it has none."""
        for batch, weight in zip(batches, weights, strict=True):
            own = self._own(batch)
            if batch[own]:
                yield run(model, partial(loss_of, batch[own], weight[own]))
            elif is_sharded(model):
                yield idle_pass(model)
            else:
                yield torch.zeros((), device=self.accelerator.device)

    def _weights(self, batches: list[list[int]], aggregation: str) -> list[Tensor]:
        """What a token of each row counts in the step's loss: (B,) for every micro-batch."""
        rows, targets = _flat(batches), self.targets
        weights = token_weights(
            targets.lengths[rows], targets.used[rows], aggregation, self.settings.max_new_tokens
        )
        return list(weights.split([len(batch) for batch in batches]))

    def _update(self, name: str, losses: Iterator[Tensor], done: int, peak: float) -> StepFigures:
        model, settings = getattr(self.learner, name), self.settings
        optimizer, rate = self.learner.optimizers[name], self._rate(done, peak)
        limits = (settings.max_norm, settings.nonfinite)
        return update(self.accelerator, model, optimizer, losses, rate, *limits)

    def _rate(self, done: int, peak: float) -> float:
        return rate_of_update(done, peak, self.settings.warmup_steps, self.settings.decay_steps)

    def _policy_loss(self, batch: list[int], weight: Tensor) -> Tensor:
        """(B rows), (B,) -> scalar, their part of the step's loss; `stats` keep what they show."""
        settings, policy = self.settings, self.learner.policy
        rows = [self.rows[i] for i in batch]
        states = completion_states(policy.base_model, *_ids(rows))
        mask = states.action_mask  # (B, T), and so is all that follows
        log_probs, entropy = _log_probs_and_entropy(policy, states, settings.temperature)
        old = _padded(rows, "log_probs_old", mask)
        advantages = stack([self.targets.advantages[i] for i in batch], mask)
        ref = _padded(rows, "log_probs_ref", mask) if settings.beta > 0 else None
        against = ref if settings.objective.pairs else old
        loss, clipped = settings.objective.loss(log_probs, against, advantages, mask, settings.clip)
        kl_ref = None
        if ref is not None:
            kl_ref = kl_penalty(log_probs, ref, mask, settings.kl_estimator)
            if settings.kl_placement == "loss":
                loss = loss + settings.beta * kl_ref
        if self.targets.factors is not None:
            loss = loss * stack([self.targets.factors[i] for i in batch], mask)
        seen = TokenFigures(log_probs, old, mask, clipped, entropy, kl_ref)
        self.stats.note(batch, seen)
        return self._checked(_weighted_sum(loss, weight, mask), loss, batch)

    def _critic_loss(self, batch: list[int], weight: Tensor) -> Tensor:
        """(B rows), (B,) -> scalar, their part of the step's value loss."""
        targets, rows = self.targets, [self.rows[i] for i in batch]
        values, mask = action_values(self.learner.critic, *_ids(rows))  # (B, T)
        old = stack([targets.values_old[i] for i in batch], mask)
        returns = stack([targets.returns[i] for i in batch], mask)
        loss = value_loss(values, old, returns, mask, self.settings.clip_eps_val)
        return self._checked(_weighted_sum(loss, weight, mask), loss, batch)

    def _checked(self, total: Tensor, loss: Tensor, batch: list[int]) -> Tensor:
        """The total of a micro-batch, if it may go on; else `NonFinite` names the row at fault."""
        if self.settings.nonfinite == "stop" and not torch.isfinite(total):
            of_rows = loss.detach().sum(1)  # (B,)
            worst = torch.where(of_rows.isfinite(), of_rows.abs(), torch.inf).argmax()
            row = self.rows[batch[worst]]
            raise stop_of(total.item(), f"group {row['group']}, sample {row['sample']}: ")
        return total


def _log_probs_and_entropy(policy, states: States, temperature: float) -> tuple[Tensor, Tensor]:
    """-> (B, T) log-probs with gradient, (B, T) entropies without; 0 outside the action mask."""
    mask = states.action_mask
    found = head_log_probs(policy, states.hidden[mask], states.ids[mask], temperature, True)
    zeros = torch.zeros(mask.shape, device=mask.device)
    log_probs, entropy = (zeros.masked_scatter(mask, flat) for flat in found)
    return log_probs, entropy


def _weighted_sum(loss: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """(B, T), (B,), (B, T) -> scalar: each action token by its row's weight."""
    return torch.where(mask, loss * weights.to(loss.device)[:, None], 0.0).sum()


def _flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def _ids(rows: Sequence[dict]) -> tuple[list, list]:
    """Prompts and completions of rows, as ids."""
    return [row["prompt_ids"] for row in rows], [row["completion_ids"] for row in rows]


def _padded(rows: Sequence[dict], column: str, mask: Tensor) -> Tensor:
    """(B, T) float32 of a list column, 0 where padded."""
    return stack([torch.tensor(row[column]) for row in rows], mask)
