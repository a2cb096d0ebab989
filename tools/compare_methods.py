"""One table of all ways to train on the default task: docs/comparison.json, a DVC experiment a row.

    python tools/compare_methods.py                     # all rows; about an hour on two cores
    python tools/compare_methods.py --only dpo,raft     # these rows; the others stay

Each row has the same seed, SFT model, pairs and first rollouts: DVC runs what a row's settings
touch and takes the rest from its cache. The row `grpo` is the default run; it comes first, and in a
fresh clone makes what all of them share. Commit first: the experiments see what Git tracks; the
workspace stays as it is, and `dvc exp show` lists them. A row is written once it is measured, so a
run that was cut off goes on with `--only`. Then run `python tools/docs_numbers.py --write`.

Of each row: accuracies of its last policy; `kl_sft`, KL(policy || models/sft) per token of the
chosen answers of the held-out pairs, over the whole vocabulary; `seconds` of its training stages,
their starts included; `ran`, the stages of which dvc.lock has another entry than the default run's.
A training that came out of DVC's cache is run once more, alone, for its seconds.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
FILE = ROOT / "docs" / "comparison.json"
BASE = "grpo"  # the default run
PAIRS = "data/preferences/validation.parquet"


def run(*words: str, check: bool = True) -> str:
    return subprocess.run(words, cwd=ROOT, check=check, capture_output=True, text=True).stdout


def timed(*words: str) -> dict[str, float]:
    """Run DVC, showing what it says; seconds of each stage whose command ran."""
    seconds, stage, start = {}, None, 0.0
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(["dvc", *words], cwd=ROOT, env=environment, **pipes) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            said = re.match(r"(Running stage|Stage|Updating lock file) '([^']+)'", line)
            if stage and said:
                seconds[stage], stage = time.perf_counter() - start, None
            if said and said[1] == "Running stage":
                stage, start = said[2], time.perf_counter()
    if process.returncode:
        raise SystemExit(f"dvc {' '.join(words)}: ended with {process.returncode}")
    return seconds


def experiment(name: str, settings: dict) -> tuple[str, dict[str, float]]:
    """Run one in a place of its own; its commit, and the seconds of the stages that ran."""
    run("dvc", "exp", "remove", name, check=False)  # of an earlier measurement
    changes = [word for key, value in settings.items() for word in ("-S", f"{key}={value}")]
    seconds = timed("exp", "run", "--temp", "--name", name, *changes)
    refs = run("git", "for-each-ref", "--format=%(refname)", "refs/exps").split()
    return next(ref for ref in refs if ref.endswith(f"/{name}")), seconds


def lock_of(commit: str) -> dict[str, dict]:
    """Stage -> its entry in dvc.lock, without `report`, which follows every change."""
    from ruamel.yaml import YAML

    stages = YAML(typ="safe", pure=True).load(run("git", "show", f"{commit}:dvc.lock"))["stages"]
    return {name: entry for name, entry in stages.items() if name != "report"}


def trains(stage: str) -> bool:
    return stage.partition("@")[0] in ("train_direct", "optimize")


def measured(row: dict, base: dict | None) -> tuple[dict, dict]:
    """A row with its figures, and the lock file of its experiment; `base` is the default run's."""
    name = f"methods-{row['name']}"
    commit, seconds = experiment(name, row["settings"])
    lock = lock_of(commit)
    ran = sorted(stage for stage, entry in lock.items() if (base or {}).get(stage) != entry)
    for stage in ran:
        if trains(stage) and stage not in seconds:
            seconds[stage] = alone(commit, lock[stage])
    figures = json.loads(run("git", "show", f"{commit}:metrics/{row['figures']}.json"))
    return {
        "name": row["name"],
        "title": row["title"],
        "settings": row["settings"],
        "policy": row["policy"],
        "figures": row["figures"],
        "accuracy_sampled": figures["accuracy_sampled"],
        "accuracy_greedy": figures["accuracy_greedy"],
        "kl_sft": kl_to_sft(commit, row["policy"]),
        "seconds": sum(seconds[stage] for stage in ran if trains(stage)),
        "ran": ran,
        "stages": len(lock),
    }, lock


def alone(commit: str, entry: dict) -> float:
    """Seconds of a stage run once more, by its entry in dvc.lock, on the files that it names."""
    with tempfile.TemporaryDirectory() as folder:
        code = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x"], cwd=folder, input=code.stdout, check=True)
        places = {dep["path"]: Path(folder) / dep["path"] for dep in entry["deps"]}
        fetch(commit, {path: place for path, place in places.items() if not place.exists()})
        start = time.perf_counter()
        subprocess.run(entry["cmd"], shell=True, cwd=folder, check=True)
        return time.perf_counter() - start


def fetch(commit: str, places: dict[str, Path]) -> None:
    """Files and folders of a commit, out of DVC's cache: path -> where to put it."""
    from dvc.api import DVCFileSystem

    files = DVCFileSystem(str(ROOT), rev=run("git", "rev-parse", commit).strip())
    for path, place in places.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        files.get(path, str(place), recursive=files.isdir(path))


def kl_to_sft(commit: str, policy: str) -> float:
    """KL(policy || models/sft) per token of the held-out pairs' chosen answers, in nats."""
    from stages.base.tables import PAIRS as SCHEMA
    from stages.base.tables import random_access
    from stages.models.checkpoints import load_policy
    from stages.train_direct import mean_kl

    with tempfile.TemporaryDirectory() as folder:
        places = {path: Path(folder) / path for path in (policy, "models/sft", PAIRS)}
        fetch(commit, places)
        with random_access(places[PAIRS], SCHEMA) as rows:
            models = [load_policy(places[path], "sdpa", "cpu") for path in (policy, "models/sft")]
            return mean_kl(*models, rows, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="names of rows, parted by commas; all without it")
    args = parser.parse_args()
    found = json.loads(FILE.read_text(encoding="utf-8"))
    names = [row["name"] for row in found["rows"]]
    wanted = args.only.split(",") if args.only else names
    if unknown := set(wanted) - set(names):
        parser.error(f"--only: found {', '.join(unknown)}, expected some of {', '.join(names)}")
    base = None
    # The default run first: the others are held against it, and share what it makes.
    for number, row in sorted(enumerate(found["rows"]), key=lambda pair: pair[1]["name"] != BASE):
        if row["name"] == BASE and row["name"] not in wanted:
            base = lock_of(experiment(f"methods-{BASE}", row["settings"])[0])
        if row["name"] not in wanted:
            continue
        found["rows"][number], lock = measured(row, base)
        base = lock if row["name"] == BASE else base
        found["code"] = run("git", "rev-parse", "--short", "HEAD:stages").strip()
        found["processor"] = platform.processor() or platform.machine()
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
