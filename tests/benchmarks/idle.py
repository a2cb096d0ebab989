"""Seconds of a `dvc repro` with nothing to do, against the number of rounds.

The pipeline is a copy of the working tree whose outputs are made up (small files of the right
names) and committed to DVC as if they had been computed: what DVC then checks is what it checks
after a real run, in which the hashes of large files are remembered too.
"""

import json
import resource
import statistics
import sys
import time
from pathlib import Path

from tests.helpers.clone import copy_of_working_tree, run
from tests.helpers.tiny import plain, small_params, write

MODEL = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")


def pipeline(folder: Path, rounds: int) -> Path:
    """A repository whose pipeline of so many rounds is up to date."""
    folder.mkdir()
    copy_of_working_tree(folder)
    chain = {
        str(k): f"models/policy/{k - 1}" if k > 1 else "models/sft" for k in range(1, rounds + 1)
    }
    write(folder / "params.yaml", small_params(rounds=chain))
    for path in outputs(plain(folder / "dvc.yaml")["stages"], chain):
        make_up(folder / path)
    run(folder, "dvc", "init", "--force", "--quiet")
    run(folder, "git", "checkout", "--quiet", "--", ".dvc", ".dvcignore")
    run(folder, "dvc", "commit", "--force", "--quiet")
    return folder


def outputs(stages: dict, chain: dict) -> list[str]:
    """Paths of all outputs and metrics, those of stages by round once for each."""
    found = []
    for stage in stages.values():
        body = stage.get("do", stage)
        named = [out if isinstance(out, str) else next(iter(out)) for out in body.get("outs", [])]
        named += [next(iter(metric)) for metric in body.get("metrics", [])]
        keys = chain if "foreach" in stage else [""]
        found += [path.replace("${key}", key) for path in named for key in keys]
    return found


def make_up(path: Path) -> None:
    if path.suffix:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(path))
    else:
        names = MODEL if "models" in path.parts else ("a.jsonl", "sft.jsonl", "heldout.jsonl")
        names += ("preferences.jsonl", "prompts.jsonl") if path.name == "task" else ()
        for name in names:
            path.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(str(path / name))


def idle(folder: Path, times: int = 3) -> dict:
    """Median seconds of `dvc repro`, after one that fills DVC's own memory; its peak."""
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        done = run(folder, "dvc", "repro")
        seconds.append(time.perf_counter() - start)
        if "Running stage" in done.stdout:
            raise RuntimeError(f"a stage ran:\n{done.stdout}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    return {"seconds": statistics.median(seconds[1:]), "peak_mb": peak}


def main() -> None:
    """`python -m tests.benchmarks.idle FOLDER ROUNDS`: one JSON line."""
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    place = folder / f"idle-{rounds}"
    print(json.dumps(idle(place if place.exists() else pipeline(place, rounds))))


if __name__ == "__main__":
    main()
