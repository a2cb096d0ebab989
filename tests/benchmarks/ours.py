"""This project's side of a comparison, in a process of its own; prints one JSON line.

    python -m tests.benchmarks.ours sft --folder WORK/tiny --steps 100

`folder` holds what `workplace.py` put there: base/, params.yaml, sft.parquet, pairs.parquet. Works
run through the stages' own functions, with the knobs of that params.yaml. Figures are medians of
the second half of the steps.
"""

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import chain, islice
from pathlib import Path

BASE = Path("base")


class Enough(Exception):
    """The steps that a benchmark wanted were taken."""


class Clock:
    """Takes the place of a stage's log: times `steps` steps, counts the arithmetic of one more."""

    def __init__(self, steps: int):
        from torch.utils.flop_counter import FlopCounterMode

        self.steps, self.counter = steps, FlopCounterMode(display=False)
        self.stamps = [time.perf_counter()]

    def __call__(self, record: dict) -> None:
        self.stamps.append(time.perf_counter())
        if len(self.stamps) == self.steps + 1:
            self.counter.__enter__()
        elif len(self.stamps) > self.steps + 1:
            self.counter.__exit__(None, None, None)
            raise Enough

    def warm(self) -> dict[int, float]:
        """Number of each step of the second half -> its seconds."""
        seconds = [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)][: self.steps]
        return {i: seconds[i] for i in range(self.steps // 2, self.steps)}


def started(knobs):
    """The accelerator of these knobs, and its device."""
    from stages.models.compute import accelerator

    made = accelerator(knobs.device, knobs.precision, knobs.threads)
    return made, made.device


def supervised(stage, load, path: str, schema, steps: int, size_of, knobs, recipe) -> dict:
    """Train `stage` for so many steps: units per second, arithmetic per unit.

    `size_of(rows, numbers)` is what a step's rows come to, in the unit that is counted.
    """
    from stages.base.tables import random_access
    from stages.training.batching import pair_lengths, plan_epoch

    accelerator, device = started(knobs)
    with random_access(Path(path), schema) as rows:
        clock = Clock(steps)
        try:
            stage.train(accelerator, load(BASE, knobs.attention, device), rows, knobs, clock)
        except Enough:
            pass
        lengths = rows.lengths("input_ids") if "input_ids" in schema.names else None
        lengths = lengths or pair_lengths(rows)
        sizes = (recipe.train_batch_size, recipe.batch_acc, recipe.drop_last)
        plan = plan_epoch(lengths, *sizes, knobs.seed, stage.__name__.rpartition(".")[2], 0)
        count = [size_of(lengths, [i for part in step for i in part]) for step in plan]
    warm = clock.warm()
    rate = statistics.median(count[i] / seconds for i, seconds in warm.items())
    work = clock.counter.get_total_flops() / count[steps]
    return {"rate": rate, "flops_per_unit": work, "flops_s": work * rate}


def sft(args) -> dict:
    from stages import train_sft
    from stages.base import params
    from stages.base.tables import SFT
    from stages.knobs.train_sft import Knobs
    from stages.models.checkpoints import load_policy

    knobs = params.load(Knobs)

    def tokens(lengths, numbers):
        return sum(lengths[i] for i in numbers)

    path = "sft_all.parquet" if args.every_token else "sft.parquet"
    found = supervised(train_sft, load_policy, path, SFT, args.steps, tokens, knobs, knobs.sft)
    return {"tokens_s": found.pop("rate")} | found


def reward(args) -> dict:
    from stages import train_rm
    from stages.base import params
    from stages.base.tables import PAIRS
    from stages.knobs.train_rm import Knobs
    from stages.models.checkpoints import new_scorer

    knobs = params.load(Knobs)

    def pairs(_, numbers):
        return len(numbers)

    path = "pairs.parquet"
    found = supervised(train_rm, new_scorer, path, PAIRS, args.steps, pairs, knobs, knobs.rm)
    return {"pairs_s": found.pop("rate")} | found


def direct(args) -> dict:
    """DPO on the first `pairs` pairs; their reference is run before, in the same process."""
    from stages import train_direct
    from stages.base import params
    from stages.base.tables import SCORED_PAIRS, write_table
    from stages.knobs.train_direct import Knobs
    from stages.models.checkpoints import load_policy
    from stages.score_pairs import batches

    knobs, path = params.load(Knobs), "scored.parquet"
    accelerator, device = started(knobs)
    reference = load_policy(BASE, knobs.attention, device)
    with accelerator.autocast():
        sizes = (knobs.direct.train_batch_size, None)
        found = batches(reference, Path("pairs.parquet"), sizes, "reference")
        rows = islice(chain.from_iterable(found), args.pairs)
        write_table(Path(path), SCORED_PAIRS, rows, {})
    del reference

    def pairs(_, numbers):
        return len(numbers)

    sizes = (args.steps, pairs, knobs, knobs.direct)
    found = supervised(train_direct, load_policy, path, SCORED_PAIRS, *sizes)
    return {"pairs_s": found.pop("rate")} | found


class Round:
    """A policy with the engine, settings and optimizer of a round, as the stages make them."""

    def __init__(self, prompts: int):
        from stages import optimize, rollout
        from stages.base import params
        from stages.base.tokenizers import load_tokenizer
        from stages.knobs.optimize import Knobs as OptimizeKnobs
        from stages.knobs.rollout import Knobs
        from stages.models.adapters import make_trainable
        from stages.models.checkpoints import load_policy
        from stages.rollouts.prompts import load_prompts
        from stages.training.steps import adamw

        knobs, learning = params.load(Knobs), params.load(OptimizeKnobs)
        self.accelerator, self.device = started(knobs)
        self.tokenizer = load_tokenizer(BASE)
        self.policy = load_policy(BASE, knobs.attention, self.device)
        make_trainable(self.policy, BASE, learning.lora, "lora")
        task = Path("../prompts.jsonl")
        self.prompts, _ = load_prompts(knobs.prompts, task, self.tokenizer, 512, knobs.seed)
        rules = rollout.make_rules(knobs)
        self.engine = rollout.make_engine(self.policy, self.tokenizer, rules, knobs)
        self.settings = optimize.make_settings(learning, 1)
        self.optimizers = {"policy": adamw(self.policy, 1.0, learning.weight_decay)}
        self.wanted, self.cursor, self.steps, self.knobs = prompts, 0, 0, knobs

    def sample(self, number: int) -> list[dict]:
        """A round's rows, from weights in the precision that the stage loads them in."""
        from copy import deepcopy
        from dataclasses import replace

        from stages.models.checkpoints import DTYPES
        from stages.models.packing import packed

        exact = self.knobs.precision == "float32"
        reader = self.policy if exact else deepcopy(self.policy).to(DTYPES[self.knobs.precision])
        engine = replace(self.engine, policy=reader)  # counts into the same object
        with self.accelerator.autocast(), packed(reader):
            rows = list(engine.rows(self.prompts, number, self.cursor, self.wanted, 0))
        self.cursor = self.engine.counts.cursor
        return rows

    def optimize(self, number: int, rows: list[dict]) -> None:
        from dataclasses import replace

        from stages.rl import epochs
        from stages.rl.targets import make_targets

        settings = replace(self.settings, round_number=number)
        learner = epochs.Learner(self.policy, None, self.optimizers)
        targets = make_targets(rows, settings)
        learning = epochs.Round(self.accelerator, learner, rows, targets, settings)
        for _ in learning.steps(self.steps):
            self.steps += 1


def grpo(args) -> dict:
    """Rounds of sampling and one update each; the reward is the exact match, as the peer's is."""
    run, sampling, learning, learned = Round(args.prompts), [], [], []
    for number in range(1, args.steps + 1):
        start = time.perf_counter()
        rows = run.sample(number)
        for row in rows:
            row["reward"] = row["reward_correctness"]
        middle = time.perf_counter()
        run.optimize(number, rows)
        tokens = sum(len(row["completion_ids"]) for row in rows)
        sampling.append((middle - start, tokens / (middle - start)))
        learning.append(time.perf_counter() - middle)
        learned.append(tokens / learning[-1])
    half = args.steps // 2
    update = statistics.median(learning[half:])
    return {
        "rollout_s": statistics.median(seconds for seconds, _ in sampling[half:]),
        "rollout_tokens_s": statistics.median(rate for _, rate in sampling[half:]),
        "optimize_s": update,
        "optimize_completions_s": len(rows) / update,
        "optimize_tokens_s": statistics.median(learned[half:]),
    }


def memory(args) -> dict:
    """Rounds in one process: reward model and reference stay loaded, the policy is saved at last.

    Nothing else is written between rounds; the numbers are those of the stages.
    """
    from stages.base import params
    from stages.base.chunks import chunks
    from stages.knobs.score import Knobs
    from stages.models.checkpoints import load_policy, load_scorer
    from stages.models.scorers import reference_log_probs, scores_and_values
    from stages.models.trainer_state import TrainerState, save_policy
    from stages.score import total_reward

    run, knobs = Round(args.prompts), params.load(Knobs)
    scorer = load_scorer(Path("rm"), knobs.attention, run.device)
    reference = load_policy(BASE, knobs.attention, run.device)
    weights = knobs.rewards.model_dump()
    for number in range(1, args.rounds + 1):
        rows = run.sample(number)
        for part in chunks(rows, knobs.score_batch_size):
            scores, _ = scores_and_values(scorer, part)
            refs = reference_log_probs(reference, part, knobs.temperature)
            for row, score, ref in zip(part, scores, refs, strict=True):
                row |= {"reward_model": score, "log_probs_ref": ref}
                row["reward"] = total_reward(row, weights)
        run.optimize(number, rows)
    state = TrainerState(run.steps, run.cursor, list(range(1, args.rounds + 1)))
    pairs = {"policy": (run.optimizers["policy"], run.policy)}
    save_policy(Path("in-memory"), run.policy, run.tokenizer, state, pairs, None)
    return {}


def files(args) -> dict:
    """The same rounds by the stages' commands, each a process that reads and writes files."""
    start = "base"
    for k in range(1, args.rounds + 1):
        prompts = ["--task", "../prompts.jsonl", "--source", "source"]
        table, buffer = f"rollouts-{k}.parquet", f"buffer-{k}.parquet"
        models = ["--policy", start, "--reward-model", "rm"]
        stage("rollout", "--round", k, "--policy", start, *prompts, "--out", table)
        stage("score", "--rollouts", table, *models, "--reference", "base", "--out", buffer)
        outputs = ["--out", f"policy-{k}", "--updates", "updates.parquet", "--curve", "curve.csv"]
        stage("optimize", "--round", k, "--buffer", buffer, *models, *outputs)
        start = f"policy-{k}"
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"peak_mb": children // 1024}


def stage(name: str, *words) -> None:
    command = [sys.executable, "-m", f"stages.{name}", *map(str, words)]
    subprocess.run([*command, "--figures", "figures.json"], check=True, stdout=subprocess.DEVNULL)


def tokenize(args) -> dict:
    """`tokenize_sft`'s work: rows of a JSONL file to ids and labels in a Parquet file."""
    from stages.base import params
    from stages.base.kept import Kept
    from stages.base.tables import SFT, write_batches
    from stages.base.tokenizers import load_tokenizer
    from stages.knobs.tokenize_sft import Knobs
    from stages.rows.inputs import Intake, open_source, tokenized
    from stages.tokenize_sft import encode

    knobs, tokenizer = params.load(Knobs), load_tokenizer(BASE)
    gc.freeze()  # as every stage does

    def once():
        name, rows = open_source("sft", knobs.sft, Path(args.data), knobs.seed)
        work = partial(encode, tokenizer, knobs.sft.train_on, knobs.sft.max_length)
        encoded = tokenized(rows, work, SFT, Intake(name), Kept(None))
        return write_batches(Path("tokenized.parquet"), SFT, encoded, {})

    return timed_rows(once, args.steps)


def plain_map(args) -> dict:
    """The peer of `tokenize`: a batched `datasets.map` that renders, tokenizes and masks alike."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE)

    def encode(batch):
        whole = tokenizer.apply_chat_template(batch["messages"], tokenize=False)
        opened = [messages[:-1] for messages in batch["messages"]]
        prompts = tokenizer.apply_chat_template(opened, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
        starts = map(len, tokenizer(prompts, add_special_tokens=False)["input_ids"])
        labels = [[-100] * n + row[n:] for row, n in zip(ids, starts, strict=True)]
        return {"input_ids": [row[:512] for row in ids], "labels": [row[:512] for row in labels]}

    def once():
        rows = load_dataset(
            "json", data_files=args.data, split="train", cache_dir=tempfile.mkdtemp()
        )
        return len(rows.map(encode, batched=True, remove_columns="messages"))

    return timed_rows(once, args.steps)


def timed_rows(once, times: int) -> dict:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        count = once()
        seconds.append(time.perf_counter() - start)
    seconds = statistics.median(seconds[times // 2 :])
    return {"seconds": seconds, "rows_s": count / seconds}


def matmul(args) -> dict:
    """The most arithmetic a second that a matrix product of this precision reaches here."""
    import torch

    torch.set_num_threads(os.cpu_count())
    kind, best = torch.bfloat16 if args.bf16 else torch.float32, 0.0
    for size in (1024, 2048):
        left, right = torch.randn(2, size, size).to(kind)
        for _ in range(8):
            start = time.perf_counter()
            left @ right
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return {"flops_s": best}


WORKS = {
    work.__name__: work
    for work in (sft, reward, direct, grpo, memory, files, tokenize, plain_map, matmul)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data")
    for name in ("steps", "prompts", "rounds", "pairs"):
        parser.add_argument(f"--{name}", type=int, default=4)
    parser.add_argument("--every-token", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    os.chdir(args.folder)
    found = {"peak_mb": None} | WORKS[args.work](args)
    if found["peak_mb"] is None:
        each = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        found["peak_mb"] = max(resource.getrusage(who).ru_maxrss for who in each) // 1024
    print(json.dumps(found))


if __name__ == "__main__":
    main()
