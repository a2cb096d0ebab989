"""One table of all ways to train on the default task: docs/comparison.json, a DVC experiment a row.

    python tools/compare_methods.py                     # the rows that this code did not yet give
    python tools/compare_methods.py --only dpo,raft     # these rows, measured or not
    python tools/docs_numbers.py --write                # then: the table in docs/direct.md

About 25 minutes on two quiet cores once the default run is in DVC's cache. Commit first: the
experiments see what Git tracks. Each is one of `dvc exp run`, in a folder of its own as those of
the queue, one after the other, so that none disturbs the seconds of another. The workspace stays
as it is, and `dvc exp show` lists them. A row is written once it is measured: the same command
goes on after a cut. A row that fails leaves the others alone.

Each row has the same seed, SFT model, pairs and first rollouts: DVC runs what a row's settings
touch and takes the rest from its cache. The row `grpo` is the default run; it comes first, and in a
fresh clone makes what all of them share.

Of each row: accuracies of its last policy; `kl_sft`, KL(policy || models/sft) per token of the
chosen answers of the held-out pairs, over the whole vocabulary; `seconds` of its training stages,
from their start, imports and all, to the last line that they print; `ran`, the stages of which
dvc.lock has another entry than the default run's. A training that came out of DVC's cache is run
once more, alone, for its seconds.
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
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
FILE = ROOT / "docs" / "comparison.json"
BASE = "grpo"  # the default run
SOURCES = ("stages", "params.yaml", "dvc.yaml")
TRAININGS = ("train_direct", "optimize")
PAIRS = "data/preferences/validation.parquet"


def run(*words: str, check: bool = True) -> str:
    return subprocess.run(words, cwd=ROOT, check=check, capture_output=True, text=True).stdout


class Failed(Exception):
    """A command of a row ended badly."""


def said(command: str | list[str], folder: Path) -> Iterator[tuple[float, str]]:
    """Run a command and show what it says: (seconds since its start, line) of each full line."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment, shell = os.environ | {"PYTHONUNBUFFERED": "1"}, isinstance(command, str)
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, env=environment, shell=shell, **pipes) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.strip():
                yield time.perf_counter() - start, line
    if process.returncode:
        words = command if shell else " ".join(command)
        raise Failed(f"{words}: ended with {process.returncode}")


def timed(*words: str) -> dict[str, float]:
    """Run DVC; seconds of each stage whose command ran, up to the last line that it printed."""
    seconds, stage, begun, last = {}, None, 0.0, 0.0
    for now, line in said(["dvc", *words], ROOT):
        told = re.match(r"(Running stage|Stage|(?:Updat|Generat)ing lock file) '([^']+)'", line)
        if told and stage:
            seconds[stage], stage = last - begun, None
        if told and told[1] == "Running stage":
            stage, begun = told[2], now
        last = now
    return seconds


def experiment(name: str, settings: dict) -> tuple[str, dict[str, float]]:
    """Run one in a place of its own; its commit, and the seconds of the stages that ran."""
    run("dvc", "exp", "remove", name, check=False)  # of an earlier measurement
    changes = [word for key, value in settings.items() for word in ("-S", f"{key}={value}")]
    seconds = timed("exp", "run", "--temp", "--name", name, *changes)
    head = run("git", "rev-parse", "HEAD").strip()
    return run("git", "rev-parse", f"refs/exps/{head[:2]}/{head[2:]}/{name}").strip(), seconds


def lock_of(commit: str) -> dict[str, dict]:
    """Stage -> its entry in dvc.lock, without `report`, which follows every change."""
    from ruamel.yaml import YAML

    stages = YAML(typ="safe", pure=True).load(run("git", "show", f"{commit}:dvc.lock"))["stages"]
    return {name: entry for name, entry in stages.items() if name != "report"}


def code() -> str:
    """Git's names of what a row depends on: it is measured anew where they are others."""
    names = run("git", "rev-parse", *(f"HEAD:{path}" for path in SOURCES)).split()
    return ", ".join(f"{path} {name[:9]}" for path, name in zip(SOURCES, names, strict=True))


def measured(row: dict, base: dict | None) -> tuple[dict, dict]:
    """A row with its figures, and the lock file of its experiment; `base` is the default run's."""
    name = f"methods-{row['name']}"
    commit, seconds = experiment(name, row["settings"])
    lock = lock_of(commit)
    ran = sorted(stage for stage, entry in lock.items() if (base or {}).get(stage) != entry)
    trained = [stage for stage in ran if stage.partition("@")[0] in TRAININGS]
    for stage in trained:
        if stage not in seconds:
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
        "seconds": sum(seconds[stage] for stage in trained),
        "ran": ran,
        "stages": len(lock),
        "code": code(),
    }, lock


def alone(commit: str, entry: dict) -> float:
    """As `timed`, of one stage run once more by its entry in dvc.lock, on the files it names."""
    with tempfile.TemporaryDirectory() as folder:
        tree = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x"], cwd=folder, input=tree.stdout, check=True)
        places = {dep["path"]: Path(folder) / dep["path"] for dep in entry["deps"]}
        fetch(commit, {path: place for path, place in places.items() if not place.exists()})
        *_, (seconds, _) = said(entry["cmd"], Path(folder))
        return seconds


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
    from stages.direct.pairs import chosen_kl
    from stages.models.checkpoints import load_policy

    with tempfile.TemporaryDirectory() as folder:
        places = {path: Path(folder) / path for path in (policy, "models/sft", PAIRS)}
        fetch(commit, places)
        models = [load_policy(places[path], "sdpa", "cpu") for path in (policy, "models/sft")]
        with random_access(places[PAIRS], SCHEMA) as rows:
            parts = [range(i, min(i + 64, len(rows))) for i in range(0, len(rows), 64)]
            total = sum(chosen_kl(*models, [rows[i] for i in part]) for part in parts)
            return total / sum(rows.lengths("chosen_ids"))


def main() -> None:
    from stages.base.files import replacing

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="names of rows, parted by commas, measured or not")
    args = parser.parse_args()
    found = json.loads(FILE.read_text(encoding="utf-8"))
    names = [row["name"] for row in found["rows"]]
    asked = set(args.only.split(",")) if args.only else None
    if unknown := (asked or set()) - set(names):
        parser.error(f"--only: found {', '.join(unknown)}, expected some of {', '.join(names)}")
    if changed := run("git", "status", "--porcelain", "--untracked-files=no", *SOURCES):
        parser.error(f"found changes that are not committed, expected none:\n{changed}")
    wanted = [
        row["name"]
        for row in found["rows"]
        if (row["name"] in asked if asked else row.get("code") != code())
    ]
    if not wanted:
        return print(f"{FILE.name}: this code gave all its rows")
    base, failed, start = None, [], time.perf_counter()
    # The default run first: the others are held against it, and share what it makes.
    for number, row in sorted(enumerate(found["rows"]), key=lambda pair: pair[1]["name"] != BASE):
        if row["name"] == BASE and row["name"] not in wanted:
            base = lock_of(experiment(f"methods-{BASE}", row["settings"])[0])
        if row["name"] not in wanted:
            continue
        minutes = (time.perf_counter() - start) / 60
        print(f"\n== {row['title']}, after {minutes:.1f} minutes\n", flush=True)
        try:
            found["rows"][number], lock = measured(row, base)
        except Failed as error:
            if row["name"] == BASE:
                raise SystemExit(error) from None
            failed.append(f"{row['name']}: {error}")
            continue
        base = lock if row["name"] == BASE else base
        found["processor"] = platform.processor() or platform.machine()
        with replacing(FILE) as path:
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if failed:
        raise SystemExit("\n".join(["these rows failed, the others are written:", *failed]))


if __name__ == "__main__":
    main()
