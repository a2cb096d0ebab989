"""Every stage that may run for long, on tiny inputs: what they read, and their command lines."""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from stages.base import command
from stages.base.environment import SAVE_MINUTES, SCRATCH
from stages.models.checkpoints import save_model
from stages.rows import inputs
from tests.helpers.models import byte_tokenizer, gpt2, gpt2_scorer
from tests.helpers.tiny import small_params, write

# Scores that float32 does not hold, and groups whose answers are alike.
RULE = """
def share(text, answer, entry):
    return 0.1 if len(answer) == 2 else len(set(text)) / 7 % 1
"""
TRAINING = {"train_batch_size": 2, "batch_acc": 2, "lr": 3e-3, "warmup_steps": 3}
CHANGES = {
    f"{s}__{name}": value for s in ("sft", "rm", "direct") for name, value in TRAINING.items()
}
CHANGES |= {
    "sft__max_length": 40,
    "sft__drop_last": True,
    "verifier": "odd_rule:share",
    "loss": "ppo",
    "nonfinite": "skip",
    "ppo_epochs": 2,
    "batch_acc": 2,
    "prompts_per_step": 7,
    "num_rollouts": 3,
    "max_new_tokens": 6,
    "overlong_buffer": 3,
    "rollout_batch_size": 6,
    "dynamic_sampling": 3,
    "temperature": 0.9,
    "score_batch_size": 4,
    "beta": 0.05,
    "evaluate__samples": 2,
    "evaluate__batch_size": 4,
}
BY_ROWS = {
    "tokenize_sft": "--task task/sft.jsonl --base models/sft",
    "tokenize_preferences": "--task task/preferences.jsonl --base models/sft",
    "rollout": "--round 1 --policy models/sft --task task/prompts.jsonl --source data/source",
    "score": "--rollouts made/rollout/out --policy models/sft --reward-model models/rm"
    " --reference models/sft",
    "evaluate": "--policy models/sft --task task/prompts.jsonl --source data/source",
    "score_pairs": "--train made/tokenize_preferences/out"
    " --validation made/tokenize_preferences/out --reference models/sft",
}
BY_STEPS = {
    "train_sft": "--data made/tokenize_sft/out --base models/sft",
    "train_rm": "--kind bradley_terry --train made/tokenize_preferences/out"
    " --validation made/tokenize_preferences/out --sft models/sft",
    "train_direct": "--train made/score_pairs/train --validation made/score_pairs/validation"
    " --policy models/sft",
    "optimize": "--round 1 --buffer made/score/out --policy models/sft --reward-model models/rm",
}
STAGES = BY_ROWS | BY_STEPS


def words(stage: str, out: str) -> list[str]:
    """The options of a stage whose outputs go into a folder `out`."""
    outputs = {"--figures": "figures.json"}
    if stage == "score_pairs":
        outputs |= {"--train-out": "train", "--validation-out": "validation"}
    else:
        outputs["--out"] = "out"
    if stage in BY_STEPS:
        outputs["--curve"] = "curve.csv"
    if stage == "optimize":
        outputs["--updates"] = "updates"
    named = [word for option, name in outputs.items() for word in (option, f"{out}/{name}")]
    return [*STAGES[stage].split(), *named]


def run(stage: str, out: str):
    """Run a stage in this process and this folder."""
    script = getattr(import_module(f"stages.{stage}"), stage)
    return CliRunner().invoke(script, words(stage, out))


def make(folder: Path) -> Path:
    """Models with dropout, prompts and rows, and what the stages made of them, under made/."""
    (folder / "data" / "source").mkdir(parents=True)
    (folder / "data" / "source" / "odd_rule.py").write_text(RULE)
    tokenizer = byte_tokenizer()
    policy = gpt2(vocabulary=len(tokenizer), dropout=0.2)
    policy.generation_config.eos_token_id = [2, *range(40, 90)]
    scorer = gpt2_scorer(vocabulary=len(tokenizer), dropout=0.2)
    for name, model in {"sft": policy, "rm": scorer}.items():
        (folder / "models" / name).mkdir(parents=True)
        save_model(folder / "models" / name, model, tokenizer)
    said = ["ab", "hello", "x", "some words", "é", "longer still", "zz", "seven", "to", "cat"]
    rows = {"prompts": [], "sft": [], "preferences": []}
    for i in range(17):
        word = said[i % 10]
        prompt = [{"role": "user", "content": word * (1 + i // 10)}]
        rows["prompts"].append({"prompt": prompt, "answer": word})
        rows["sft"].append({"prompt": word, "completion": "" if i in (3, 9) else word * i})
        pair = {"prompt": word, "chosen": f"{word}!", "rejected": "" if i == 8 else "no"}
        rows["preferences"].append(pair)
    (folder / "task").mkdir()
    for name, lines in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in lines)
        (folder / "task" / f"{name}.jsonl").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        alone(patch, folder)
        patch.setenv(SAVE_MINUTES, "0")
        for stage in ("tokenize_sft", "tokenize_preferences", "score_pairs", "rollout", "score"):
            result = run(stage, f"made/{stage}")
            assert result.exit_code == 0, result.output
    return folder


def set_knobs(folder: Path, **changes) -> None:
    write(folder / "params.yaml", small_params(**CHANGES | changes))


def alone(patch, folder: Path) -> None:
    """Work in a folder, as a process of its own does."""
    patch.chdir(folder)
    patch.setattr(command, "stop_with_parent", lambda: None)
    patch.setattr(inputs, "BATCH", 4)
    patch.setattr(sys, "path", list(sys.path))
    patch.delitem(sys.modules, "odd_rule", raising=False)
    patch.delenv(SCRATCH, raising=False)
    set_knobs(folder)


def copy(made: Path, folder: Path) -> Path:
    return shutil.copytree(made, folder, ignore=shutil.ignore_patterns("__pycache__"))
