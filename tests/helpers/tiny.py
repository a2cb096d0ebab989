"""A params.yaml of seconds, derived from the repository's: same keys, small figures.

Tests set what they depend on themselves, so that tuning the defaults breaks none of them.
"""

import re
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]

SMALL = {
    "device": "cpu",
    "threads": 1,
    "precision": "float32",
    "nonfinite": "stop",
    "task.name": "spell_backward",
    "task.config": {"min_word_len": 3, "max_word_len": 3},
    "task.sft_rows": 24,
    "task.sft_wrong_share": 0.0,
    "task.preference_rows": 24,
    "task.prompt_rows": 12,
    "task.heldout_rows": 6,
    "model.source": "tiny",
    "model.hidden_size": 16,
    "model.intermediate_size": 32,
    "model.layers": 1,
    "model.heads": 2,
    "model.max_positions": 96,
    "sft.epochs": 1,
    "sft.train_batch_size": 8,
    "sft.batch_acc": 1,
    "preferences.validation_share": 0.3,
    "rm.epochs": 1,
    "rm.train_batch_size": 8,
    "rm.batch_acc": 1,
    "evaluate.samples": 2,
    "prompts_per_step": 4,
    "num_rollouts": 2,
    "max_new_tokens": 6,
    "overlong_buffer": 2,
    "dynamic_sampling": 0,
    "loss": "grpo",
    "loss_aggregation": "default",
    "kl_placement": "default",
    "kl_estimator": "default",
    "beta": 0.01,
    "critic": "reward_model",
    "ppo_epochs": 1,
    "train_batch_size": 4,
    "batch_acc": 1,
    "verifier": "task",
    "verifier_pattern": None,
    "rewards": {"correctness": 1.0, "format": None, "length": None, "reward_model": 0.1},
    "rounds": {"1": "models/sft", "2": "models/policy/1"},
}


def plain(path: Path) -> dict:
    """A YAML file as plain values."""
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))


def write(path: Path, values: dict) -> None:
    """Plain values as a YAML file; keys stay text (`'1'`)."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    with path.open("w", encoding="utf-8") as file:
        yaml.dump(values, file)


def change(values: dict, **changes) -> dict:
    """A copy of nested values with dotted keys changed (`__` for a dot): change(v, sft__lr=1.0)."""
    return _with(values, {key.replace("__", "."): value for key, value in changes.items()})


def small_params(**changes) -> dict:
    """The repository's knobs with SMALL over them, and `changes` (dots as `__`) over those."""
    return change(_with(plain(ROOT / "params.yaml"), SMALL), **changes)


def _with(values: dict, changes: dict) -> dict:
    values = {k: dict(v) if isinstance(v, dict) else v for k, v in values.items()}
    for key, value in changes.items():
        *sections, name = key.split(".")
        target = values
        for section in sections:
            target = target[section]
        target[name] = value
    return values


def _at(values: dict, key: str):
    for part in key.split("."):
        values = values[part]
    return values


def command_line(stage: str, rounds: dict | None = None) -> tuple[str, dict[str, str]]:
    """`rollout@2` of dvc.yaml -> its script and options, for the rounds of SMALL or those given.

    `train_direct@dpo` is a branch that starts from models/sft, `score_answers@rm` reads models/rm.
    """
    name, _, key = stage.partition("@")
    body = plain(ROOT / "dvc.yaml")["stages"][name]
    command = body.get("do", body)["cmd"]
    if key:
        item = ((rounds or SMALL["rounds"]) | {"dpo": "models/sft", "rm": "models/rm"})[key]
        command = command.replace("${key}", key).replace("${item}", item)
    for key in re.findall(r"\$\{([a-z_.]+)\}", command):  # knobs that dvc.yaml puts in
        command = command.replace(f"${{{key}}}", str(_at(small_params(), key)))
    words = command.split()
    return words[2].removeprefix("stages."), dict(zip(words[3::2], words[4::2], strict=True))
