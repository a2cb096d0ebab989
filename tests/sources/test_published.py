"""What comes of a published folder beside its weights: special ids, experts, errors in one line."""

import json
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from stages.base.errors import BadKnob, InputError
from stages.models.checkpoints import load_policy
from stages.sources.published import drop_balancing, load_foreign
from tests.helpers.models import (
    byte_tokenizer,
    gpt2,
    llama,
    mixtral,
    same_weights,
    saved,
    weights_of,
)
from tests.helpers.own_code import edit

SIZE = len(byte_tokenizer())
SAMPLING = {
    "temperature": {"temperature": 0.9, "top_p": 0.6},
    "early stopping": {"early_stopping": True},
    "sequences": {"num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "sampled": {"do_sample": True, "temperature": 0.0, "top_k": -1},
    "of no kind": {"temperature": "hot", "max_new_tokens": -3, "penalty_alpha": None},
    "lengths": {"max_length": 20, "min_length": 40, "forced_eos_token_id": 9},
}


@pytest.mark.parametrize("fields", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_n20_how_a_model_samples_is_dropped_and_its_special_ids_are_kept(name, fields, tmp_path):
    source = saved(tmp_path / "source", llama(vocabulary=SIZE))
    edit(source / name, fields | {"eos_token_id": [2, 7], "bos_token_id": 5})
    model, tokenizer = load_foreign(str(source), None, False)
    base = saved(tmp_path / "base", model, tokenizer)
    found = GenerationConfig.from_pretrained(base)
    assert (found.eos_token_id, found.bos_token_id) == ([2, 7], 5)
    assert found.to_diff_dict().keys() & fields.keys() == set()
    assert json.loads((base / "config.json").read_text()).keys() & fields.keys() == set()
    assert same_weights(weights_of(model), weights_of(llama(vocabulary=SIZE)))


RUNNING = {
    "attentions": {"output_attentions": True},
    "states": {"output_hidden_states": True, "return_dict": False, "use_cache": False},
    "attention": {"attn_implementation": "flash_attention_2"},
    "older": {"_attn_implementation": "flash_attention_2"},
}


@pytest.mark.parametrize("fields", RUNNING.values(), ids=RUNNING)
def test_n20_how_a_model_was_run_is_dropped(fields, tmp_path):
    source = saved(tmp_path / "source", llama(vocabulary=SIZE))
    edit(source / "config.json", fields)
    model, tokenizer = load_foreign(str(source), None, False)
    base = saved(tmp_path / "base", model, tokenizer)
    written = json.loads((base / "config.json").read_text())
    assert not any(written.get(name) for name in fields.keys() - {"return_dict"})
    policy = load_policy(base, "sdpa", torch.device("cpu"))
    assert not {"attentions", "hidden_states"} & policy(torch.tensor([[5, 6]])).keys()
    assert same_weights(weights_of(policy), weights_of(llama(vocabulary=SIZE)))


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path):
    source = saved(tmp_path / "source", llama(vocabulary=SIZE))
    with pytest.raises(BadKnob, match="config.json is a file, expected its folder or a GGUF"):
        load_foreign(str(source / "config.json"), None, False)


def test_the_generation_config_speaks_before_the_config(tmp_path):
    source = saved(tmp_path / "source", llama(vocabulary=SIZE))
    edit(source / "config.json", {"eos_token_id": 7, "bos_token_id": 8})
    edit(source / "generation_config.json", {"eos_token_id": [2, 9], "bos_token_id": None})
    found = load_foreign(str(source), None, False)[0].generation_config
    assert (found.eos_token_id, found.bos_token_id) == ([2, 9], 8)
    (source / "generation_config.json").unlink()
    assert load_foreign(str(source), None, False)[0].generation_config.eos_token_id == 7


@pytest.mark.parametrize("value", ["</s>", 2.0, [2, None], True])
def test_a_special_id_that_is_none_is_refused(value, tmp_path):
    source = saved(tmp_path / "source", llama(vocabulary=SIZE))
    edit(source / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(InputError, match="found {'eos_token_id': .*}, expected ids of tokens"):
        load_foreign(str(source), None, False)


ODD_CONFIGS = {
    "type": ({"model_type": "nosuch"}, "`nosuch` but Transformers does not recognize"),
    "width": ({"hidden_size": "big"}, "'hidden_size' expected int"),
    "heads": ({"num_attention_heads": 0}, "ZeroDivisionError"),
    "rope": ({"rope_scaling": {"type": "foo"}}, "KeyError: 'foo'"),
    "pad": ({"pad_token_id": 5000}, "Padding_idx must be within"),
    "vocabulary": ({"vocab_size": 99}, "shape (262, 32), expected (99, 32)"),
    "another": ({"model_type": "gpt2"}, "expected every weight of GPT2LMHeadModel"),
    "task": ({"architectures": ["LlamaForTokenClassification"]}, "expected a causal language"),
    "decoder of two": ({"architectures": ["BartForConditionalGeneration"]}, "expected a causal"),
}


@pytest.mark.parametrize(("fields", "words"), ODD_CONFIGS.values(), ids=ODD_CONFIGS)
def test_an_odd_config_ends_in_one_line(fields, words, tmp_path):
    source = saved(tmp_path / "source", llama(vocabulary=SIZE))
    edit(source / "config.json", fields)
    with pytest.raises(InputError) as error:
        load_foreign(str(source), None, False)
    assert words in str(error.value) and str(source) in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 800


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_broken_config_is_named(name, text, tmp_path):
    source = saved(tmp_path / "source", llama(vocabulary=SIZE))
    (source / name).write_text(text)
    with pytest.raises(InputError, match=rf"source/{name}: (not JSON|found .* expected a JSON)"):
        load_foreign(str(source), None, False)


@pytest.mark.parametrize("source", ["models/source/none", "a/b/c", "nowhere/at-all"])
def test_a_folder_that_is_not_there_is_named(source, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadKnob, match=f"model.source: cannot load '{source}': no such file or fo"):
        load_foreign(source, None, False)


def hub(folder: Path, repository: str, make, monkeypatch) -> Path:
    """The snapshot of a repository in a hub's cache, as if it had been fetched; no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place = folder / f"models--{repository.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    return saved(place / "snapshots" / ("a" * 40), make(vocabulary=SIZE))


def test_a_model_of_the_hub_is_the_same_as_its_folder(tmp_path, monkeypatch):
    folder = hub(tmp_path / "hub", "me/plain", gpt2, monkeypatch)
    (folder / "pytorch_model.bin").touch()  # fetched by another program, and never read here
    edit(folder / "generation_config.json", {"eos_token_id": 2, "temperature": 0.9})
    first = saved(tmp_path / "first", *load_foreign("me/plain", None, False))
    second = saved(tmp_path / "second", *load_foreign(str(folder), None, False, True))
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert [n for n in names if (first / n).read_bytes() != (second / n).read_bytes()] == []


def test_n02_a_model_of_the_hub_with_an_adapter_is_refused(tmp_path, monkeypatch):
    folder = hub(tmp_path / "hub", "me/adapted", llama, monkeypatch)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="adapter_config.json: an adapter.* merge it"):
        load_foreign("me/adapted", None, False)


def test_n22_a_balancing_loss_that_a_config_asks_for_is_said_not_to_be_trained(tmp_path):
    asks = mixtral(SIZE, output_router_logits=True, router_aux_loss_coef=0.25)
    model, _ = load_foreign(str(saved(tmp_path / "source", asks)), None, False)
    line = drop_balancing(model.config)
    assert "output_router_logits; router_aux_loss_coef: 0.25" in line and "\n" not in line
    assert "no stage here trains" in line
    assert model.config.output_router_logits is False
    assert same_weights(weights_of(model), weights_of(asks))


@pytest.mark.parametrize("make", [mixtral, llama])
def test_a_model_that_asks_for_no_balancing_loss_gets_no_line(make):
    assert drop_balancing(make().config) is None
