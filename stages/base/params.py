"""params.yaml: read as DVC reads it, and all of it validated before a stage does anything.

Whichever stage runs first checks the knobs of every stage, so that a bad clip range is found before
hours of SFT. The knobs of other stages are imported for that check alone: it can stop a stage,
never change what it writes, so they are no dependency of it in dvc.yaml.
"""

import importlib
import os
import pkgutil
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

import stages.knobs
from stages.base.errors import InputError
from stages.base.knobs import Section
from stages.base.verifiers import problem_with

PARAMS = Path("params.yaml")
SOURCE = Path("data/source")
DATA_FILES = (".jsonl", ".json", ".csv", ".parquet", ".gz")
K = TypeVar("K", bound=Section)


def load(knobs: type[K], path: Path = PARAMS) -> K:
    """Validate the whole of params.yaml and return the knobs of one stage.

    Raises `InputError` with one line for every missing, unknown, mistyped or out-of-range key.
    """
    values = read(path)
    problems = list(_unknown(values, path))
    for section in all_knobs().values():
        problems += _problems(section, values)
    problems += _missing_verifier(values, path.parent / SOURCE)
    problems += _misplaced_files(values, path.parent)
    problems += _negative_rewards(values)
    problems += _adapters_that_part(values)
    if problems:
        lines = [f"{path}: {problem}" for problem in dict.fromkeys(problems)]
        raise InputError("\n  ".join(["bad parameters", *lines]))
    return knobs.model_validate(_select(knobs, values))


def processes(path: Path = PARAMS) -> int:
    """The knob `processes`, once `load` has checked it, for stages that do not depend on it.

    They deal whole batches to the processes: any number gives the same bytes, so another one must
    not make them run again.
    """
    return read(path)["processes"]


def read(path: Path = PARAMS) -> dict:
    """Read YAML 1.2: 1e-5 is a number and no is text, as for DVC itself."""
    try:
        values = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: missing; run from the folder that holds params.yaml") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a mapping of knobs, found {type(values).__name__}")
    return values


def all_knobs() -> dict[str, type[Section]]:
    """Stage name -> its `Knobs`, for every module of stages/knobs."""
    found = {}
    for module in pkgutil.iter_modules(stages.knobs.__path__):
        found[module.name] = importlib.import_module(f"stages.knobs.{module.name}").Knobs
    return found


def fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted key, field) of each knob that a class reads: `seed`, `sft.lr`."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from fields(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def keys(section: type[Section]) -> list[str]:
    """Dotted keys that a class of knobs reads."""
    return [key for key, _ in fields(section)]


def _select(section: type[Section], values: dict) -> dict:
    """The part of params.yaml that a class of knobs reads."""
    chosen = {}
    for name, field in section.model_fields.items():
        if name not in values:
            continue
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        is_mapping = isinstance(values[name], dict)
        chosen[name] = (
            _select(field.annotation, values[name]) if nested and is_mapping else values[name]
        )
    return chosen


def _problems(section: type[Section], values: dict) -> Iterator[str]:
    try:
        section.model_validate(_select(section, values))
    except ValidationError as error:
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"] if part in _names(section))
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "missing":
                yield f"{key}: missing. {_description(section, key)}"
            elif not key or message.startswith(f"{key}."):
                yield message
            else:
                found = "" if item["type"] == "value_error" else f"found {item['input']!r}; "
                yield f"{key}: {found}{message}. {_description(section, key)}".rstrip()


def _missing_verifier(values: dict, folder: Path) -> Iterator[str]:
    """Told by whichever stage runs first, not by the first evaluation, after hours of SFT."""
    name = values.get("verifier")
    if isinstance(name, str) and ":" in name and (problem := problem_with(name, folder)):
        yield f"verifier: {problem}"


def _misplaced_files(values: dict, folder: Path) -> Iterator[str]:
    """Datasets that look like a file and are none, or that lie where DVC sees no change of theirs.

    Told before anything runs: prompts are read only after hours of SFT.
    """
    inside = os.path.abspath(folder / SOURCE)
    for section in ("sft", "preferences", "prompts", "evaluate"):
        source = values.get(section)
        name = source.get("dataset") if isinstance(source, dict) else None
        if not isinstance(name, str) or name == "task":
            continue
        if (folder / name).exists():
            if Path(inside) not in Path(os.path.abspath(folder / name)).parents:
                yield (
                    f"{section}.dataset: found {name!r}, outside {SOURCE}, where DVC sees no"
                    f" change of it; expected it (or a link to it) under {SOURCE}"
                )
        elif name.startswith(f"{SOURCE}/") or Path(name).suffix in DATA_FILES:
            yield f"{section}.dataset: found {name!r}, but there is no such file"


def _negative_rewards(values: dict) -> Iterator[str]:
    """MaxRL divides by a group's mean reward; `optimize` does not read the weights of `score`."""
    weights = values.get("rewards")
    if values.get("loss") != "maxrl" or not isinstance(weights, dict):
        return
    for name, weight in weights.items():
        below = isinstance(weight, int | float) and weight < 0
        if below or (weight and name in ("length", "reward_model")):
            yield (
                f"rewards.{name}: found {weight}, but loss maxrl divides by a mean reward and this"
                " component can be negative; expected null"
            )


def _adapters_that_part(values: dict) -> Iterator[str]:
    """Adapters that cannot be trained on by what starts from them, by shape or by base.

    A base is models/base or models/sft, on which all stages depend that load adapters.
    """
    loras = {"lora": values.get("lora")} | {
        f"{name}.lora": section.get("lora")
        for name in ("sft", "rm", "direct")
        if isinstance(section := values.get(name), dict)
    }
    starts = [(name, values.get(name)) for name in ("rounds", "branches")]
    starts = [
        (n, k, str(s)) for n, found in starts if isinstance(found, dict) for k, s in found.items()
    ]
    follows = [(key, "sft.lora") for key in ("lora", "rm.lora", "direct.lora")]
    if values.get("loss") == "ppo" and values.get("critic") == "reward_model":
        follows.append(("lora", "rm.lora"))
    for name, key, start in starts:
        mine = "lora" if name == "rounds" else "direct.lora"
        for place, other in (("models/policy/", "lora"), ("models/direct/", "direct.lora")):
            if not start.startswith(place) or mine == other:
                continue
            follows.append((mine, other))
            if loras.get(mine) and not loras.get(other):
                yield (
                    f"{mine}: {name}.{key} starts from {start}, a whole model, and adapters need"
                    f" models/base or models/sft below them; expected {other} to be set as well"
                )
    for key, other in dict.fromkeys(follows):
        mine, theirs = loras.get(key), loras.get(other)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            for name in mine.keys() & theirs.keys():
                if mine[name] != theirs[name]:
                    yield (
                        f"{key}.{name}: found {mine[name]!r}, but {other} has {theirs[name]!r}, and"
                        " its adapters are trained on; expected the same"
                    )


def _names(section: type[Section]) -> set[str]:
    """Parts of its keys, and of those of a section that may be null (`lora.rank`)."""
    inner = [kind for _, field in fields(section) for kind in get_args(field.annotation)]
    optional = [kind for kind in inner if isinstance(kind, type) and issubclass(kind, Section)]
    parts = {part for key in keys(section) for part in key.split(".")}
    return parts.union(*(kind.model_fields for kind in optional))


def _description(section: type[Section], key: str) -> str:
    """Of the knob at a key or above it; "" for a whole section."""
    found = (field for name, field in fields(section) if f"{key}.".startswith(f"{name}."))
    return next((field.description or "" for field in found), "")


def _unknown(values: dict, path: Path) -> Iterator[str]:
    known = {key for section in all_knobs().values() for key in keys(section)}

    def walk(mapping: dict, prefix: str) -> Iterator[str]:
        for name, value in mapping.items():
            key = f"{prefix}{name}"
            if key in known:
                continue
            if any(other.startswith(f"{key}.") for other in known):
                if isinstance(value, dict):
                    yield from walk(value, f"{key}.")
                continue
            close = get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield f"{key}: no stage knows this key{hint}"

    return walk(values, "")
