"""Stage `score_answers@x`: best of n, of the answers that a reward model picks (`best_of_n`).

Reads   the tables of data/evaluations, a reward model, the held-out prompts that they answer
Knobs   rounds and branches (which tables there are), evaluate (the prompts), max_new_tokens, seed,
        score_batch_size, device, precision, threads, attention, trust_remote_code
Writes  figures of every table: mean, picked and best accuracy

No answer is sampled for it, and nothing that trains depends on it.
"""

from pathlib import Path

import click
import torch

from stages.base import params
from stages.base.clones import bring_outputs
from stages.base.command import Stage, paths, say
from stages.base.contents import check_contents, check_vocabulary
from stages.base.errors import InputError
from stages.base.metrics import write_json
from stages.base.tables import EVALUATIONS, iterate_batches
from stages.base.tokenizers import load_tokenizer
from stages.knobs.score_answers import Knobs
from stages.models.checkpoints import load_scorer
from stages.models.compute import accelerator as make_accelerator
from stages.models.compute import vocabulary_of
from stages.models.scorers import by_parts, scores
from stages.reward.outcome import ranking
from stages.rollouts.prompts import context_limit, load_prompts


@click.command(cls=Stage)
@paths("--evaluations", "--reward-model", "--task", "--figures")
def score_answers(evaluations: Path, reward_model: Path, task: Path, figures: Path) -> None:
    """Let a reward model pick among the sampled answers to held-out prompts."""
    knobs = params.load(Knobs)
    others = dict.fromkeys(("reward_models", "labelled", "best_of_n"), {})
    bring_outputs(others | knobs.model_dump(), evaluations)
    trust = knobs.model.trust_remote_code
    accelerator = make_accelerator(knobs.device, knobs.precision, knobs.threads)
    tokenizer = load_tokenizer(reward_model, trust)
    device = accelerator.device
    scorer = load_scorer(reward_model, knobs.attention, device, trust, knobs.precision)
    limit = context_limit(scorer, knobs.max_new_tokens)
    prompts, _ = load_prompts(knobs.evaluate, task, tokenizer, limit, knobs.seed)
    asked = {prompt.index: prompt for prompt in prompts}
    names = ["sft", *(f"round-{key}" for key in knobs.rounds)]
    names += [f"direct-{key}" for key in knobs.branches]
    sizes, found = (knobs.score_batch_size, knobs.forward_max_tokens), {}
    with accelerator.autocast(), torch.no_grad():
        for name in names:
            path = evaluations / f"{name}.parquet"
            largest = check_contents(path, EVALUATIONS)
            check_vocabulary(path, largest, vocabulary_of(scorer), reward_model)
            found[name] = best_of_n(scorer, path, asked, sizes)
    write_json(figures, found)
    say(found[names[-1]], evaluation=names[-1])


def best_of_n(scorer, path: Path, prompts: dict, sizes: tuple[int, int | None]) -> dict:
    """Figures of the sampled answers of an evaluation that a rule could check; none: {}.

    Of a prompt's answers that of the highest score is picked; where several share it, the mean of
    them. `prompts` by their row number; `sizes` are the answers of a batch, and the most tokens of
    a pass, padding included.
    """
    found, right, numbers = [], [], []
    size, limit = sizes
    for batch in iterate_batches(path, EVALUATIONS, size):
        rows = [row for row in batch.to_pylist() if checked(row)]
        for row in rows:
            prompt = prompts.get(row["prompt_index"])
            if prompt is None or prompt.text != row["prompt"]:
                raise InputError(
                    f"{path}: prompt {row['prompt_index']} is {row['prompt']!r}, expected that row"
                    " of evaluate.dataset"
                )
            row["prompt_ids"] = prompt.ids
        if rows:
            found += by_parts(lambda part: (scored(scorer, part),), rows, limit)[0]
        right += [row["correct"] for row in rows]
        numbers += [row["prompt_index"] for row in rows]
    if not found:
        return {}
    labels = torch.tensor(right).long()
    picked, ordered = ranking(torch.tensor(found), labels, numbers)
    mean, _ = ranking(torch.zeros(len(labels)), labels, numbers)
    best, _ = ranking(labels, labels, numbers)
    shares = {"accuracy_mean": mean, "accuracy_picked": picked, "accuracy_best": best}
    return shares | {"pairs_in_order": ordered, "answers": len(labels)}


def checked(row: dict) -> bool:
    """Whether an answer was sampled, and a rule could tell if it is right."""
    return not row["greedy"] and row["reward_correctness"] is not None


def scored(scorer, rows: list[dict]) -> list[float]:
    """The score of each answer."""
    ids = ([row[name] for row in rows] for name in ("prompt_ids", "completion_ids"))
    return scores(scorer, *ids).tolist()


if __name__ == "__main__":
    score_answers()
