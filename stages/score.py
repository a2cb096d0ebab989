"""Stage `score`: turn rollouts into the replay buffer.

Reads   data/rollouts/round-k.parquet, models/rm, models/sft (the reference), the policy folder (its
        critic)
Knobs   rewards, beta (0: no reference), critic, temperature, score_batch_size, device, precision,
        threads, attention, trust_remote_code
Writes  data/buffers/round-k.parquet (base/tables.py: BUFFERS), figures

One model is in memory at a time. A reward model by adapters for the reference is one model with it:
one pass over the rows reads them with adapters on and off. What depends on the objective is left to
`optimize`: advantages, KL shaping, clip.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import click
import pyarrow as pa
from accelerate import Accelerator

from stages.base import params
from stages.base.bases import base_of
from stages.base.command import SharedStage, launched, paths, progress, say
from stages.base.contents import (
    Largest,
    check_contents,
    check_positions,
    check_provenance,
    check_vocabulary,
)
from stages.base.kept import Kept
from stages.base.metrics import Means, write_json
from stages.base.positions import positions_of
from stages.base.scratch import work_of
from stages.base.tables import (
    BUFFERS,
    ROLLOUTS,
    iterate_batches,
    open_table,
    write_table,
)
from stages.knobs.score import Knobs
from stages.models import processes
from stages.models.adapters import adapters_off
from stages.models.checkpoints import load_policy, load_scorer, scorer_on
from stages.models.compute import accelerator as make_accelerator
from stages.models.compute import vocabulary_of
from stages.models.scorers import by_parts, reference_log_probs, scores_and_values
from stages.models.trainer_state import load_trainer


@click.command(cls=SharedStage)
@paths("--rollouts", "--policy", "--reward-model", "--reference", "--out", "--figures")
def score(
    rollouts: Path, policy: Path, reward_model: Path, reference: Path, out: Path, figures: Path
) -> None:
    """Score one round of completions."""
    knobs = params.load(Knobs)
    if launched(params.processes(), knobs.threads):
        return
    largest = check_contents(rollouts, ROLLOUTS)
    provenance = check_provenance(rollouts, "prompt_cursor")
    accelerator = make_accelerator(knobs.device, knobs.precision, knobs.threads)
    name, inputs = f"score-{rollouts.stem}", [rollouts, policy, reward_model, reference]
    kept = Kept(work_of(name, inputs, knobs, accelerator.device))
    models = Measurement(rollouts, largest, knobs, accelerator, kept)
    with kept.watching():
        columns = models.columns(policy, reward_model, reference)
    if processes.number():
        return  # the first one writes
    means = Means()
    rows = buffer_rows(rollouts, columns, knobs.rewards.model_dump(), means)
    count = write_table(out, BUFFERS, rows, provenance | {"stage": "score"})
    found = {"completions": count, "unscorable": count - means.counts.get("reward", 0)}
    found |= {name: means.of(name) for name in ("reward", "reward_model")}
    write_json(figures, found)
    kept.done()
    say(found)


@dataclass(frozen=True)
class Measurement:
    """What models say of the completions of a rollout table, batch by batch."""

    rollouts: Path
    largest: Largest
    knobs: Knobs
    accelerator: Accelerator
    kept: Kept

    def columns(self, policy: Path, reward_model: Path, reference: Path) -> dict[str, list | None]:
        """The buffer's columns that models measure, one entry a completion; None: not asked for.

        One model is in memory at a time. A critic that has been trained gives its own values; a new
        one those of what it starts from: the reward model's, or 0 from the policy's head of zeros.
        """
        knobs, critic = self.knobs, load_trainer(policy).critic
        start = knobs.critic if critic is None else None
        columns = dict.fromkeys(("reward_model", "log_probs_ref", "values_old"))
        scored = knobs.rewards.reward_model is not None or start == "reward_model"
        compared = knobs.beta > 0
        # A model that brings its own code says itself how its scorer is made.
        own_code = knobs.model.trust_remote_code
        on_reference = reward_model != reference and base_of(reward_model) == reference
        if scored and compared and on_reference and not own_code:
            scores, values, columns["log_probs_ref"] = self.in_one_pass(reward_model, reference)
        else:
            if scored:
                scores, values = self.scores_and_values("reward model", reward_model)
            if compared:
                columns["log_probs_ref"] = self.reference_log_probs(reference)
        if knobs.rewards.reward_model is not None:
            columns["reward_model"] = scores
        if start == "reward_model":
            columns["values_old"] = values
        if start == "policy":
            columns["values_old"] = self.zeros()
        elif knobs.critic is not None and critic is not None:
            columns["values_old"] = self.scores_and_values("critic", critic)[1]
        return columns

    def check_fit(self, model, folder: Path) -> None:
        """Raise InputError for a row that a model cannot read."""
        check_vocabulary(self.rollouts, self.largest, vocabulary_of(model), folder)
        check_positions(self.rollouts, ROLLOUTS, positions_of(model.config), folder)

    def scores_and_values(self, name: str, folder: Path) -> tuple[list, list]:
        """A score of each completion, and the values before each of its tokens."""
        trust = self.knobs.model.trust_remote_code
        device, precision = self.accelerator.device, self.knobs.precision
        model = load_scorer(folder, self.knobs.attention, device, trust, precision)
        self.check_fit(model, folder)
        columns = ("reward_model", "values_old")
        return self._each_batch(name, columns, lambda rows: scores_and_values(model, rows))

    def in_one_pass(self, reward_model: Path, reference: Path) -> list[list]:
        """Scores, values and reference log-probs; the scorer is the reference with adapters."""
        policy, temperature = self.load_reference(reference), self.knobs.temperature
        scorer = scorer_on(policy, reward_model)
        columns = ("reward_model", "values_old", "log_probs_ref")

        def measure(rows: list[dict]) -> tuple[list, list, list]:
            found = scores_and_values(scorer, rows)
            with adapters_off(scorer):
                return (*found, reference_log_probs(policy, rows, temperature))

        return self._each_batch("reward model and reference", columns, measure)

    def load_reference(self, folder: Path):
        trust = self.knobs.model.trust_remote_code
        device, precision = self.accelerator.device, self.knobs.precision
        model = load_policy(folder, self.knobs.attention, device, trust, precision)
        self.check_fit(model, folder)
        return model

    def reference_log_probs(self, folder: Path) -> list[list[float]]:
        model, temperature = self.load_reference(folder), self.knobs.temperature

        def measure(rows: list[dict]) -> tuple[list]:
            return (reference_log_probs(model, rows, temperature),)

        return self._each_batch("reference", ("log_probs_ref",), measure)[0]

    def zeros(self) -> list[list[float]]:
        """A value of 0 before each token, as a head of zeros gives it."""
        lengths = []
        for batch in iterate_batches(self.rollouts, ROLLOUTS, columns=["completion_ids"]):
            lengths += batch["completion_ids"].value_lengths().to_pylist()
        return [[0.0] * length for length in lengths]

    def _each_batch(
        self, name: str, columns: Sequence[str], measure: Callable[[list[dict]], Sequence[list]]
    ) -> list[list]:
        """Columns of the buffer whole, of what `measure(rows)` gives of each batch."""
        size = self.knobs.score_batch_size
        with open_table(self.rollouts, ROLLOUTS) as file:
            total = math.ceil(file.metadata.num_rows / size)

        def rows_of(batch: pa.RecordBatch) -> tuple[int, list[dict]]:
            found = by_parts(measure, batch.to_pylist(), self.knobs.forward_max_tokens)
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*found, strict=True)]
            lists = (batch["prompt_ids"], batch["completion_ids"])
            return sum(len(ids.flatten()) for ids in lists), rows

        def rest(done: int, _) -> Iterator[tuple[list[dict], dict]]:
            batches = islice(iterate_batches(self.rollouts, ROLLOUTS, size), done, None)
            bar = progress(processes.in_turn(rows_of, batches), name, total, done)
            for tokens, rows in bar:
                yield rows, {}
                bar.tell(tokens)

        schema = pa.schema([BUFFERS.field(column) for column in columns])
        with self.accelerator.autocast():
            rows = [row for batch, _ in self.kept.rows(name, schema, rest) for row in batch]
        return [[row[column] for row in rows] for column in columns]


def buffer_rows(rollouts: Path, columns: dict, weights: dict, means: Means) -> Iterator[dict]:
    """The rollouts with what was measured and the reward that it comes to."""
    index = 0
    for batch in iterate_batches(rollouts, ROLLOUTS):
        for row in batch.to_pylist():
            row |= {name: kept and kept[index] for name, kept in columns.items()}
            row["reward"] = total_reward(row, weights)
            means.add(reward=row["reward"], reward_model=row["reward_model"])
            index += 1
            yield row


def column_of(component: str) -> str:
    """Name of a reward component -> its column: `correctness` -> `reward_correctness`."""
    return "reward_" + component.removeprefix("reward_")


def total_reward(row: dict, weights: dict[str, float | None]) -> float | None:
    """Weighted sum of a row's components; None (unscorable) where one that counts is null."""
    total = 0.0
    for name, weight in weights.items():
        if weight is None:
            continue
        if row[column_of(name)] is None:
            return None
        total += weight * row[column_of(name)]
    return total


if __name__ == "__main__":
    score()
