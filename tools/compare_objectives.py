"""Run every objective of docs/runs.json anew, an experiment each, and write what they gave.

    python tools/compare_objectives.py

Takes some hours. Commit first: the experiments see what Git tracks. What stages share comes from
the cache. The workspace stays as it is; `dvc exp show` lists the experiments. Then run
`python tools/docs_numbers.py --write`.
"""

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


def main() -> None:
    old = json.loads(FILE.read_text(encoding="utf-8"))
    found = {
        "code": run("git", "rev-parse", "--short", "HEAD").strip(),
        "processor": platform.processor() or platform.machine(),
        "elsewhere": [],
        "runs": [measured(r["loss"], r["settings"], r["seed"]) for r in old["runs"]],
    }
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
