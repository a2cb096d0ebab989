"""LoRA by the command lines of its page: what runs again, and what others load."""

import pytest

from tests.helpers.clone import run
from tests.pipeline.running import dvc, executed, of_round

pytestmark = pytest.mark.slow

SHAPE = "{rank: 2, alpha: 4, dropout: 0.0, targets: all-linear}"
ROUNDS = of_round(1) | of_round(2)
LOAD = """
import sys
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM
import torch

ids = torch.tensor([[5, 6, 7]])
found = [
    kind.from_pretrained(sys.argv[1]).eval()(input_ids=ids).logits
    for kind in (AutoPeftModelForCausalLM, AutoModelForCausalLM)
]
print("alike" if torch.equal(*found) else "apart")
"""


def test_rounds_by_adapters_are_one_knob(copy):
    output = dvc(copy, "exp", "run", "-S", f"lora={SHAPE}").stdout
    assert executed(output) == ROUNDS - {"rollout@1", "score@1"} | {"report"}
    assert sorted(p.name for p in (copy / "models/policy/2").glob("*.safetensors")) == [
        "adapter_model.safetensors"
    ]
    assert "alike" in run(copy, "python", "-c", LOAD, "models/policy/2").stdout
    shown = run(copy, "python", "-m", "stages.show", "models/policy/2").stdout
    assert "LoRA of rank 2, alpha 4" in shown and "models/sft" in shown
    run(copy, "python", "-m", "stages.merge", "models/policy/2", "merged")
    assert (copy / "merged/model.safetensors").is_file()


def test_every_training_by_adapters_is_four_knobs(copy):
    knobs = [f"{section}lora={SHAPE}" for section in ("sft.", "rm.", "direct.", "")]
    words = [word for knob in [*knobs, "+branches.dpo=models/sft"] for word in ("-S", knob)]
    output = dvc(copy, "exp", "run", *words).stdout
    direct = {f"{stage}@dpo" for stage in ("score_pairs", "train_direct", "evaluate_direct")}
    assert executed(output) == (
        ROUNDS | direct | {"train_sft", "train_rm", "evaluate_sft", "report"}
    )
    for name in ("sft", "rm", "direct/dpo", "policy/1", "policy/2"):
        files = [p.name for p in (copy / "models" / name).glob("*.safetensors")]
        assert files == ["adapter_model.safetensors"], name
    assert "alike" in run(copy, "python", "-c", LOAD, "models/policy/2").stdout
    assert executed(dvc(copy, "repro").stdout) == set()
