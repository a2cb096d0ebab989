"""Running the real pipeline in temporary repositories, and reading what DVC said."""

import re
import shutil
from pathlib import Path

from tests.helpers.clone import run
from tests.helpers.tiny import plain, small_params, write

ONCE = {
    "prepare_task",
    "prepare_model",
    "tokenize_sft",
    "train_sft",
    "tokenize_preferences",
    "split_preferences",
    "train_rm",
    "evaluate_sft",
    "report",
}


def of_round(number):
    return {f"{stage}@{number}" for stage in ("rollout", "score", "optimize", "evaluate")}


ALL = ONCE | of_round(1) | of_round(2)


def dvc(folder, *arguments, check=True):
    return run(folder, "dvc", *arguments, check=check)


def executed(output):
    """Stages whose command ran, as DVC says it."""
    return set(re.findall(r"Running stage '([^']+)'", output))


def restored(output):
    """Stages whose outputs came out of the run cache."""
    return set(re.findall(r"Stage '([^']+)' is cached", output))


def set_params(folder, **changes):
    write(folder / "params.yaml", small_params(**changes))


def changed(folder):
    """Files that Git sees changed, params.yaml apart: DVC spells it in its own way."""
    lines = run(folder, "git", "status", "--porcelain").stdout.splitlines()
    return [line for line in lines if line.split()[-1] != "params.yaml"]


def lock_of(folder):
    return (folder / "dvc.lock").read_bytes()


def lock_entries(folder) -> dict:
    """Stage -> its entry in dvc.lock; empty where there is no lock file."""
    path = folder / "dvc.lock"
    return plain(path)["stages"] if path.exists() else {}


def outputs(folder, stage) -> list[str]:
    """Paths of a stage's outputs, as the lock file of a finished repository names them."""
    return [out["path"] for out in lock_entries(folder)[stage]["outs"]]


def content(path: Path) -> dict[str, bytes] | None:
    """Every file below a path (or the file itself) and its bytes; None where nothing is."""
    if path.is_file():
        return {"": path.read_bytes()}
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): p.read_bytes() for p in files} or None


def duplicate(source: Path, target: Path) -> Path:
    """A repository of its own with the same commits, outputs and cache."""
    ignore = shutil.ignore_patterns("tmp", "__pycache__")
    return shutil.copytree(source, target, symlinks=True, ignore=ignore)
