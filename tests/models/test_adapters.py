"""LoRA adapters in a model and in peft's folders. (Expected: peft itself, hand arithmetic.)"""

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.base.bases import base_of, with_bases
from stages.base.errors import BadKnob, InputError
from stages.base.knobs import Lora
from stages.models.adapters import (
    adapter_weights,
    add_adapters,
    has_adapters,
    make_trainable,
    merge,
)
from stages.models.checkpoints import load_policy, load_scorer, new_scorer
from stages.training.steps import adamw, update
from tests.helpers.models import (
    byte_tokenizer,
    cpu_accelerator,
    gpt2,
    llama,
    plain_logits,
    same_weights,
    saved,
    weights_of,
)

CPU = torch.device("cpu")
SIZE = len(byte_tokenizer())
LORA = Lora(rank=4, alpha=8.0, dropout=0.0, targets="all-linear")
PROMPT, COMPLETION = [3, 9, 27, 1], [250, 4, 77]
MAKERS = {"llama": llama, "gpt2": gpt2}


@pytest.fixture(params=MAKERS)
def workspace(request, tmp_path, monkeypatch):
    """A folder to work in with a whole model in models/sft."""
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    saved(Path("models/sft"), MAKERS[request.param](vocabulary=SIZE))
    return tmp_path


def load(folder: str):
    return load_policy(Path(folder), "eager", CPU)


def disturb(model, seed: int = 1) -> None:
    """Give every trained weight a value of its own: fresh adapters change nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in adapter_weights(model).values():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)


def adapted(folder: str = "models/policy/1", lora: Lora = LORA):
    """A policy with adapters beside models/sft, in memory and in a folder."""
    policy = load("models/sft")
    torch.manual_seed(1)
    make_trainable(policy, Path("models/sft"), lora, "lora")
    disturb(policy)
    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    saved(Path(folder), policy)
    return policy


def logits(model):
    with torch.no_grad():
        return plain_logits(model, PROMPT, COMPLETION)


def test_new_adapters_change_no_bit_and_only_they_are_trained(workspace):
    policy = load("models/sft")
    before = logits(policy)
    make_trainable(policy, Path("models/sft"), LORA, "lora")
    assert torch.equal(logits(policy), before)
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert trained == set(adapter_weights(policy)) and all("lora_" in name for name in trained)
    assert not any(module.training for module in policy.modules())
    assert type(policy) is type(load("models/sft"))


def test_adapters_come_back_from_their_folder_bit_for_bit(workspace):
    policy = adapted()
    loaded = load("models/policy/1")
    assert same_weights(weights_of(loaded), weights_of(policy))
    assert torch.equal(logits(loaded), logits(policy))
    assert not any(weight.requires_grad for weight in loaded.parameters())
    assert base_of(Path("models/policy/1")) == Path("models/sft")
    inputs = [Path("models/policy/1"), Path("task")]
    assert with_bases(inputs) == [Path("models/policy/1"), Path("models/sft"), Path("task")]


def test_peft_and_transformers_load_the_folder_with_the_same_logits(workspace):
    wanted = logits(adapted())
    for auto in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        model = auto.from_pretrained("models/policy/1", dtype=torch.float32).eval()
        assert torch.allclose(logits(model), wanted, atol=1e-5), auto
    assert (logits(load("models/sft")) - wanted).abs().max() > 1e-2
    assert len(AutoTokenizer.from_pretrained("models/policy/1")) == SIZE


def test_the_folder_holds_no_weight_of_the_base_and_has_the_same_bytes_twice(workspace):
    adapted("models/policy/1")
    adapted("models/policy/2")
    files = sorted(path.name for path in Path("models/policy/1").iterdir())
    for name in files:
        first, second = (Path(f"models/policy/{k}", name).read_bytes() for k in (1, 2))
        assert first == second, name
    assert "model.safetensors" not in files
    names = load_file("models/policy/1/adapter_model.safetensors")
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    told = json.loads(Path("models/policy/1/adapter_config.json").read_text())
    assert told["target_modules"] == sorted(told["target_modules"])
    assert not any("." in name for name in told["target_modules"])
    assert told["base_model_name_or_path"] == "models/sft"


def test_a_merged_model_adds_alpha_over_rank_times_the_product(workspace):
    policy = adapted()
    base = load("models/sft")
    merged = load("models/policy/1")
    merge(merged)
    assert not has_adapters(merged)
    assert set(weights_of(merged)) == set(weights_of(base))
    matrices, conv = weights_of(policy), type(base).__name__.startswith("GPT2")
    changed = 0
    for name, weight in weights_of(base).items():
        stem = name.removesuffix(".weight")
        product = torch.zeros_like(weight)
        if f"{stem}.lora_A.default.weight" in matrices:
            a, b = (matrices[f"{stem}.lora_{x}.default.weight"] for x in "AB")
            product = (8 / 4) * (b @ a)
            product, changed = product.T if conv else product, changed + 1
        assert torch.allclose(weights_of(merged)[name], weight + product, atol=1e-6), name
    assert changed
    assert torch.allclose(logits(merged), logits(policy), atol=1e-4)
    assert all(weight.requires_grad for weight in merged.parameters())
    saved(Path("models/merged"), merged)
    plain = AutoModelForCausalLM.from_pretrained("models/merged").eval()
    assert same_weights(weights_of(plain), weights_of(merged))


def test_whole_training_goes_on_from_adapters_by_merging_a_copy(workspace):
    adapted()
    before = {p.name: p.read_bytes() for p in Path("models/sft").iterdir()}
    policy = load("models/policy/1")
    make_trainable(policy, Path("models/policy/1"), None, "lora")
    assert not has_adapters(policy) and all(w.requires_grad for w in policy.parameters())
    assert {p.name: p.read_bytes() for p in Path("models/sft").iterdir()} == before


@pytest.mark.parametrize(
    ("key", "value"), [("rank", 8), ("alpha", 4.0), ("dropout", 0.1), ("targets", ["x"])]
)
def test_adapters_of_another_shape_are_not_trained_on(workspace, key, value):
    adapted()
    lora = Lora.model_validate(LORA.model_dump() | {key: value})
    with pytest.raises(BadKnob, match=rf"params.yaml: lora.{key}: found .* models/policy/1"):
        make_trainable(load("models/policy/1"), Path("models/policy/1"), lora, "lora")


def test_targets_that_the_model_lacks_are_refused_by_the_knob(workspace):
    lora = Lora(rank=4, alpha=8.0, dropout=0.0, targets=["no_such"])
    with pytest.raises(BadKnob, match="lora.targets: found .'no_such'"):
        add_adapters(load("models/sft"), Path("models/sft"), lora)


def test_only_the_targets_named_get_adapters(workspace):
    name = "c_attn" if "GPT2" in type(load("models/sft")).__name__ else "v_proj"
    policy = adapted(lora=Lora(rank=2, alpha=2.0, dropout=0.0, targets=[name]))
    assert {key.split(".")[-4] for key in adapter_weights(policy)} == {name}


def test_a_scorer_keeps_its_head_in_its_adapters(workspace):
    torch.manual_seed(3)
    scorer = new_scorer(Path("models/sft"), "eager", CPU)
    make_trainable(scorer, Path("models/sft"), LORA, "rm.lora")
    disturb(scorer)
    saved(Path("models/rm"), scorer)
    loaded = load_scorer(Path("models/rm"), "eager", CPU)
    assert same_weights(weights_of(loaded), weights_of(scorer))
    ids = torch.tensor([[5, 6, 7, 8]])
    by_peft = AutoPeftModelForSequenceClassification.from_pretrained("models/rm", num_labels=1)
    by_peft.config.pad_token_id = loaded.config.pad_token_id
    with torch.no_grad():
        wanted = loaded(input_ids=ids).logits
        assert torch.allclose(by_peft.eval()(input_ids=ids).logits, wanted, atol=1e-5)
    # And what starts from it trains the same head on, with the reward model's adapters.
    make_trainable(loaded, Path("models/rm"), LORA, "lora")
    assert loaded.score.weight.requires_grad


def test_a_critic_starts_from_a_policy_with_its_adapters_and_a_head_of_zeros(workspace):
    policy = adapted()
    critic = new_scorer(Path("models/policy/1"), "eager", CPU, zero_head=True)
    assert not critic.score.weight.any()
    mine, his = adapter_weights(critic), adapter_weights(policy)
    assert his.keys() == mine.keys() - {"score.weight"}
    assert all(torch.equal(his[name], mine[name]) for name in his)


def test_a_step_moves_the_adapters_alone_and_the_moments_are_theirs(workspace):
    policy = adapted()
    optimizer = adamw(policy, 1e-2, 0.0)
    before = weights_of(policy)
    loss = plain_logits(policy, PROMPT, COMPLETION).square().mean()
    update(cpu_accelerator(), policy, optimizer, [loss], 1e-2, 1.0, "stop")
    moved = {name for name, w in weights_of(policy).items() if not torch.equal(w, before[name])}
    assert moved == set(adapter_weights(policy))
    assert len(optimizer.state) == len(moved)


@pytest.mark.parametrize("fault", ["missing", "renamed", "shape", "nan", "cut"])
def test_adapters_that_do_not_fit_are_refused_by_file(workspace, fault):
    adapted()
    path = Path("models/policy/1/adapter_model.safetensors")
    tensors = load_file(path)
    name = sorted(tensors)[0]
    if fault == "missing":
        tensors.pop(name)
    elif fault == "renamed":
        tensors["other"] = tensors.pop(name)
    elif fault == "shape":
        tensors[name] = torch.zeros(1, 1)
    elif fault == "nan":
        tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, path, metadata={"format": "pt"})
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(InputError, match="models/policy/1/adapter_model.safetensors: "):
        load("models/policy/1")


@pytest.mark.parametrize("base", [None, "", 3, "models/none", "models/policy/1"])
def test_a_base_that_is_no_whole_model_is_refused(workspace, base):
    adapted()
    path = Path("models/policy/1/adapter_config.json")
    told = json.loads(path.read_text()) | {"base_model_name_or_path": base}
    path.write_text(json.dumps(told))
    with pytest.raises(InputError, match="models/policy/1.*expected"):
        load("models/policy/1")


def test_what_only_reads_a_policy_in_bf16_has_its_adapters_in_bf16_too(workspace):
    wanted = logits(adapted())
    policy = load_policy(Path("models/policy/1"), "eager", CPU, precision="bf16")
    assert {weight.dtype for weight in policy.parameters()} == {torch.bfloat16}
    assert torch.allclose(logits(policy).float(), wanted, atol=0.15)
    assert (logits(load("models/sft")) - wanted).abs().max() > 0.5
