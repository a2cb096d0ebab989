"""What a model folder may hold: no pickle, and code only where model.trust_remote_code is true."""

from collections.abc import Iterable
from pathlib import Path

from stages.base.errors import InputError
from stages.base.metrics import read_json
from stages.base.spelling import spelled_out

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def listed(names: Iterable[str], most: int = 6) -> str:
    """Names for a message, in order: a few, and how many more; empty where there is none."""
    names = sorted(map(spelled_out, names))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def files_of(folder: Path, *suffixes: str) -> str:
    """`listed` names of the files below a folder that end so."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    return listed(path.relative_to(folder).as_posix() for path in found)


def object_of(path: Path) -> dict:
    """A JSON file that must hold an object, as config.json does."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise InputError(f"{path}: found {type(found).__name__}, expected a JSON object")
    return found


def check_pickles(folder: Path, remedy: str) -> None:
    """Raise InputError where the folder holds pickled files, at any depth."""
    if found := files_of(folder, *PICKLES):
        raise InputError(f"{folder}: found {found}, and pickles are never read; {remedy}")


def check_own(folder: Path, trust: bool) -> None:
    """Both checks for the folder of a stage, none of which writes pickles."""
    check_pickles(folder, "a model from elsewhere comes in through model.source")
    check_code(folder, trust)


def check_code(folder: Path, trust: bool) -> None:
    """Raise InputError where the folder holds or names Python code, unless it is trusted."""
    if trust:
        return
    found = files_of(folder, ".py")
    for name in ("config.json", "tokenizer_config.json"):
        if not found and (folder / name).is_file() and "auto_map" in object_of(folder / name):
            found = f"auto_map in {name}"
    if found:
        raise InputError(
            f"{folder}: found {found}: code that the model brings along."
            " model.trust_remote_code: true would run the code"
        )
