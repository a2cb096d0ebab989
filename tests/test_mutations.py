"""Faults planted in the maths: for each one a quick test must go red.

Each case edits one line in a copy of the code and runs the tests of that module.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.helpers.tiny import ROOT

pytestmark = pytest.mark.slow

OBJECTIVES = "stages/rl/objectives.py"
ADVANTAGES = "stages/rl/advantages.py"
EPOCHS = "stages/rl/epochs.py"


@dataclass(frozen=True)
class Fault:
    """`old`, which stands in `file` once, becomes `new`; `tests`, or the module's own, notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str = ""


FAULTS = [
    Fault(
        "sign of the policy gradient",
        OBJECTIVES,
        "loss = -_on_actions(advantages, action_mask) * log_probs",
        "loss = _on_actions(advantages, action_mask) * log_probs",
    ),
    Fault(
        "sign of the clipped loss",
        OBJECTIVES,
        "return -torch.where(clipped",
        "return torch.where(clipped",
    ),
    Fault("optimistic clip", OBJECTIVES, "clipped = bounded < plain", "clipped = bounded > plain"),
    Fault(
        "no lower bound",
        OBJECTIVES,
        "bounded = ratio.clamp(1 - clip.clip_eps_lo, ",
        "bounded = ratio.clamp(0, ",
    ),
    Fault(
        "old and new swapped",
        OBJECTIVES,
        "log_probs - log_probs_old, 0.0)",
        "log_probs_old - log_probs, 0.0)",
    ),
    Fault(
        "mask dropped from the ratio",
        OBJECTIVES,
        "return torch.where(action_mask, log_probs - log_probs_old, 0.0)",
        "return log_probs - log_probs_old",
    ),
    Fault(
        "mask dropped from the advantage",
        OBJECTIVES,
        "return torch.where(action_mask, advantages, 0.0)",
        "return advantages.expand(action_mask.shape)",
    ),
    Fault(
        "gradient through the weight",
        OBJECTIVES,
        "action_mask).exp().detach()",
        "action_mask).exp()",
    ),
    Fault(
        "gate temperatures swapped",
        OBJECTIVES,
        "masked_fill(advantages > 0,",
        "masked_fill(advantages < 0,",
    ),
    Fault(
        "unused rows weigh", OBJECTIVES, "return torch.where(used, weights, 0.0)", "return weights"
    ),
    Fault(
        "unused rows in the divisor",
        OBJECTIVES,
        "rows = used.sum()",
        "rows = torch.ones_like(used).sum()",
    ),
    Fault(
        "value loss takes the smaller", OBJECTIVES, "0.5 * torch.maximum(", "0.5 * torch.minimum("
    ),
    Fault("population deviation", ADVANTAGES, "(rewards.std() +", "(rewards.std(correction=0) +"),
    Fault("leave-one-out keeps the one", ADVANTAGES, "(size / (size - 1))", "1.0"),
    Fault(
        "NaN rewards in the mean",
        ADVANTAGES,
        "usable = ~rewards.isnan()",
        "usable = torch.ones_like(rewards).bool()",
    ),
    Fault(
        "value enters with a plus",
        ADVANTAGES,
        "next_value - values[:, t]",
        "next_value + values[:, t]",
    ),
    Fault(
        "GAE without gamma",
        ADVANTAGES,
        "delta + gamma * lam * next_advantage",
        "delta + lam * next_advantage",
    ),
    Fault(
        "whitening by the population",
        ADVANTAGES,
        "rsqrt(valid.var() +",
        "rsqrt(valid.var(correction=0) +",
    ),
    Fault(
        "KL paid instead of charged",
        ADVANTAGES,
        "return rewards - beta *",
        "return rewards + beta *",
    ),
    Fault("KL over padding", ADVANTAGES, "torch.where(action_mask, kl, 0.0).sum(1)", "kl.sum(1)"),
    Fault(
        "policy and reference swapped",
        "stages/rl/kl.py",
        "x = log_probs - log_probs_ref",
        "x = log_probs_ref - log_probs",
    ),
    Fault(
        "k3 without its control",
        "stages/rl/kl.py",
        "return torch.expm1(-x) + x",
        "return torch.expm1(-x)",
    ),
    Fault(
        "KL not added to the loss",
        EPOCHS,
        "loss = loss + settings.beta * kl_ref",
        "loss = loss - settings.beta * kl_ref",
    ),
    Fault("KL in reward and in loss", EPOCHS, 'if settings.kl_placement == "loss":', "if True:"),
    Fault(
        "no whitening for PPO",
        EPOCHS,
        "_cut(whiten(advantages, scored), lengths)",
        "_cut(advantages, lengths)",
    ),
    Fault(
        "temperature multiplied",
        "stages/models/log_probs.py",
        "torch.float32)) / temperature",
        "torch.float32)) * temperature",
        "tests/models",
    ),
    Fault(
        "reward model prefers the rejected",
        "stages/training/bradley_terry.py",
        "gap = chosen - rejected\n    if margin",
        "gap = rejected - chosen\n    if margin",
        "tests/training/test_bradley_terry.py",
    ),
    Fault(
        "score read one token early",
        "stages/models/scorers.py",
        "states.lengths]\n    return scorer.score(last)",
        "states.lengths - 1]\n    return scorer.score(last)",
        "tests/models/test_scorers.py",
    ),
    Fault(
        "states of the answer read one token late",
        "stages/models/forward.py",
        "[len(rest) - 1 for rest in rests], completions",
        "[len(rest) for rest in rests], completions",
        "tests/models",
    ),
    Fault(
        "micro-batches averaged, not added",
        "stages/training/steps.py",
        "total, kept = total + loss.detach(), kept + 1",
        "total, kept = total + loss.detach() / 2, kept + 1",
        "tests/training",
    ),
    Fault(
        "rate of 0 in the first update",
        "stages/training/steps.py",
        "learning_rate(done + 1,",
        "learning_rate(done,",
        "tests/training",
    ),
]


def module_tests(module: str) -> str:
    """stages/rl/kl.py -> tests/rl/test_kl.py"""
    folder, name = module.rsplit("/", 1)
    return f"tests{folder.removeprefix('stages')}/test_{name}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_turns_a_test_red(fault, tmp_path):
    for name in ("stages", "tests", "pyproject.toml", "params.yaml", "dvc.yaml"):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    file = tmp_path / fault.file
    text = file.read_text()
    assert text.count(fault.old) == 1, (
        f"{fault.file}: {fault.old!r} stands there {text.count(fault.old)} times"
    )
    file.write_text(text.replace(fault.old, fault.new))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            fault.tests or module_tests(fault.file),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, f"no test noticed: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    assert " failed" in done.stdout
