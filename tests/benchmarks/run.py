"""Measure this project's core against TRL and plain loops, and write one table.

    python -m tests.benchmarks.run                     # all but growth, into docs/benchmarks.*
    python -m tests.benchmarks.run --only sft,reward --models tiny
    python -m tests.benchmarks.run --long              # answers of up to 256 tokens, SmolLM2 alone
    python -m tests.benchmarks.run --only lora         # GRPO by adapters of rank 16, both sides
    python -m tests.benchmarks.run --only growth       # how cost grows

Both sides take the same model, rows and machine; they run in turn, A B A B, each in a process of
its own, and a figure is the median over its processes of the medians of their warm steps. What was
not measured again is kept from the last table.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import page
from tests.benchmarks.workplace import BATCH, MODELS, call, prepare, set_knobs
from tests.helpers.tiny import ROOT

TABLE = ROOT / "docs" / "benchmarks.json"
# prompts and samples of a round: SmolLM2's are fewer, for TRL takes half a minute to learn from 48.
ROUND = {"tiny": (16, 8), "smollm2": (6, 8)}
# and of the four rounds through files, whose processes and files cost the same whatever their size.
FILED = (24, 8)
STEPS = {
    "tiny": {"sft": 40, "reward": 20, "direct": 20, "grpo": 6},
    "smollm2": {"sft": 3, "reward": 3, "direct": 3, "grpo": 2},
}
# of which the reference is run before the first step, in either side's process
PAIRS = {"tiny": 512, "smollm2": 64}
# Rows of real length: an optimizer step is of 16 rows still, or of 2 prompts with 8 completions,
# but passes are cut by tokens.
LONG_ROUND = (2, 8)
LONG_STEPS = {"sft": 2, "reward": 2, "grpo": 2, "lora": 2}
LONG = {"max_new_tokens": 256, "train_max_tokens": 2048, "forward_max_tokens": 8192}
TURNS = 2
RANK = 16  # of adapters


@dataclass
class Bench:
    """Where a run works, and the two sides' command lines."""

    folder: Path
    bf16: bool
    long: bool = False

    def round(self, model: str) -> tuple[int, int]:
        """Prompts of a round, and samples of each."""
        return LONG_ROUND if self.long else ROUND[model]

    def steps(self, model: str, work: str) -> tuple:
        return ("--steps", LONG_STEPS[work] if self.long else STEPS[model][work])

    def ours(self, model: str, work: str, *words, **knobs) -> dict:
        place = self.folder / model
        knobs |= {"precision": "bf16" if self.bf16 else "float32"} | (LONG if self.long else {})
        set_knobs(place, *self.round(model), **knobs)
        command = ["-m", "tests.benchmarks.ours", work, "--folder", place, *words]
        return self._figures(*command)

    def peer(self, model: str, work: str, data: str, *words) -> dict:
        place = self.folder / model / "base"
        command = ["-m", "tests.benchmarks.peers", work, "--model", place, *words]
        command += ["--data", self.folder / f"{data}.jsonl", "--batch", BATCH]
        return self._figures(*command, *(["--bf16"] if self.bf16 else []))

    def _figures(self, *command) -> dict:
        """What the command printed last; `seconds` of its whole run where it names none."""
        start = time.perf_counter()
        figures = json.loads(call(ROOT, sys.executable, *command).splitlines()[-1])
        figures.setdefault("seconds", time.perf_counter() - start)
        print(*[getattr(word, "name", word) for word in command[1:4]], figures, flush=True)
        return figures


def alternate(*sides: Callable[[], dict], times: int = TURNS) -> list[dict]:
    """Each side's figures, medians over its turns: A B A B; peaks are the highest."""
    turns = [[side() for side in sides] for _ in range(times)]
    found = []
    for runs in zip(*turns, strict=True):
        names = [name for name, value in runs[0].items() if isinstance(value, int | float)]
        medians = {name: statistics.median(run[name] for run in runs) for name in names}
        found.append(medians | {"peak_mb": max(run["peak_mb"] for run in runs)})
    return found


def row(work: str, model: str, unit: str, figure: str, ours: dict, peer: dict, name: str) -> dict:
    """One line of the table: both sides' figure in `unit`, more being better, and their peaks."""
    return {
        "work": work,
        "model": model,
        "unit": unit,
        "ours": ours[figure],
        "peer": peer[figure],
        "peer_name": name,
        "ratio": ours[figure] / peer[figure],
        "ours_mb": ours["peak_mb"],
        "peer_mb": peer["peak_mb"],
    }


def sft(bench: Bench, model: str) -> list[dict]:
    steps = bench.steps(model, "sft")
    answers, peer = alternate(
        lambda: bench.ours(model, "sft", *steps),
        lambda: bench.peer(model, "sft", "sft", *steps),
    )
    every = bench.ours(model, "sft", *steps, "--every-token")
    kind = ("tokens/s", "tokens_s")
    rows = [
        row("SFT", model, *kind, answers, peer, "TRL"),
        row("SFT, every token trained", model, *kind, every, peer, "TRL"),
    ]
    peak = bench.ours(model, "matmul", *(["--bf16"] if bench.bf16 else []))
    return rows + [share(model, answers, peak)]


def share(model: str, ours: dict, peak: dict) -> dict:
    """SFT's arithmetic a second (what its operators did, by torch's counter) over the peak's."""
    giga = {"figure": ours["flops_s"] / 1e9, "peak_mb": ours["peak_mb"]}
    best = {"figure": peak["flops_s"] / 1e9, "peak_mb": peak["peak_mb"]}
    return row("SFT, share of peak", model, "GFLOP/s", "figure", giga, best, "matrix product")


def reward(bench: Bench, model: str) -> list[dict]:
    steps = bench.steps(model, "reward")
    ours, peer = alternate(
        lambda: bench.ours(model, "reward", *steps),
        lambda: bench.peer(model, "reward", "preferences", *steps),
    )
    return [row("reward model", model, "pairs/s", "pairs_s", ours, peer, "TRL")]


def direct(bench: Bench, model: str) -> list[dict]:
    steps = ("--steps", STEPS[model]["direct"], "--pairs", PAIRS[model])
    ours, peer = alternate(
        lambda: bench.ours(model, "direct", *steps),
        lambda: bench.peer(model, "direct", "preferences", *steps),
    )
    return [row("DPO", model, "pairs/s", "pairs_s", ours, peer, "TRL")]


def grpo(bench: Bench, model: str) -> list[dict]:
    sizes, ours, peer = grpo_sides(bench, model)
    tokens, learned = ("tokens/s", "rollout_tokens_s"), LEARNED
    if bench.long:
        # Completions differ in length: what was learned from is counted in their tokens.
        return [
            row("rollout", model, *tokens, ours, peer, "TRL"),
            row("optimize", model, "tokens/s", "optimize_tokens_s", ours, peer, "TRL"),
        ]
    loop = bench.peer(model, "loop", "prompts", *sizes)
    return [
        row("rollout", model, *tokens, ours, peer, "TRL"),
        row("rollout", model, *tokens, ours, loop, "plain loop"),
        row("optimize", model, *learned, ours, peer, "TRL"),
    ]


LEARNED = ("completions/s", "optimize_completions_s")


def grpo_sides(bench: Bench, model: str, *words, **knobs) -> tuple[tuple, dict, dict]:
    """The peer's sizes, and the figures of both sides; `words` go to the peer, `knobs` to ours."""
    prompts, samples = bench.round(model)
    steps = bench.steps(model, "grpo")
    sizes = ("--prompts", prompts, "--samples", samples)
    sizes += ("--max-new", LONG["max_new_tokens"] if bench.long else 12)
    ours, peer = alternate(
        lambda: bench.ours(model, "grpo", *steps, "--prompts", prompts, **knobs),
        lambda: bench.peer(model, "grpo", "prompts", *steps, *sizes, *words),
    )
    return sizes, ours, peer


def lora(bench: Bench, model: str) -> list[dict]:
    """Rounds by adapters, both sides with those of the same shape on the same layers."""
    shape = {"rank": RANK, "alpha": 2.0 * RANK, "dropout": 0.0, "targets": "all-linear"}
    _, ours, peer = grpo_sides(bench, model, "--lora", RANK, lora=shape)
    learned = ("tokens/s", "optimize_tokens_s") if bench.long else LEARNED
    return [row("optimize by LoRA", model, *learned, ours, peer, "TRL")]


def tokenize(bench: Bench, model: str) -> list[dict]:
    words = ("--data", bench.folder / "sft.jsonl", "--steps", 4)
    ours, peer = alternate(
        lambda: bench.ours(model, "tokenize", *words),
        lambda: bench.ours(model, "plain_map", *words),
    )
    return [row("tokenization", model, "rows/s", "rows_s", ours, peer, "datasets.map")]


def rounds(bench: Bench, model: str) -> list[dict]:
    """Four rounds through files and in memory, once each; `ratio` is memory's time over files'."""
    prompts, samples = FILED
    words = ("--rounds", 4, "--prompts", prompts)
    knobs = {"beta": 0.01, "batch_acc": prompts * samples // BATCH}
    knobs |= {"prompts_per_step": prompts, "num_rollouts": samples}
    knobs |= {"rollout_batch_size": prompts * samples}
    through, inside = alternate(
        lambda: bench.ours(model, "files", *words, **knobs),
        lambda: bench.ours(model, "memory", *words, **knobs),
        times=1,
    )
    for side in (through, inside):
        side["rounds_min"] = 4 * 60 / side["seconds"]
    kind = ("rounds/min", "rounds_min")
    return [row("four rounds through files", model, *kind, through, inside, "in memory")]


COMPARED = {run.__name__: run for run in (sft, reward, direct, grpo, lora, tokenize, rounds)}


def idle(bench: Bench, numbers=(6,)) -> list[dict]:
    command = ["-m", "tests.benchmarks.idle", bench.folder]
    return [{"size": n} | bench._figures(*command, n) for n in numbers]


def growth(bench: Bench) -> dict[str, list[dict]]:
    """Seconds and peak memory of the tiny model's work against its size."""
    found = {
        "rollout": [],
        "optimize": [],
        "tokenization": [],
        "dvc repro": idle(bench, (4, 12, 40)),
    }
    for completions in (64, 256, 1024, 4096):
        prompts = completions // 8
        ROUND["growing"] = (prompts, 8)
        place = bench.folder / "growing"
        if not place.exists():
            place.symlink_to("tiny")
        figures = bench.ours(
            "growing", "grpo", "--steps", 2, "--prompts", prompts, train_batch_size=64, batch_acc=1
        )
        for work in ("rollout", "optimize"):
            seconds = figures[f"{work}_s"]
            line = {"size": completions, "seconds": seconds, "peak_mb": figures["peak_mb"]}
            found[work].append(line)
    lines = (bench.folder / "sft.jsonl").read_text().splitlines(keepends=True)
    for count in (1_000, 10_000, 100_000):
        data = bench.folder / f"rows-{count}.jsonl"
        data.write_text("".join((lines * (count // len(lines) + 1))[:count]))
        figures = bench.ours("tiny", "tokenize", "--data", data, "--steps", 2)
        figures = {name: figures[name] for name in ("seconds", "peak_mb")}
        found["tokenization"].append({"size": count} | figures)
    return found


def machine() -> dict:
    """Processor, cores and the versions that the figures depend on."""
    info = Path("/proc/cpuinfo")
    names = [x.partition(": ")[2] for x in info.read_text().splitlines() if "model name" in x]
    packages = ("torch", "transformers", "trl", "accelerate", "datasets", "dvc")
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    } | {name: importlib.metadata.version(name) for name in packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    choices, usual = [*COMPARED, "idle", "growth"], [*COMPARED, "idle"]
    parser.add_argument("--only", default=",".join(usual), help=f"of {', '.join(choices)}")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--long", action="store_true", help="answers of real length, SmolLM2 alone")
    parser.add_argument("--bf16", action="store_true", help="both sides under bf16 autocast")
    parser.add_argument("--work", type=Path, help="keep models and rows here, for another run")
    parser.add_argument("--table", type=Path, default=TABLE)
    args = parser.parse_args()
    if args.long:
        args.models, named = "smollm2", args.only.split(",")
        args.only = ",".join(name for name in named if name in LONG_STEPS)
    if unknown := set(args.only.split(",")) - set(choices):
        parser.error(f"--only: found {', '.join(unknown)}, expected some of {', '.join(choices)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.work or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder / "long" if args.long else folder
        measure(Bench(folder, args.bf16, args.long), args)


def measure(bench: Bench, args) -> None:
    """Run what was asked for; the table is written after each part, so that a stop loses little."""
    models, only, start = args.models.split(","), args.only.split(","), time.perf_counter()
    prepare(bench.folder, models, bench.long)
    table = json.loads(args.table.read_text()) if args.table.exists() else page.EMPTY
    table |= {"machine": machine()}
    for name, compare in COMPARED.items():
        for model in models if name in only else ():
            if (name, model) == ("rounds", "tiny"):
                continue
            fresh = [
                line | {"precision": "bf16" if bench.bf16 else "float32", "long": bench.long}
                for line in compare(bench, model)
            ]
            table["rows"] = page.merged(table["rows"], fresh)
            page.save(args.table, table)
    if "idle" in only:
        table["idle"] = idle(bench)[0]
        page.save(args.table, table)
    if "growth" in only:
        table["growth"] = growth(bench)
        page.save(args.table, table)
    print(f"all of it took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
