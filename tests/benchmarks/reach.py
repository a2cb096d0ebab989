"""How far it goes: seconds and peak memory of one `optimize` step, or of sampling, by its size.

    python -m tests.benchmarks.reach optimize --folder WORK/smollm2 --sizes 4x64,4x256,4x1024
    python -m tests.benchmarks.reach optimize --folder WORK/smollm2 --sizes 4x256 --peer

A size is completions of one prompt times tokens of each; sizes ascend, and `peak_mb` is what the
process held at most until then. Prints one JSON line. Rows are random tokens: none ends early, and
TRL is handed the same ones, so that neither side samples them.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

PROMPT = 64  # tokens


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def ids(count: int, vocabulary: int, seed: int) -> list[int]:
    import torch

    draws = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary // 2, (count,), generator=draws).tolist()


def timed(sizes: list[tuple[int, int]], work) -> list[dict]:
    """Seconds and peak of `work(completions, tokens)` at each size."""
    found = []
    for size in sizes:
        start = time.perf_counter()
        work(*size)
        seconds = time.perf_counter() - start
        names = ("completions", "tokens", "seconds", "peak_mb")
        found.append(dict(zip(names, (*size, seconds, peak_mb()), strict=True)))
    return found


def optimize(args) -> list[dict]:
    from stages.models.recompute import recompute_layers
    from stages.rl import epochs
    from stages.rl.targets import make_targets
    from tests.benchmarks.ours import Round

    run = Round(1)
    vocabulary = run.policy.config.vocab_size
    if args.recompute:
        recompute_layers(run.policy)

    def step(completions: int, tokens: int) -> None:
        rows = [
            {
                "prompt_ids": ids(PROMPT, vocabulary, 0),
                "completion_ids": ids(tokens, vocabulary, 1 + number),
                "log_probs_old": [-10.0] * tokens,
                "log_probs_sampler": None,
                "reward": float(number % 2),
                "group": 0,
                "sample": number,
            }
            for number in range(completions)
        ]
        sizes = {"train_batch_size": completions, "batch_acc": 1, "train_max_tokens": args.limit}
        settings = replace(run.settings, **sizes, max_new_tokens=tokens)
        learner = epochs.Learner(run.policy, None, run.optimizers)
        targets = make_targets(rows, settings)
        list(epochs.Round(run.accelerator, learner, rows, targets, settings).steps(0))

    return timed(args.sizes, step)


def rollout(args) -> list[dict]:
    import torch

    from stages.rollouts.sampling import Sampling, sample
    from tests.benchmarks.ours import Round

    run = Round(1)
    prompt = ids(PROMPT, run.policy.config.vocab_size, 0)

    def decode(completions: int, tokens: int) -> None:
        draws = torch.rand(1, completions, tokens, generator=torch.Generator().manual_seed(1))
        with run.accelerator.autocast():
            sample(run.policy, [prompt], draws, Sampling(1.0, 1.0, 0, 0.0, tokens, ()))

    return timed(args.sizes, decode)


def peer(args) -> list[dict]:
    """TRL's GRPO over given completions, as many in one pass as there are."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def learn(completions: int, tokens: int) -> None:
        def given(prompts, trainer) -> dict:
            vocabulary = trainer.model.config.vocab_size
            answers = [ids(tokens, vocabulary, 1 + i) for i in range(len(prompts))]
            asked = [ids(PROMPT, vocabulary, 0)] * len(prompts)
            scores = [[-10.0] * tokens] * len(prompts)
            return {"prompt_ids": asked, "completion_ids": answers, "logprobs": scores}

        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=1,
            per_device_train_batch_size=completions,
            num_generations=completions,
            max_completion_length=tokens,
            loss_type="grpo",
            beta=0.0,
            learning_rate=1e-5,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=args.recompute,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        rows = Dataset.from_list([{"prompt": "any"}] * completions)
        trainer = GRPOTrainer(
            model="base",
            reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            args=config,
            train_dataset=rows,
            rollout_func=given,
        )
        start = time.perf_counter()
        trainer.train()
        taken.append(time.perf_counter() - start)

    taken: list[float] = []
    found = timed(args.sizes, learn)
    return [row | {"seconds": seconds} for row, seconds in zip(found, taken, strict=True)]


def sizes_of(text: str) -> list[tuple[int, int]]:
    """`4x64,4x256` -> [(4, 64), (4, 256)]."""
    return [tuple(map(int, part.split("x"))) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", choices=("optimize", "rollout"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sizes", type=sizes_of, required=True)
    parser.add_argument("--limit", type=int, help="train_max_tokens")
    parser.add_argument("--recompute", action="store_true", help="gradient_checkpointing")
    parser.add_argument("--peer", action="store_true", help="TRL's side; optimize alone")
    args = parser.parse_args()
    os.chdir(args.folder)
    work = peer if args.peer else {"optimize": optimize, "rollout": rollout}[args.work]
    print(json.dumps(work(args)))


if __name__ == "__main__":
    main()
