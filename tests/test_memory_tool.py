"""tools/memory.py against what torch keeps and what transformers builds."""

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config

from tests.helpers.tiny import ROOT, small_params

spec = importlib.util.spec_from_file_location("memory", ROOT / "tools" / "memory.py")
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)

SIZES = {
    "vocab_size": 90,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "max_position_embeddings": 99,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 32}


def kept(layers: int, tokens: int, bf16: bool) -> int:
    """Bytes that a pass over two rows of so many tokens keeps, weights left out."""
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES, **HEADS)).train()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    found = {}

    def note(tensor):
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            found[place] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    ids = torch.arange(2 * tokens).reshape(2, tokens) % 90
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = model.model(input_ids=ids, use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(count for count, _ in found.values())


@pytest.mark.parametrize("bf16", [False, True])
def test_a_layer_keeps_of_each_token_what_the_tool_says(bf16):
    def of_a_token(layers: int) -> float:
        return (kept(layers, 96, bf16) - kept(layers, 64, bf16)) / 64

    shape = memory.shape_of(LlamaConfig(num_hidden_layers=2, **SIZES, **HEADS).to_dict())
    counted = of_a_token(4) - of_a_token(2)
    assert counted == pytest.approx(shape.kept(bf16, False), rel=0.01)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config])
def test_parameters_are_those_of_the_model_that_transformers_builds(kind, tied):
    config = kind(num_hidden_layers=3, tie_word_embeddings=tied, **SIZES, **HEADS)
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(config).num_parameters()
    assert memory.shape_of(config.to_dict()).parameters == pytest.approx(count, rel=5e-3)


def test_a_config_of_another_kind_is_refused_by_the_field_that_it_lacks():
    with pytest.raises(SystemExit, match="no field 'intermediate_size'"):
        memory.shape_of({"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1})


def need(**changes) -> dict:
    """Gigabytes of training and decoding a model of 8B, for 1,000 tokens."""
    shape = memory.Shape(32, 4096, 14336, 4096, 1024, 128256, False)
    knobs = json.loads(json.dumps(small_params(**changes), default=dict))
    ways = {"training": memory.training, "decoding": memory.decoding}
    return {name: way(shape, knobs).of(1000) / 1e9 for name, way in ways.items()}


def test_needs_of_8b_by_hand():
    found, cheap = need(), need(precision="bf16", gradient_checkpointing=True)
    # 8.03e9 parameters, a head's gradient, five pieces of logits, 11.8 MB a token in 32 layers
    assert found["training"] == pytest.approx(128.48 + 2.10 + 0.34 + 11.80, abs=0.05)
    assert found["decoding"] == pytest.approx(32.12 + 0.33 + 0.01, abs=0.05)
    # bf16 copies the weights, 16 GB; each layer keeps 16 KB a token, and one the rest
    assert cheap["training"] == pytest.approx(128.48 + 16.06 + 2.10 + 0.34 + 0.77, abs=0.05)
    assert cheap["decoding"] == pytest.approx(16.06 + 0.16 + 0.01, abs=0.05)


def test_the_report_names_the_knob_for_each_card():
    shape = memory.Shape(24, 896, 4864, 896, 128, 151936, True)  # Qwen2.5-0.5B
    sizes = {"prompts__max_length": 512, "max_new_tokens": 1024, "train_batch_size": 64}
    knobs = small_params(**sizes, precision="bf16", train_max_tokens=4096)
    lines = memory.report(shape, knobs, [24, 2]).splitlines()
    assert lines[0] == "0.49B parameters"
    assert lines[1].startswith("optimize       4,096 tokens a pass: ")
    assert "24 GB: train_max_tokens up to" in lines[1]
    assert lines[1].endswith("2 GB: a row of 1,536 does not fit")
