"""Stages `evaluate@k` and `evaluate_sft`: answers of a policy to held-out prompts.

Reads   a policy folder, held-out prompts (the task's, or what evaluate.dataset names)
Knobs   evaluate, max_new_tokens, verifier, seed, device, precision, threads, attention,
        trust_remote_code
Writes  the answers, one greedy and some sampled a prompt (base/tables.py: EVALUATIONS), figures

Every policy is asked with the same random draws: what differs between two rounds is the policy.
"""

import math
import sys
from pathlib import Path

import click
import torch

from stages.base import params
from stages.base.chunks import chunks
from stages.base.command import Stage, paths, progress, say
from stages.base.metrics import write_json
from stages.base.tables import EVALUATIONS, write_table
from stages.base.tokenizers import load_tokenizer
from stages.knobs.evaluate import Knobs
from stages.models.checkpoints import load_policy
from stages.models.compute import accelerator as make_accelerator
from stages.rollouts.engine import Prompt
from stages.rollouts.prompts import context_limit, load_prompts, reward_columns
from stages.rollouts.rewards import Rules, find_verifier
from stages.rollouts.sampling import Completion, Sampling, sample, uniforms


@click.command(cls=Stage)
@paths("--policy", "--task", "--source", "--out", "--figures")
def evaluate(policy: Path, task: Path, source: Path, out: Path, figures: Path) -> None:
    """Answer held-out prompts and check the answers."""
    knobs = params.load(Knobs)
    trust = knobs.model.trust_remote_code
    sys.path.insert(0, str(source))
    verify = find_verifier(knobs.verifier, knobs.verifier_pattern)
    accelerator = make_accelerator(knobs.device, knobs.precision, knobs.threads)
    tokenizer = load_tokenizer(policy, trust)
    model = load_policy(policy, knobs.attention, accelerator.device, trust)
    limit = context_limit(model, knobs.max_new_tokens)
    prompts, intake = load_prompts(knobs.evaluate, task, tokenizer, limit, knobs.seed)
    tally = {"greedy": Answers(), "sampled": Answers()}

    def rows():
        with accelerator.autocast():
            for row in answer_rows(model, tokenizer, verify, prompts, knobs):
                tally["greedy" if row["greedy"] else "sampled"].add(row)
                yield row

    write_table(out, EVALUATIONS, rows(), {"stage": "evaluate", "policy": str(policy)})
    found = {
        "accuracy_sampled": tally["sampled"].accuracy(),
        "accuracy_greedy": tally["greedy"].accuracy(),
        "reward_correctness": tally["sampled"].mean("score"),
        "length": tally["sampled"].mean("length"),
        "finished": tally["sampled"].mean("finished"),
        "prompts": intake.figures(),
    }
    write_json(figures, found)
    say(found, policy=policy)


def answer_rows(model, tokenizer, verify, prompts, knobs: Knobs):
    """One greedy row, then the sampled ones, of each prompt."""
    stops = model.generation_config.eos_token_id
    stops = tuple([stops] if isinstance(stops, int) else stops)
    sampling = Sampling(knobs.evaluate.temperature, 1.0, 0, 0.0, knobs.max_new_tokens, stops)
    rules = Rules(verify, None, knobs.max_new_tokens, 0)
    count = knobs.evaluate.samples
    at_once = max(1, knobs.evaluate.batch_size // count)
    shape = (count, knobs.max_new_tokens)
    asked = right = 0
    parts = chunks(range(len(prompts)), at_once)
    bar = progress(parts, "evaluate", math.ceil(len(prompts) / at_once))
    for numbers in bar:
        ids = [prompts[i].ids for i in numbers]
        draws = torch.stack([uniforms(knobs.seed, "evaluate", 0, i, shape) for i in numbers])
        greedy = sample(model, ids, None, sampling)
        sampled = sample(model, ids, draws, sampling)
        for place, i in enumerate(numbers):
            answers = [greedy[place], *sampled[place * count : (place + 1) * count]]
            for number, completion in enumerate(answers):
                row = answer_row(tokenizer, rules, knobs.verifier, prompts[i], number, completion)
                asked, right = asked + 1, right + row["correct"]
                yield row
        tokens = sum(len(completion.ids) for completion in [*greedy, *sampled])
        bar.tell(tokens, accuracy=right / asked)


def answer_row(
    tokenizer, rules: Rules, verifier: str, prompt: Prompt, number: int, completion: Completion
) -> dict:
    """A row of the table; answer number 0 is the greedy one."""
    text = tokenizer.decode(completion.ids, skip_special_tokens=True)
    columns = reward_columns(rules, verifier, prompt, text, len(completion.ids))
    score = columns["reward_correctness"]
    return {
        "prompt_index": prompt.index,
        "sample": max(0, number - 1),
        "greedy": number == 0,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "completion": text,
        "completion_ids": completion.ids,
        "finished": completion.finished,
        "reward_correctness": score,
        "correct": score is not None and score >= 1,
    }


class Answers:
    """Sums over answers."""

    def __init__(self):
        self.count = self.scored = 0
        self.sums = {"correct": 0.0, "score": 0.0, "length": 0.0, "finished": 0.0}

    def add(self, row: dict) -> None:
        self.count += 1
        self.sums["correct"] += row["correct"]
        self.sums["length"] += len(row["completion_ids"])
        self.sums["finished"] += row["finished"]
        if row["reward_correctness"] is not None:
            self.scored += 1
            self.sums["score"] += row["reward_correctness"]

    def accuracy(self) -> float | None:
        """Share of the answers that were right, of those that could be checked."""
        return self.sums["correct"] / self.scored if self.scored else None

    def mean(self, name: str) -> float | None:
        count = self.scored if name == "score" else self.count
        return self.sums[name] / count if count else None


if __name__ == "__main__":
    evaluate()
