"""Run every objective of docs/runs.json anew, an experiment each, and write what they gave.

    python tools/compare_objectives.py                             # all; takes some hours
    python tools/compare_objectives.py --only ppo,rloo --seed 42   # these lines; the others stay
    python tools/compare_objectives.py --add raft skip_wrong_groups=true           # a line more

Commit first: the experiments see what Git tracks. What stages share comes from the cache. The
workspace stays as it is; `dvc exp show` lists the experiments. `code` of a line is the commit that
gave it, or, of a line made anew or added, Git's name of the folder stages/ (`git rev-parse
HEAD:stages`). Then run `python tools/docs_numbers.py --write`.
"""

import argparse
import json
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "runs.json"


def run(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def measured(loss: str, settings: dict, seed: int) -> dict:
    """One experiment: its settings, and the figures before the rounds and after the last."""
    name = f"compare-{loss}-{seed}"
    changes = {"loss": loss, "seed": seed} | settings
    words = [word for key, value in changes.items() for word in ("-S", f"{key}={value}")]
    run("dvc", "exp", "run", "--temp", "--force", "--name", name, *words)
    commit = run("git", "for-each-ref", "--format=%(refname)", "refs/exps").split()
    commit = next(ref for ref in commit if ref.endswith(f"/{name}"))
    files = run("git", "ls-tree", "--name-only", commit, "metrics/").split()
    last = max(int(Path(file).stem[6:]) for file in files if Path(file).stem.startswith("round-"))

    def figures(file: str) -> dict:
        return json.loads(run("git", "show", f"{commit}:metrics/{file}.json"))

    return {
        "loss": loss,
        "settings": settings,
        "seed": seed,
        "rm_validation_accuracy": figures("training")["rm_validation_accuracy"],
        "before": figures("round-0"),
        "after": figures(f"round-{last}"),
    }


def key(line: dict) -> tuple:
    return line["loss"], tuple(sorted(line["settings"].items())), line["seed"]


def asked(args: argparse.Namespace, lines: list[dict]) -> list[dict]:
    """Loss, settings and seed of each line that is to be measured."""
    if args.add:
        loss, *settings = args.add
        chosen = {"loss": loss, "settings": dict(word.split("=", 1) for word in settings)}
        return [chosen | {"seed": seed} for seed in ([args.seed] if args.seed else (42, 43))]
    named = lines if args.only is None else [r for r in lines if r["loss"] in args.only.split(",")]
    return [line for line in named if args.seed in (None, line["seed"])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="objectives, parted by commas; all without it")
    parser.add_argument("--seed", type=int, help="lines of this seed; all without it")
    parser.add_argument("--add", nargs="+", help="a new line: an objective, its KEY=VALUE settings")
    args = parser.parse_args()
    found = json.loads(FILE.read_text(encoding="utf-8"))
    code = run("git", "rev-parse", "--short", "HEAD:stages").strip()
    lines = found["runs"]
    for line in asked(args, lines):
        anew = measured(line["loss"], line["settings"], line["seed"]) | {"code": f"stages {code}"}
        place = next((i for i, old in enumerate(lines) if key(old) == key(line)), len(lines))
        lines[place : place + 1] = [anew]
        found["processor"] = platform.processor() or platform.machine()
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
