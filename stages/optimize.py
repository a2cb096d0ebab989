"""Stage `optimize`: inner epochs of one objective over a frozen replay buffer.

Reads   data/buffers/round-k.parquet, the policy folder that the round starts from, models/rm (for a
        new critic)
Knobs   loss and all that belongs to it, lora, keep_weights, keep_moments, seed, nonfinite, device,
        precision, threads, processes, attention, trust_remote_code
Writes  models/policy/k (under lora adapters alone; with trainer/: optimizer, critic, counters),
        data/updates/round-k.parquet (what the update did to each completion), a curve by step,
        figures

The buffer is only read. Sampling again is left to the next round.
"""

import math
from collections.abc import Callable
from pathlib import Path

import click
import torch

from stages.base import params
from stages.base.bases import base_of
from stages.base.command import SharedStage, launched, paths, progress, say
from stages.base.contents import (
    check_contents,
    check_positions,
    check_provenance,
    check_vocabulary,
)
from stages.base.errors import BadKnob, InputError
from stages.base.files import check_room
from stages.base.metrics import Means, write_json
from stages.base.positions import positions_of
from stages.base.randomness import seed_everything
from stages.base.scratch import work_of
from stages.base.tables import BUFFERS, UPDATES, Rows, random_access, write_table
from stages.base.tokenizers import load_tokenizer
from stages.knobs.optimize import Knobs
from stages.models import processes
from stages.models.adapters import make_trainable
from stages.models.checkpoints import load_policy, load_scorer, new_scorer
from stages.models.compute import accelerator as make_accelerator
from stages.models.compute import vocabulary_of
from stages.models.recompute import recompute_layers
from stages.models.sharding import gather, shard, start_device
from stages.models.trainer_state import (
    TrainerState,
    load_optimizer,
    load_trainer,
    policy_bytes,
    save_policy,
)
from stages.rl.advantages import has_spread, rows_of_groups
from stages.rl.correction import correction_figures
from stages.rl.epochs import Learner, Round, StepRecord
from stages.rl.kl import FITTING
from stages.rl.objectives import OBJECTIVES, Clip
from stages.rl.stats import CompletionStats, explained_variance, token_mean
from stages.rl.targets import Settings, Targets, make_targets
from stages.training.saving import Saver, parts_of, restore, tensors_of
from stages.training.steps import adamw, check_weights
from stages.training.tracking import tracking


@click.command(cls=SharedStage)
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
    if launched(knobs.processes, knobs.threads):
        return
    settings = make_settings(knobs, round_number)
    largest = check_contents(buffer, BUFFERS)
    cursor = check_provenance(buffer, "prompt_cursor")["prompt_cursor"]
    with random_access(buffer, BUFFERS) as rows:
        targets = checked_targets(buffer, rows, settings, knobs)
        accelerator = make_accelerator(knobs.device, knobs.precision, knobs.threads)
        learner, state = load_learner(start, reward_model, knobs, accelerator.device)
        kept = {"weights": knobs.keep_weights, "moments": knobs.keep_moments}
        check_room(out, policy_bytes([model for _, model in pairs(learner).values()], **kept))
        tokenizer = load_tokenizer(start, knobs.model.trust_remote_code)
        check_vocabulary(buffer, largest, vocabulary_of(learner.policy), start)
        check_positions(buffer, BUFFERS, positions_of(learner.policy.config), start)
        learning = Round(accelerator, learner, rows, targets, settings)
        name, inputs = f"optimize-{round_number}", [buffer, start, reward_model]
        saver = Saver(work_of(name, inputs, knobs, accelerator.device))
        with saver.watching(), tracking(name, knobs.model_dump(), curve) as log:
            steps = take_steps(learning, state.step, knobs, log, saver)
        for name, (_, model) in pairs(learner).items():
            check_weights(model, name)
        for optimizer, model in pairs(learner).values():
            gather(model, optimizer)
        if processes.number():
            return  # the first one writes
        found = round_figures(targets, learning.stats, steps, settings)
        provenance = {"stage": "optimize", "round": round_number, "policy": str(start)}
        provenance |= {"loss": knobs.loss}
        changes = update_rows(rows, targets, learning.stats, round_number)
        write_table(updates, UPDATES, changes, provenance)
    state = TrainerState(
        step=state.step + len(steps),
        prompt_cursor=cursor,
        rounds=[*state.rounds, round_number],
    )
    save_policy(out, learner.policy, tokenizer, state, pairs(learner), learner.critic, **kept)
    write_json(figures, found)
    saver.done()
    say(found, round=round_number, objective=knobs.loss)


def checked_targets(buffer: Path, rows: Rows, settings: Settings, knobs: Knobs) -> Targets:
    """Targets of a buffer that has what the objective needs; InputError where it has not."""
    check_columns(buffer, rows, settings)
    try:
        targets = make_targets(rows, settings)
    except ValueError as error:
        raise InputError(f"{buffer}: loss {knobs.loss}: {error}") from error
    if not targets.scorable.any():
        raise InputError(f"{buffer}: no completion has a reward; expected at least one")
    if not targets.used.any():
        reasons = ["the rewards are all alike"] if settings.objective.pairs else []
        reasons += ["no answer is right (skip_wrong_groups)"] if settings.skip_wrong_groups else []
        raise InputError(
            f"{buffer}: loss {knobs.loss} has nothing to train on: in each group"
            f" {' or '.join(reasons)}"
        )
    return targets


def take_steps(
    learning: Round, done: int, knobs: Knobs, log: Callable[[dict], None], saver: Saver
) -> list[dict]:
    """All optimizer steps of the round; returns one row of the curve each, logged as it comes."""
    settings, targets = learning.settings, learning.targets
    each_epoch = math.ceil(len(learning.rows) / (settings.train_batch_size * settings.batch_acc))
    total = settings.ppo_epochs * each_epoch
    warn_of_stale_steps(knobs, settings, total)
    tokens = int(targets.lengths[targets.used].sum()) // each_epoch
    reward = targets.rewards[targets.scorable].mean().item()
    rows = go_on(learning, saver)
    for row in rows:
        log(row)
    steps = learning.steps(done, len(rows))
    bar = progress(steps, f"optimize {settings.round_number}", total, done=len(rows))
    for number, record in enumerate(bar, start=done + len(rows) + 1):
        rows.append(curve_row(number, settings.round_number, record))
        log(rows[-1])
        bar.tell(tokens, reward=reward, loss=record.policy.loss, kl=record.kl)
        saver.after_step(len(rows), lambda: state_of(learning), {"rows": rows})
    return rows


def go_on(learning: Round, saver: Saver) -> list[dict]:
    """Put back what a cut-off run of this very round left; its rows of the curve, none without."""
    found = saver.found()
    if found is None:
        return []
    restore(pairs(learning.learner), found.tensors)
    learning.stats.restore(parts_of(found.tensors, "stats"))
    return found.values["rows"]


def state_of(learning: Round) -> dict:
    """Tensors of a round under way: models, moments, and what was seen of the completions."""
    stats = {f"stats/{name}": tensor for name, tensor in learning.stats.tensors().items()}
    return tensors_of(pairs(learning.learner)) | stats


def warn_of_stale_steps(knobs: Knobs, settings: Settings, steps: int) -> None:
    """Say so where an objective that corrects for no ratio takes several steps over one buffer."""
    if steps > 1 and not settings.objective.trust_region:
        click.echo(
            f"loss {knobs.loss} knows no ratio: of {steps} steps over this buffer only the first is"
            " on-policy. A lower lr keeps the others close; a larger batch_acc makes them fewer"
        )
    if settings.objective.selects and settings.ppo_epochs > 1 and settings.target_kl is None:
        click.echo(
            f"loss {knobs.loss} has no clip: in {settings.ppo_epochs} passes over this buffer only"
            " lr limits how far the policy goes. target_kl stops the passes in time"
        )


def make_settings(knobs: Knobs, round_number: int) -> Settings:
    """Knobs -> plain values; `default` becomes what the objective or the KL's place says."""
    objective = OBJECTIVES[knobs.loss]

    def chosen(value: str, default: str) -> str:
        return default if value == "default" else value

    placement = chosen(knobs.kl_placement, objective.kl_placement)
    same = set(Settings.__dataclass_fields__) & set(Knobs.model_fields)
    values = {name: getattr(knobs, name) for name in same} | {
        "kl_placement": placement,
        "kl_estimator": chosen(knobs.kl_estimator, FITTING[placement][0]),
    }
    return Settings(
        objective=objective,
        aggregation=chosen(knobs.loss_aggregation, objective.aggregation),
        clip=Clip(knobs.clip_eps_lo, knobs.clip_eps_hi, knobs.tau_pos, knobs.tau_neg, knobs.beta),
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


def load_learner(
    start: Path, reward_model: Path, knobs: Knobs, device: torch.device
) -> tuple[Learner, TrainerState]:
    """Policy, critic where the objective needs one, optimizers as the last round left them."""
    state, trust = load_trainer(start), knobs.model.trust_remote_code
    if state.rounds and (base_of(start) != start) != (knobs.lora is not None):
        was, told = ("whole", "set") if knobs.lora else ("by adapters", "null")
        raise BadKnob(
            "lora", f"is {told}, but {start} was trained {was}; expected its round to be run again"
        )
    if state.rounds and not state.optimizers:
        click.echo(f"{start}: no moments were kept; this round starts with fresh ones")
    home = start_device(device, knobs.shard)
    policy, critic = load_policy(start, knobs.attention, home, trust), None
    seed_everything(knobs.seed, "optimize", "adapters", "policy")
    make_trainable(policy, start, knobs.lora, "lora")
    if OBJECTIVES[knobs.loss].critic:
        critic = load_critic(start, reward_model, knobs, home)
    learner = Learner(policy, critic, {})
    for name, model in (("policy", policy), ("critic", critic)):
        if model is not None:
            if knobs.gradient_checkpointing:
                recompute_layers(model)
            if knobs.shard:
                shard(model, device)
            learner.optimizers[name] = adamw(model, knobs.lr, knobs.weight_decay)
            if name in state.optimizers:
                load_optimizer(state.optimizers[name], learner.optimizers[name], model)
    return learner, state


def load_critic(
    start: Path, reward_model: Path, knobs: Knobs, device: torch.device
) -> torch.nn.Module:
    """The last round's critic, or a new one from where the knob says."""
    trained, trust = load_trainer(start).critic, knobs.model.trust_remote_code
    if trained is not None or knobs.critic == "reward_model":
        folder = trained or reward_model
        critic = load_scorer(folder, knobs.attention, device, trust)
    else:
        folder = start
        critic = new_scorer(folder, knobs.attention, device, trust, zero_head=True)
    seed_everything(knobs.seed, "optimize", "adapters", "critic")
    make_trainable(critic, folder, knobs.lora, "lora")
    return critic


def pairs(learner: Learner) -> dict:
    """Optimizer and model by name, as checkpoints take them."""
    return {
        name: (optimizer, getattr(learner, name)) for name, optimizer in learner.optimizers.items()
    }


def curve_row(step: int, round_number: int, record: StepRecord) -> dict:
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


def round_figures(
    targets: Targets, stats: CompletionStats, steps: list[dict], settings: Settings
) -> dict:
    """The round's figures; each is defined in docs/metrics.md."""
    used, lengths, means = targets.used, targets.lengths, Means()
    groups = [rows for rows in rows_of_groups(targets.groups, targets.scorable) if len(rows)]
    flat = [not has_spread(targets.rewards[rows]) for rows in groups]
    advantages = torch.cat(parts_used(targets.advantages, used))
    for step in steps:
        means.add(**{name: step[name] for name in ("loss", "grad_norm", "value_loss")})
    return {
        "steps": len(steps),
        "epochs": steps[-1]["epoch"] + 1,
        "reward_shaped": targets.rewards[targets.scorable].mean().item(),
        "advantage_std": advantages.std().item() if len(advantages) > 1 else None,
        "groups_without_spread": sum(flat) / len(flat),
        "groups_left_out": sum(not used[rows].any() for rows in groups),
        "completions_used": int(used.sum()),
        "unscorable": int((~targets.scorable).sum()),
        "ratio_mean": token_mean(stats.ratio_mean, lengths),
        "ratio_max": stats.ratio_max[~stats.ratio_max.isnan()].max().item(),
        "clipped_fraction": token_mean(stats.clipped_fraction, lengths),
        "kl": token_mean(stats.kl, lengths),
        "kl_ref": token_mean(stats.kl_ref, lengths) if settings.beta > 0 else None,
        "entropy": token_mean(stats.entropy, lengths),
        "loss": means.of("loss"),
        "grad_norm": means.of("grad_norm"),
        "lr": steps[-1]["lr"],
        "value_loss": means.of("value_loss"),
        "explained_variance": explained(targets),
        "skipped": sum(step["skipped"] for step in steps),
        **sampler_figures(targets, settings),
    }


def sampler_figures(targets: Targets, settings: Settings) -> dict[str, float]:
    """How far another engine's sampling was from the policy; none for our own."""
    if targets.gaps is None:
        return {}
    how = (settings.sampler_correction, settings.sampler_correction_cap)
    return correction_figures(targets.gaps, targets.used, *how)


def explained(targets: Targets) -> float | None:
    """Explained variance of the old values over the scorable completions; None without a critic."""
    if targets.values_old is None:
        return None
    parts = (targets.values_old, targets.returns)
    return explained_variance(*(parts_used(part, targets.used) for part in parts))


def parts_used(parts: list[torch.Tensor], used: torch.Tensor) -> list[torch.Tensor]:
    """The parts of the completions that were used: others have no advantage and no return."""
    return [part for part, kept in zip(parts, used.tolist(), strict=True) if kept]


def update_rows(rows: Rows, targets: Targets, stats: CompletionStats, round_number: int):
    """One row per completion, in the order of the buffer; undefined figures are null."""

    def known(value: torch.Tensor) -> float | None:
        return None if value.isnan() else value.item()

    for i, row in enumerate(rows):
        yield {
            "round": round_number,
            "group": row["group"],
            "sample": row["sample"],
            "reward_shaped": known(targets.rewards[i]),
            "advantage": targets.advantages[i].tolist(),
            "ratio": None if stats.ratios[i] is None else stats.ratios[i].tolist(),
            "ratio_mean": known(stats.ratio_mean[i]),
            "ratio_max": known(stats.ratio_max[i]),
            "clipped_fraction": known(stats.clipped_fraction[i]),
            "kl": known(stats.kl[i]),
            "used": bool(targets.used[i]),
        }


if __name__ == "__main__":
    optimize()
