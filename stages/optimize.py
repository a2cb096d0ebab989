"""Stage `optimize`: inner epochs of one objective over a frozen replay buffer.

Reads   data/buffers/round-k.parquet, the policy folder that the round starts from, models/rm (for a
        new critic)
Knobs   loss and all that belongs to it, seed, nonfinite, device, precision, threads, attention,
        trust_remote_code
Writes  models/policy/k (with trainer/: optimizer, critic, counters), data/updates/round-k.parquet
        (what the update did to each completion), a curve by step, figures

The buffer is only read. Sampling again is left to the next round.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from stages.base import params
from stages.base.command import Stage, paths, progress, say
from stages.base.errors import InputError
from stages.base.metrics import write_json
from stages.base.tables import BUFFERS, UPDATES, Rows, random_access, read_provenance, write_table
from stages.base.tokenizers import load_tokenizer
from stages.knobs.optimize import Knobs
from stages.models.checkpoints import (
    TrainerState,
    load_optimizer,
    load_policy,
    load_scorer,
    load_trainer,
    new_scorer,
    save_policy,
)
from stages.models.compute import accelerator as make_accelerator
from stages.rl.advantages import has_spread, rows_of_groups
from stages.rl.epochs import (
    Seen,
    Settings,
    Targets,
    explained_variance,
    targets,
    token_mean,
)
from stages.rl.epochs import (
    optimize as optimize_policy,
)
from stages.rl.objectives import OBJECTIVES, Clip
from stages.training.steps import adamw, check_weights
from stages.training.tracking import tracking


@click.command(cls=Stage)
@click.option("--round", "round_number", type=click.IntRange(min=1), required=True)
@paths("--buffer", "--policy start", "--reward-model", "--out", "--updates", "--curve", "--figures")
def optimize(
    round_number: int,
    buffer: Path,
    start: Path,
    reward_model: Path,
    out: Path,
    updates: Path,
    curve: Path,
    figures: Path,
) -> None:
    """Optimize the policy over one buffer."""
    knobs = params.load(Knobs)
    settings = make_settings(knobs, round_number)
    with random_access(buffer, BUFFERS) as rows:
        check_columns(buffer, rows, settings)
        try:
            goal = targets(rows, settings)
        except ValueError as error:
            raise InputError(f"{buffer}: loss {knobs.loss}: {error}") from error
        if not goal.used.any():
            raise InputError(f"{buffer}: no completion has a reward; expected at least one")
        accelerator = make_accelerator(knobs.device, knobs.precision, knobs.threads)
        learner = load_learner(start, reward_model, knobs, settings, accelerator.device)
        seen = Seen(len(rows))
        steps = []
        step = learner.state.step
        records = optimize_policy(
            accelerator,
            learner.policy,
            learner.critic,
            learner.optimizers,
            rows,
            goal,
            settings,
            step,
            seen,
        )
        each_epoch = math.ceil(len(rows) / (settings.train_batch_size * settings.batch_acc))
        warn_of_stale_steps(knobs, settings, settings.ppo_epochs * each_epoch)
        tokens = int(goal.lengths.sum()) // each_epoch
        reward = goal.rewards[goal.used].mean().item()
        name = f"optimize {round_number}"
        bar = progress(records, name, settings.ppo_epochs * each_epoch)
        with tracking(f"optimize-{round_number}", knobs.model_dump(), curve) as log:
            for record in bar:
                step += 1
                steps.append(curve_row(step, round_number, record))
                log(steps[-1])
                bar.tell(tokens, reward=reward, loss=record.policy.loss, kl=record.kl)
        check_weights(learner.policy, "policy")
        if learner.critic is not None:
            check_weights(learner.critic, "critic")
        found = round_figures(goal, seen, steps, settings)
        provenance = {"stage": "optimize", "round": round_number, "policy": str(start)}
        provenance |= {"loss": knobs.loss}
        write_table(updates, UPDATES, update_rows(rows, goal, seen, round_number), provenance)
    state = TrainerState(
        step=step,
        prompt_cursor=read_provenance(buffer)["prompt_cursor"],
        rounds=[*learner.state.rounds, round_number],
    )
    save_policy(
        out,
        learner.policy,
        load_tokenizer(start, knobs.model.trust_remote_code),
        state,
        learner.pairs(),
        learner.critic,
    )
    write_json(figures, found)
    say(found, round=round_number, objective=knobs.loss)


def warn_of_stale_steps(knobs: Knobs, settings: Settings, steps: int) -> None:
    """Say so where an objective that corrects for no ratio takes several steps over one buffer."""
    if steps > 1 and not settings.objective.trust_region:
        click.echo(
            f"loss {knobs.loss} knows no ratio: of {steps} steps over this buffer only the first is"
            " on-policy. A lower lr keeps the others close; a larger batch_acc makes them fewer"
        )


def make_settings(knobs: Knobs, round_number: int) -> Settings:
    """Knobs -> plain values; `default` becomes what the objective says."""
    objective = OBJECTIVES[knobs.loss]
    aggregation, placement = knobs.loss_aggregation, knobs.kl_placement
    same = set(Settings.__dataclass_fields__) & set(Knobs.model_fields)
    values = {name: getattr(knobs, name) for name in same} | {
        "kl_placement": objective.kl_placement if placement == "default" else placement,
    }
    return Settings(
        objective=objective,
        aggregation=objective.aggregation if aggregation == "default" else aggregation,
        clip=Clip(knobs.clip_eps_lo, knobs.clip_eps_hi, knobs.tau_pos, knobs.tau_neg),
        round_number=round_number,
        **values,
    )


def check_columns(path: Path, rows: Rows, settings: Settings) -> None:
    """Raise InputError where the buffer lacks what the objective needs of it."""
    first = rows[0]
    if settings.beta > 0 and first["log_probs_ref"] is None:
        raise InputError(f"{path}: column 'log_probs_ref' is null, but beta is {settings.beta}")
    if settings.objective.critic and first["values_old"] is None:
        raise InputError(
            f"{path}: column 'values_old' is null, but the loss needs a critic's values"
        )


@dataclass
class Learner:
    """What a round trains, with the state that it continues."""

    policy: torch.nn.Module
    critic: torch.nn.Module | None
    optimizers: dict[str, torch.optim.Optimizer]
    state: TrainerState

    def pairs(self) -> dict:
        """Optimizer and model by name, as checkpoints take them."""
        models = {"policy": self.policy, "critic": self.critic}
        return {name: (optimizer, models[name]) for name, optimizer in self.optimizers.items()}


def load_learner(start: Path, reward_model: Path, knobs: Knobs, settings, device) -> Learner:
    """Policy, critic where the objective needs one, optimizers as the last round left them."""
    state, trust = load_trainer(start), knobs.model.trust_remote_code
    models = {"policy": load_policy(start, knobs.attention, device, trust), "critic": None}
    if settings.objective.critic:
        if state.critic is not None:
            models["critic"] = load_scorer(state.critic, knobs.attention, device, trust)
        elif knobs.critic == "reward_model":
            models["critic"] = load_scorer(reward_model, knobs.attention, device, trust)
        else:
            models["critic"] = new_scorer(start, knobs.attention, device, trust, zero_head=True)
    optimizers = {}
    for name, model in models.items():
        if model is not None:
            optimizers[name] = adamw(model, knobs.lr, knobs.weight_decay)
            if name in state.optimizers:
                load_optimizer(state.optimizers[name], optimizers[name], model)
    return Learner(models["policy"], models["critic"], optimizers, state)


def curve_row(step: int, round_number: int, record) -> dict:
    """One line of the step curve; the critic's columns are empty without a critic."""
    critic = record.critic
    return {
        "step": step,
        "round": round_number,
        "epoch": record.epoch,
        "loss": record.policy.loss,
        "grad_norm": record.policy.grad_norm,
        "lr": record.lr,
        "kl": record.kl,
        "clipped_fraction": record.clipped_fraction,
        "value_loss": None if critic is None else critic.loss,
        "critic_grad_norm": None if critic is None else critic.grad_norm,
        "skipped": record.policy.skipped + (0 if critic is None else critic.skipped),
    }


def round_figures(goal: Targets, seen: Seen, steps: list[dict], settings) -> dict:
    """The round's figures; each is defined in docs/metrics.md."""
    used, lengths = goal.used, goal.lengths
    groups = rows_of_groups(goal.groups, used)
    flat = [not has_spread(goal.rewards[rows]) for rows in groups]
    advantages = torch.cat(scorable(goal.advantages, used))
    explained = None
    if goal.values_old is not None:
        explained = explained_variance(
            scorable(goal.values_old, used), scorable(goal.returns, used)
        )
    values = goal.values_old
    return {
        "steps": len(steps),
        "epochs": steps[-1]["epoch"] + 1,
        "reward_shaped": goal.rewards[used].mean().item(),
        "advantage_std": advantages.std().item() if len(advantages) > 1 else None,
        "groups_without_spread": sum(flat) / len(flat),
        "unscorable": int((~used).sum()),
        "ratio_mean": token_mean(seen.ratio_mean, lengths),
        "ratio_max": seen.ratio_max[~seen.ratio_max.isnan()].max().item(),
        "clipped_fraction": token_mean(seen.clipped_fraction, lengths),
        "kl": token_mean(seen.kl, lengths),
        "kl_ref": token_mean(seen.kl_ref, lengths) if settings.beta > 0 else None,
        "entropy": token_mean(seen.entropy, lengths),
        "loss": sum(step["loss"] for step in steps) / len(steps),
        "grad_norm": sum(step["grad_norm"] for step in steps) / len(steps),
        "lr": steps[-1]["lr"],
        "value_loss": None if values is None else sum(s["value_loss"] for s in steps) / len(steps),
        "explained_variance": explained,
        "skipped": sum(step["skipped"] for step in steps),
    }


def scorable(parts: list[torch.Tensor], used: torch.Tensor) -> list[torch.Tensor]:
    """The parts of the scorable completions: unscorable ones have no advantage and no return."""
    return [part for part, scored in zip(parts, used.tolist(), strict=True) if scored]


def update_rows(rows: Rows, goal: Targets, seen: Seen, round_number: int):
    """One row per completion, in the order of the buffer; undefined figures are null."""

    def known(value: torch.Tensor) -> float | None:
        return None if value.isnan() else value.item()

    for i, row in enumerate(rows):
        yield {
            "round": round_number,
            "group": row["group"],
            "sample": row["sample"],
            "reward_shaped": known(goal.rewards[i]),
            "advantage": goal.advantages[i].tolist(),
            "ratio": None if seen.ratios[i] is None else seen.ratios[i].tolist(),
            "ratio_mean": known(seen.ratio_mean[i]),
            "ratio_max": known(seen.ratio_max[i]),
            "clipped_fraction": known(seen.clipped_fraction[i]),
            "kl": known(seen.kl[i]),
            "used": bool(goal.used[i]),
        }


if __name__ == "__main__":
    optimize()
