"""What a model folder holds and where it came from, by headers and JSON: no weight is read."""

import json
import re
from collections import Counter
from math import prod
from pathlib import Path

from ruamel.yaml import YAML
from safetensors import SafetensorError, safe_open

from stages.base.errors import InputError
from stages.text.messages import kind_of

START = re.compile(r"--(?:policy|sft|base) (\S+)")


ADAPTERS = "adapter_config.json"


def is_model(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.json", ADAPTERS))


def describe(folder: Path) -> dict[str, str]:
    """Label -> text: architecture, parameters by dtype, vocabulary, training state, origin.

    Of adapters also their shape and their base, whose architecture it is.
    """
    base, adapters = adapters_of(folder)
    config = _object(base / "config.json", "a model's configuration")
    found = adapters | {"architecture": ", ".join(config.get("architectures") or ["unknown"])}
    shape = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    found["shape"] = ", ".join(f"{name} {config[name]}" for name in shape if name in config)
    sizes = parameters(folder)
    by_dtype = " + ".join(f"{count:,} {dtype}" for dtype, count in sizes.items())
    found["parameters"] = by_dtype or "no safetensors weights"
    found["vocabulary"] = str(config.get("vocab_size", "unknown"))
    state = folder / "trainer" / "state.json"
    if state.is_file():
        kept = _object(state, "what `optimize` keeps of a training")
        critic = "with" if (folder / "trainer" / "critic").is_dir() else "without"
        rounds = ", ".join(map(str, kept.get("rounds", [])))
        found["trained"] = f"rounds {rounds}; {kept.get('step')} optimizer steps; {critic} a critic"
        if kept.get("moments") == "none":
            found["trained"] += "; moments were not kept"
    found["origin"] = " <- ".join(lineage(folder)) or "no dvc.lock above names this folder"
    return found


def adapters_of(folder: Path) -> tuple[Path, dict[str, str]]:
    """(where config.json lies, what there is to say of adapters): the base of a folder of adapters.

    Its path is seen from here, or from the repository that the folder lies in.
    """
    if not (folder / ADAPTERS).is_file():
        return folder, {}
    told = _object(folder / ADAPTERS, "what peft keeps of adapters")
    named = str(told.get("base_model_name_or_path"))
    homes = [Path(), *folder.resolve().parents]
    base = next((home / named for home in homes if (home / named).is_dir()), None)
    if base is None:
        raise InputError(f"{folder}: its adapters are for {named}, which is not there")
    targets = told.get("target_modules")
    on = ", ".join(targets) if isinstance(targets, list) else targets
    shape = f"LoRA of rank {told.get('r')}, alpha {told.get('lora_alpha')}, on {on}"
    return base, {"adapters": shape, "base": named}


def _object(file: Path, expected: str) -> dict:
    """A JSON object; `InputError` says what the file should hold."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file}: not JSON ({error}); expected {expected}") from error
    if not isinstance(found, dict):
        raise InputError(f"{file}: holds {kind_of(found)}; expected {expected}")
    return found


def parameters(folder: Path) -> Counter:
    """dtype -> number of parameters, as stored: tied weights count once."""
    sizes = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as weights:
                for name in weights.keys():  # noqa: SIM118 (no mapping)
                    part = weights.get_slice(name)
                    sizes[part.get_dtype()] += prod(part.get_shape())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: not readable as safetensors ({error})") from error
    return sizes


def lineage(folder: Path) -> list[str]:
    """The model, what it was trained from, and so on back to `model.source`, as dvc.lock says."""
    folder = folder.resolve()
    root = next((p for p in folder.parents if (p / "dvc.lock").is_file()), None)
    if root is None:
        return []
    made = _makers(root / "dvc.lock")
    name, found = str(folder.relative_to(root)), []
    while name in made and name not in found:
        stage, entry = made[name]
        found.append(name)
        start = START.search(entry["cmd"])
        source = entry.get("params", {}).get("params.yaml", {}).get("model.source")
        name = start[1] if start else str(source)
    return [*found, name] if found else []


def outputs(lock: Path) -> dict[str, str]:
    """Path -> MD5 of every output in DVC's cache that a dvc.lock names."""
    return {
        out["path"]: out["md5"]
        for _, entry in _makers(lock).values()
        for out in entry["outs"]
        if "md5" in out
    }


def readers(lock: Path, folders: set[str]) -> list[str]:
    """The stages of a dvc.lock that read or write one of the folders."""
    stages = YAML(typ="safe").load(lock.read_text(encoding="utf-8")).get("stages", {})
    return [
        stage
        for stage, entry in stages.items()
        if folders & {item["path"] for item in [*entry.get("deps", []), *entry.get("outs", [])]}
    ]


def _makers(lock: Path) -> dict[str, tuple[str, dict]]:
    """Output -> (stage, its entry in dvc.lock)."""
    stages = YAML(typ="safe").load(lock.read_text(encoding="utf-8")).get("stages", {})
    return {
        out["path"]: (stage, entry)
        for stage, entry in stages.items()
        for out in entry.get("outs", [])
    }
