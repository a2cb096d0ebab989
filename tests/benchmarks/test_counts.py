"""What a round costs, counted and not timed: passes, tokens, padding, models in memory.

A pass is one call of a model's backbone. The task's words have three letters, so that its prompts
have one length and nothing here depends on padding unless it says so.
"""

import gc
import importlib
import random
import weakref
from contextlib import chdir
from dataclasses import dataclass, field
from itertools import pairwise
from os.path import commonprefix

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from torch.nn.modules.module import register_module_forward_hook
from transformers import LlamaModel

from stages.base import command
from stages.base.tokenizers import load_tokenizer
from stages.models import checkpoints, forward
from stages.models.checkpoints import new_scorer, save_model
from stages.training.batching import WINDOW, plan_epoch
from tests.helpers.tiny import command_line, small_params, write

PROMPTS, SAMPLES, CAP, MICRO = 4, 3, 6, 6
KNOBS = {
    "prompts_per_step": PROMPTS,
    "num_rollouts": SAMPLES,
    "max_new_tokens": CAP,
    "train_batch_size": MICRO,
}


@dataclass
class Seen:
    """Shape (rows, tokens) of each pass of a stage, and the most models alive at once."""

    shapes: list[tuple[int, int]] = field(default_factory=list)
    models: int = 0

    @property
    def tokens(self) -> int:
        return sum(rows * tokens for rows, tokens in self.shapes)


class Project:
    """A folder with a base model and a reward model, in which the stages of a round are watched."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.patch = folder, monkeypatch
        (folder / "data" / "source").mkdir(parents=True)
        for stage in ("prepare_task", "prepare_model"):
            self.run(stage)
        base, scorer = folder / "models" / "base", folder / "models" / "rm"
        scorer.mkdir()
        save_model(scorer, new_scorer(base, "sdpa", "cpu", zero_head=True), load_tokenizer(base))
        base.rename(folder / "models" / "sft")

    def run(self, stage: str, **knobs) -> Seen:
        script, options = command_line(stage)
        write(self.folder / "params.yaml", small_params(**KNOBS | knobs))
        main = getattr(importlib.import_module(f"stages.{script}"), script)
        words = [word for pair in options.items() for word in pair]
        seen, alive, load = Seen(), weakref.WeakSet(), checkpoints._load

        def look(module, args, kwargs, output):
            if isinstance(module, LlamaModel):
                seen.shapes.append(tuple(output.last_hidden_state.shape[:2]))

        def watched_load(*args, **kwargs):
            model = load(*args, **kwargs)
            alive.add(model)
            gc.collect()
            seen.models = max(seen.models, len(alive))
            return model

        handle = register_module_forward_hook(look, with_kwargs=True)
        with self.patch.context() as patch, chdir(self.folder):
            patch.setattr(checkpoints, "_load", watched_load)
            patch.setattr(checkpoints, "check_head", lambda model: None)
            result = CliRunner().invoke(main, words, catch_exceptions=False)
        handle.remove()
        assert result.exit_code == 0, result.output
        return seen

    def rows(self) -> list[dict]:
        return pq.read_table(self.folder / "data" / "rollouts" / "round-1.parquet").to_pylist()


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "stop_with_parent", lambda: None)
    threads = torch.get_num_threads()
    yield Project(tmp_path, monkeypatch)
    torch.set_num_threads(threads)


def prompt_tokens(rows: list[dict]) -> tuple[int, int]:
    """Tokens of what all prompts open with, and of the distinct prompts after it."""
    distinct = {tuple(row["prompt_ids"]) for row in rows}
    opening = min(len(commonprefix(list(distinct))), min(map(len, distinct)) - 1)
    return opening, sum(len(prompt) - opening for prompt in distinct)


def test_a_rollout_reads_each_prompt_once_and_takes_its_log_probs_on_the_way(project):
    seen, rows = project.run("rollout@1"), project.rows()
    longest = max(len(row["completion_ids"]) for row in rows)
    assert len(seen.shapes) == 1 + 1 + longest - 1  # the opening, the prompts, a token each
    opening, rest = prompt_tokens(rows)
    assert seen.shapes[0] == (1, opening)
    assert seen.shapes[1] == (PROMPTS, rest // PROMPTS)
    assert all(tokens == 1 for _, tokens in seen.shapes[2:])
    alive = [count for count, _ in seen.shapes[2:]]
    assert all(later <= earlier for earlier, later in pairwise([PROMPTS * SAMPLES, *alive]))


@pytest.mark.parametrize(("pays", "parts"), [(0, 3), (float("inf"), 2)])
def test_score_and_optimize_read_each_micro_batch_once(pays, parts, project, monkeypatch):
    """Parts of a pass: the opening, the distinct prompts, the completions; or the two in one."""
    project.run("rollout@1")
    monkeypatch.setattr(forward, "SHARING_PAYS", pays)
    scored = project.run("score@1")
    assert len(scored.shapes) == 2 * parts  # reward model, reference
    rows = project.rows()
    opening, rest = prompt_tokens(rows)
    longest = max(len(row["completion_ids"]) for row in rows)
    reads = rest if parts == 3 else rest * SAMPLES
    answers = PROMPTS * SAMPLES * (longest + longest - 1)  # the reward model reads the last token
    assert scored.tokens == 2 * (opening + reads) + answers

    learned = project.run("optimize@1")
    assert len(learned.shapes) == parts * PROMPTS * SAMPLES // MICRO
    twice = project.run("optimize@1", ppo_epochs=2)
    assert len(twice.shapes) == 2 * len(learned.shapes)
    micro = PROMPTS * SAMPLES // MICRO
    # A micro-batch holds whole groups; its prompts may open alike for a token more than all do.
    most = micro * opening + reads + PROMPTS * SAMPLES * (longest - 1)
    assert learned.tokens <= most + micro * 4


def test_passes_hold_no_more_tokens_than_the_knobs_say(project):
    """Each prompt of three letters has the same length, so that the limit is one on rows."""
    project.run("rollout@1")
    rows, limit = project.rows(), 2 * SAMPLES
    longest = max(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
    cap = {"forward_max_tokens": limit * (len(rows[0]["prompt_ids"]) + CAP)}

    def widest(seen) -> int:
        return max(count for count, _ in seen.shapes)

    assert widest(project.run("rollout@1", **cap)) == limit
    assert [row["completion_ids"] for row in project.rows()] == [r["completion_ids"] for r in rows]
    assert widest(project.run("score@1")) == PROMPTS * SAMPLES
    assert widest(project.run("score@1", forward_max_tokens=5 * longest + 1)) == 5
    assert widest(project.run("optimize@1")) == MICRO
    assert widest(project.run("optimize@1", train_max_tokens=4 * longest + 1)) == 4
    evaluation = project.run("evaluate@1", evaluate__samples=3, **cap)
    assert widest(evaluation) == limit < widest(project.run("evaluate@1", evaluate__samples=3))


def test_models_in_memory_at_once(project):
    assert project.run("rollout@1").models == 1
    assert project.run("score@1", critic="policy").models == 1
    assert project.run("optimize@1").models == 1
    assert project.run("optimize@1", loss="ppo").models == 2  # policy and critic


def test_batches_of_like_length_are_nearly_without_padding():
    numbers = random.Random(0)
    lengths = [numbers.randint(5, 200) for _ in range(4096)]

    def padded(batches) -> float:
        widths = [len(batch) * max(lengths[row] for row in batch) for batch in batches]
        return sum(widths) / sum(lengths)

    planned = [batch for step in plan_epoch(lengths, 16, 1, False, 1, "any") for batch in step]
    as_they_come = [range(start, start + 16) for start in range(0, 4096, 16)]
    assert padded(as_they_come) > 1.7
    assert padded(planned) < 1 + 1 / WINDOW
