"""Stage `score`: turn rollouts into the replay buffer.

Reads   data/rollouts/round-k.parquet, models/rm, models/sft (the reference), the policy folder (its
        critic)
Knobs   rewards, beta (0: no reference), critic, temperature, score_batch_size, device, precision,
        threads, attention, trust_remote_code
Writes  data/buffers/round-k.parquet (base/tables.py: BUFFERS), figures

One model is in memory at a time. What depends on the objective is left to `optimize`: advantages,
KL shaping, clip.
"""

import math
from collections.abc import Callable
from pathlib import Path

import click

from stages.base import params
from stages.base.command import Stage, paths, progress, say
from stages.base.metrics import write_json
from stages.base.tables import (
    BUFFERS,
    ROLLOUTS,
    iterate_batches,
    open_table,
    read_provenance,
    write_table,
)
from stages.knobs.score import Knobs
from stages.models.checkpoints import load_policy, load_scorer
from stages.models.compute import accelerator as make_accelerator
from stages.models.scoring import reference_log_probs, scores_and_values, total_reward
from stages.models.trainer_state import load_trainer


@click.command(cls=Stage)
@paths("--rollouts", "--policy", "--reward-model", "--reference", "--out", "--figures")
def score(
    rollouts: Path, policy: Path, reward_model: Path, reference: Path, out: Path, figures: Path
) -> None:
    """Score one round of completions."""
    knobs = params.load(Knobs)
    trust = knobs.model.trust_remote_code
    provenance = read_rollout_provenance(rollouts)
    with open_table(rollouts, ROLLOUTS) as file:
        total = file.metadata.num_rows
    accelerator = make_accelerator(knobs.device, knobs.precision, knobs.threads)

    def each_batch(name: str, model, measure: Callable) -> list:
        found = []
        with accelerator.autocast():
            batches = iterate_batches(rollouts, ROLLOUTS, knobs.score_batch_size)
            bar = progress(batches, name, math.ceil(total / knobs.score_batch_size))
            for batch in bar:
                found += measure(model, batch.to_pylist())
                lists = (batch["prompt_ids"], batch["completion_ids"])
                bar.tell(sum(len(ids.flatten()) for ids in lists))
        return found

    critic_path = load_trainer(policy).critic
    shared = knobs.critic == "reward_model" and critic_path is None
    fresh = knobs.critic == "policy" and critic_path is None  # its head is 0, and so are its values
    scores = values = log_probs = None
    if knobs.rewards.reward_model is not None or shared:
        model = load_scorer(reward_model, knobs.attention, accelerator.device, trust)
        both = each_batch(
            "reward model",
            model,
            lambda m, rows: list(zip(*scores_and_values(m, rows), strict=True)),
        )
        if knobs.rewards.reward_model is not None:
            scores = [pair[0] for pair in both]
        values = [pair[1] for pair in both] if shared else None
        del model
    if knobs.beta > 0:
        model = load_policy(reference, knobs.attention, accelerator.device, trust)
        log_probs = each_batch(
            "reference", model, lambda m, rows: reference_log_probs(m, rows, knobs.temperature)
        )
        del model
    if knobs.critic is not None and critic_path is not None:
        model = load_scorer(critic_path, knobs.attention, accelerator.device, trust)
        values = each_batch("critic", model, lambda m, rows: scores_and_values(m, rows)[1])
        del model

    weights = knobs.rewards.model_dump()
    tally = {"reward": [], "reward_model": []}

    def rows():
        index = 0
        for batch in iterate_batches(rollouts, ROLLOUTS):
            for row in batch.to_pylist():
                row["reward_model"] = None if scores is None else scores[index]
                row["reward"] = total_reward(row, weights)
                row["log_probs_ref"] = None if log_probs is None else log_probs[index]
                row["values_old"] = None if values is None else values[index]
                if fresh:
                    row["values_old"] = [0.0] * len(row["completion_ids"])
                for name, kept in tally.items():
                    if row[name] is not None:
                        kept.append(row[name])
                index += 1
                yield row

    count = write_table(out, BUFFERS, rows(), provenance | {"stage": "score"})
    found = {"completions": count, "unscorable": count - len(tally["reward"])}
    found |= {name: sum(kept) / len(kept) if kept else None for name, kept in tally.items()}
    write_json(figures, found)
    say(found)


def read_rollout_provenance(path: Path) -> dict:
    """The provenance of a rollout table, once the table was checked."""
    next(iterate_batches(path, ROLLOUTS, 1), None)
    return read_provenance(path)


if __name__ == "__main__":
    score()
