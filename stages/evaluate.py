"""Stages `evaluate@k` and `evaluate_sft`: answers of a policy to held-out prompts.

Reads   a policy folder, held-out prompts (the task's, or what evaluate.dataset names)
Knobs   evaluate, max_new_tokens, verifier, seed, device, precision, threads, attention,
        trust_remote_code
Writes  the answers, one greedy and some sampled a prompt (base/tables.py: EVALUATIONS), figures

Every policy is asked with the same random draws: what differs between two rounds is the policy.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from stages.base import params
from stages.base.chunks import chunks
from stages.base.command import Stage, paths, progress, say
from stages.base.kept import Kept
from stages.base.metrics import Means, write_json
from stages.base.scratch import work_of
from stages.base.tables import EVALUATIONS, write_table
from stages.base.tokenizers import load_tokenizer
from stages.knobs.evaluate import Knobs
from stages.models.checkpoints import load_policy
from stages.models.compute import accelerator as make_accelerator
from stages.models.packing import packed
from stages.rollouts.engine import Prompt, draws_of, groups_at_once, sample_groups, stop_ids
from stages.rollouts.prompts import context_limit, load_prompts, reward_columns
from stages.rollouts.rewards import Rules, find_verifier
from stages.rollouts.sampling import Completion, Sampling


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
    model = load_policy(policy, knobs.attention, accelerator.device, trust, knobs.precision)
    limit = context_limit(model, knobs.max_new_tokens)
    prompts, intake = load_prompts(knobs.evaluate, task, tokenizer, limit, knobs.seed)
    name, inputs = f"evaluate-{policy.name}", [policy, task, source]
    kept = Kept(work_of(name, inputs, knobs, accelerator.device, prompts))
    greedy, sampled = Means(), Means()

    def rest(done: int, _) -> Iterator[tuple[list[dict], dict]]:
        for rows in answer_rows(model, tokenizer, verify, prompts, knobs, done):
            yield rows, {}

    def rows() -> Iterator[dict]:
        for batch, _ in kept.rows("answers", EVALUATIONS, rest):
            for row in batch:
                (greedy if row["greedy"] else sampled).add(**checked(row))
                yield row

    with kept.watching(), accelerator.autocast(), packed(model):
        write_table(out, EVALUATIONS, rows(), {"stage": "evaluate", "policy": str(policy)})
    found = {
        "accuracy_sampled": sampled.of("accuracy"),
        "accuracy_greedy": greedy.of("accuracy"),
        "reward_correctness": sampled.of("score"),
        "length": sampled.of("length"),
        "finished": sampled.of("finished"),
        "prompts": intake.figures(),
    }
    write_json(figures, found)
    kept.done()
    say(found, policy=policy)


def answer_rows(model, tokenizer, verify, prompts, knobs: Knobs, done: int) -> Iterator[list[dict]]:
    """One greedy row, then the sampled ones, of each prompt; batches after the first `done`."""
    chosen = knobs.evaluate
    stops = stop_ids(model)
    limits = (knobs.max_new_tokens, stops, knobs.forward_max_tokens)
    sampling = Sampling(chosen.temperature, 1.0, 0, 0.0, *limits)
    rules = Rules(verify, None, knobs.max_new_tokens, 0)
    at_once = groups_at_once(chosen.batch_size, chosen.samples)
    shape, means = (chosen.samples, knobs.max_new_tokens), Means()
    parts = chunks(range(done * at_once, len(prompts)), at_once)
    bar = progress(parts, "evaluate", math.ceil(len(prompts) / at_once), done)
    for numbers in bar:
        asked = [prompts[i] for i in numbers]
        greedy = sample_groups(model, asked, None, sampling)
        draws = draws_of(knobs.seed, "evaluate", 0, numbers, shape)
        sampled = sample_groups(model, asked, draws, sampling)
        rows = []
        for prompt, first, others in zip(asked, greedy, sampled, strict=True):
            for number, completion in enumerate([*first, *others]):
                row = answer_row(tokenizer, rules, knobs.verifier, prompt, number, completion)
                means.add(accuracy=row["correct"])
                rows.append(row)
        yield rows
        answers = [completion for group in [*greedy, *sampled] for completion in group]
        bar.tell(sum(len(completion.ids) for completion in answers), **means.known())


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


def checked(row: dict) -> dict[str, float | None]:
    """What an answer adds to the figures; accuracy and score are None where nothing checks it."""
    score = row["reward_correctness"]
    return {
        "accuracy": None if score is None else row["correct"],
        "score": score,
        "length": len(row["completion_ids"]),
        "finished": row["finished"],
    }


if __name__ == "__main__":
    evaluate()
