"""Published weights: all of the model and nothing else's, or one line of refusal."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.base.errors import InputError
from stages.sources.published import load_foreign
from tests.helpers.models import (
    byte_tokenizer,
    gpt2,
    llama,
    llama_scorer,
    same_weights,
    saved,
    weights_of,
)
from tests.helpers.own_code import edit

SIZE = len(byte_tokenizer())
LAYER = "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def rewritten(folder, change):
    """The folder, its weights those that `change` makes of them."""
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def source(tmp_path, change=dict, **options):
    return rewritten(saved(tmp_path / "source", llama(vocabulary=SIZE, **options)), change)


def renamed(old: str, new: str):
    """A change of weights: `old` in their names becomes `new`."""
    return lambda weights: {name.replace(old, new, 1): w for name, w in weights.items()}


def without(part: str):
    return lambda weights: {name: w for name, w in weights.items() if part not in name}


def cast(part: str, change):
    return lambda weights: {n: change(w) if part in n else w for n, w in weights.items()}


def refused(folder, *words: str) -> None:
    """The folder is refused in one line that holds all words."""
    with pytest.raises(InputError) as error:
        load_foreign(str(folder), None, False)
    message = str(error.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message


def accepted(folder):
    """Weights of the model that comes out of a folder."""
    return weights_of(load_foreign(str(folder), None, False)[0])


# Names.


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("old", "new", "prefix"),
    [
        ("", "_orig_mod.", "_orig_mod."),
        ("", "module.", "module."),
        ("", "policy.", "policy."),
        ("", "base_model.model.", "base_model."),
        ("model.layers", "model._orig_mod.layers", "_orig_mod."),
        (".mlp.", "._checkpoint_wrapped_module.mlp.", "_checkpoint_wrapped_module."),
    ],
)
def test_n02_names_of_a_wrapped_model_are_refused(old, new, prefix, tied, tmp_path):
    folder = source(tmp_path, renamed(old, new), tied=tied)
    refused(folder, f"{prefix!r}", LAYER.partition("layers")[0], "without its wrapper", " more)")


def test_n02_an_untied_model_without_its_head_is_refused(tmp_path):
    refused(source(tmp_path, without("lm_head"), tied=False), "no weights for lm_head.weight;")


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_tied_model_needs_no_head(make, tmp_path):
    model = make(vocabulary=SIZE)
    folder = saved(tmp_path / "source", model)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert same_weights(accepted(folder), weights_of(model))


def test_a_head_of_its_own_is_kept_whatever_the_config_says_of_ties(tmp_path):
    """transformers keeps both; other programs go by the config, which must say so."""
    embedding = "model.embed_tokens.weight"
    folder = source(tmp_path, lambda w: w | {"lm_head.weight": w[embedding] + 1})
    model, _ = load_foreign(str(folder), None, False)
    found = weights_of(model)
    assert torch.equal(found["lm_head.weight"], found[embedding] + 1)
    assert model.config.tie_word_embeddings is False


def test_n02_a_weight_that_is_absent_is_named(tmp_path):
    refused(source(tmp_path, without(LAYER)), f"no weights for {LAYER};", "LlamaForCausalLM")


def test_of_many_absent_weights_three_are_named_and_the_rest_counted(tmp_path):
    layer = source(tmp_path, without("layers.1."))
    refused(layer, "layers.1.input_layernorm.weight, ", LAYER, "and 6 more;")


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("model.layers.2.mlp.down_proj.weight", LAYER),
        ("model.layers.1.mlp.down_proj.bias", "model.norm.weight"),
        ("model.layers.1.mlp.down_proj.lora_A.weight", LAYER),
        ("v_head.summary.weight", "model.norm.weight"),
    ],
    ids=["a layer more", "a bias more", "an adapter's", "a value head"],
)
def test_n02_a_weight_that_the_model_has_no_place_for_is_refused(name, like, tmp_path):
    folder = source(tmp_path, lambda w: w | {name: w[like].clone()})
    refused(folder, f"no place for the weights {name};")


def test_n02_fewer_layers_in_the_config_than_in_the_file_are_refused(tmp_path):
    folder = source(tmp_path)
    edit(folder / "config.json", {"num_hidden_layers": 1})
    refused(folder, "no place for the weights model.layers.1.", "and 6 more")


def test_n02_a_weight_of_another_shape_is_refused(tmp_path):
    folder = source(tmp_path, lambda w: w | {QUERY: w[QUERY][:-1].clone()})
    refused(folder, f"{QUERY} has shape (31, 32), expected (32, 32)")


@pytest.mark.parametrize("named", [True, False])
def test_n02_a_classifier_is_refused(named, tmp_path):
    folder = saved(tmp_path / "source", llama_scorer(vocabulary=SIZE))
    if not named:
        edit(folder / "config.json", {"architectures": None})
    words = "LlamaForSequenceClassification" if named else "score.weight"
    refused(folder, words, "expected")


def test_masks_of_old_checkpoints_are_left_out(tmp_path):
    """Integers and booleans, which transformers has on its list of what to leave out."""
    model = gpt2(vocabulary=SIZE)
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()}
    folder = rewritten(saved(tmp_path / "source", model), lambda w: w | mask)
    assert same_weights(accepted(folder), weights_of(model))


# Numbers.


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_n02_float8_without_a_quantization_entry_is_refused(kind, tmp_path):
    folder = source(tmp_path, cast("proj", lambda w: w.to(kind)))
    refused(folder, "model.layers.0.mlp.down_proj.weight", "F8_E", "no quantization_config")


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def in_float8(weights):
    """Projections as float8 beside the scale that makes the largest 448, as published."""
    found = dict(weights)
    for name, weight in weights.items():
        if "proj" in name:
            scale = weight.abs().max() / 448
            found[name] = (weight / scale).to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = scale.reshape(1, 1)
    return found


def test_float8_with_its_scales_is_multiplied_out(tmp_path):
    folder = source(tmp_path, in_float8)
    edit(folder / "config.json", {"quantization_config": FP8})
    stored = load_file(folder / "model.safetensors")
    model, tokenizer = load_foreign(str(folder), None, False)
    expected = stored[QUERY].float() * stored[f"{QUERY}_scale_inv"]
    assert torch.equal(weights_of(model)[QUERY], expected)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    again = saved(tmp_path / "base", model, tokenizer)
    assert "quantization_config" not in json.loads((again / "config.json").read_text())


def test_float8_with_the_entry_but_no_scales_is_refused(tmp_path):
    folder = source(tmp_path, lambda w: without("scale")(in_float8(w)))
    edit(folder / "config.json", {"quantization_config": FP8})
    refused(folder, "down_proj.weight", "F8_E4M3", "no scales lie beside them")


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "compressed-tensors", None, 3, ["fp8"]])
def test_n02_other_quantized_weights_are_refused(method, tmp_path):
    folder = source(tmp_path)
    edit(folder / "config.json", {"quantization_config": {"quant_method": method, "bits": 4}})
    refused(folder, "quantization_config", f"{method!r}", "expected plain weights")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [QUERY, "model.embed_tokens.weight", "model.norm.weight"])
def test_n02_weights_that_are_not_finite_are_refused(name, value, tmp_path):
    def spoiled(weights):
        weights[name].view(-1)[7] = value
        return weights

    refused(source(tmp_path, spoiled), f"{name} holds NaN or infinite weights")


def test_numbers_that_float32_cannot_hold_are_refused(tmp_path):
    folder = source(tmp_path, lambda w: w | {QUERY: w[QUERY].double() * 1e300})
    refused(folder, f"{QUERY} holds NaN or infinite weights")


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_n02_integers_as_weights_are_refused(kind, tmp_path):
    folder = source(tmp_path, cast("q_proj", lambda w: w.to(kind)))
    refused(folder, QUERY, " numbers; expected float weights")


# Files.


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "adapter_config.json", "my_lora.safetensors"]
)
def test_n02_an_adapter_beside_the_weights_is_refused(name, tmp_path):
    folder = source(tmp_path)
    (folder / name).write_text("{}")
    refused(folder, f"found {name}", "an adapter", "merge it into its base first")


def test_n02_a_folder_that_is_an_adapter_alone_is_refused(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    save_file({"a": torch.ones(1)}, folder / "adapter_model.safetensors")
    refused(folder, "adapter_config.json, adapter_model.safetensors", "merge it into its base")


def test_other_weights_beside_the_models_are_refused(tmp_path):
    folder = source(tmp_path)
    (folder / "v_head.safetensors").touch()
    refused(folder, "v_head.safetensors beside model.safetensors")


def test_the_same_weights_in_mistrals_format_are_left_alone(tmp_path):
    folder = source(tmp_path)
    (folder / "consolidated.safetensors").touch()
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "adapter_model.safetensors").touch()
    assert same_weights(accepted(folder), weights_of(llama(vocabulary=SIZE)))


@pytest.fixture
def shards(tmp_path):
    """A folder of several shards, and the names of their files in order."""
    folder = saved(tmp_path / "source", llama(vocabulary=SIZE))
    (folder / "model.safetensors").unlink()
    llama(vocabulary=SIZE).save_pretrained(folder, max_shard_size="40KB")
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(names) >= 3
    return folder, names


def test_shards_make_one_model(shards):
    assert same_weights(accepted(shards[0]), weights_of(llama(vocabulary=SIZE)))


def test_n02_a_shard_that_is_absent_is_named(shards):
    folder, names = shards
    (folder / names[1]).unlink()
    refused(folder, f"no {names[1]}; expected all shards")


def test_n02_a_shard_that_lacks_a_weight_is_refused(shards):
    folder, names = shards
    weights = load_file(folder / names[1])
    lost = sorted(weights)[0]
    save_file({n: w for n, w in weights.items() if n != lost}, folder / names[1])
    refused(folder, f"no weights for {lost};")


def test_n02_a_weight_in_two_shards_is_refused(shards):
    folder, names = shards
    weights = load_file(folder / names[0])
    twice = sorted(weights)[0]
    save_file(load_file(folder / names[1]) | {twice: weights[twice] + 1}, folder / names[1])
    refused(folder, names[1], f"{twice} stands in another shard too")


def test_n02_a_shard_that_the_index_does_not_name_is_refused(shards):
    folder, names = shards
    save_file({"model.norm.weight": torch.ones(32)}, folder / "model-00009-of-00009.safetensors")
    refused(folder, "model-00009-of-00009.safetensors beside", names[0])


def test_shards_beside_one_whole_file_are_refused(shards):
    folder, _ = shards
    save_file({"model.norm.weight": torch.ones(32)}, folder / "model.safetensors")
    refused(folder, "model.safetensors and model.safetensors.index.json; expected one set")


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": {"a": 3}}', "{"])
def test_a_broken_index_is_refused(text, shards):
    folder, _ = shards
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "model.safetensors.index.json")


@pytest.mark.parametrize("kept", [0, 4, 100, -1000])
def test_cut_off_weights_are_refused(kept, tmp_path):
    folder = source(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(folder, "model.safetensors: not a readable safetensors file")
