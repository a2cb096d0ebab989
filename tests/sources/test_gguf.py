"""A GGUF file as base model: a small Llama written as llama.cpp's converter does."""

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

from stages.base.errors import InputError
from stages.models.checkpoints import load_policy, save_model
from stages.sources.published import load_foreign
from tests.helpers.models import byte_tokenizer, llama

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
IDS = torch.tensor([[3, 9, 27, 1, 250]])


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of llama.cpp's rotary positions."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def tensors(model):
    """Name in the file and float32 weights of each tensor."""
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        weight = weight.numpy()
        if name.startswith("model.layers."):
            layer, _, part = name.removeprefix("model.layers.").partition(".")
            short = NAMES[part.removesuffix(".weight")]
            weight = interleaved(weight, heads[short]) if short in heads else weight
            yield f"blk.{layer}.{short}.weight", weight
        elif name == "model.embed_tokens.weight":
            yield "token_embd.weight", weight
        elif name == "model.norm.weight":
            yield "output_norm.weight", weight


def write_gguf(path, model, tokenizer, change=lambda named: named):
    config, words = model.config, tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    # The loader wants this name among the tokens, and at least one merge.
    words[-2:] = ["<|endoftext|>", words[100] + words[101]]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges([f"{words[100]} {words[101]}"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, weight in change(dict(tensors(model))).items():
        writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def test_a_gguf_file_becomes_a_plain_float32_folder_with_the_same_logits(tmp_path):
    tokenizer = byte_tokenizer()
    model = llama(vocabulary=len(tokenizer))
    write_gguf(tmp_path / "model.gguf", model, tokenizer)
    loaded, its_tokenizer = load_foreign(str(tmp_path / "model.gguf"), None, False)
    assert its_tokenizer.chat_template == tokenizer.chat_template
    assert its_tokenizer.pad_token_id == its_tokenizer.eos_token_id == tokenizer.eos_token_id
    folder = tmp_path / "base"
    folder.mkdir()
    save_model(folder, loaded, its_tokenizer)
    assert "quantization_config" not in (folder / "config.json").read_text()
    expected = model(input_ids=IDS).logits
    for again in (
        load_policy(folder, "sdpa", torch.device("cpu")),
        AutoModelForCausalLM.from_pretrained(folder),
    ):
        assert again.dtype == torch.float32
        torch.testing.assert_close(again(input_ids=IDS).logits, expected)


def test_a_gguf_file_that_is_none_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"no model")
    with pytest.raises(InputError, match=r"model.source: cannot load .*model\.gguf"):
        load_foreign(str(path), None, False)


def gguf_of(tmp_path, model, change=lambda named: named):
    """A GGUF file whose named tensors are those that `change` makes of a model's."""
    path = tmp_path / "model.gguf"
    write_gguf(path, model, byte_tokenizer(), change)
    return path


def refused(path, *words):
    with pytest.raises(InputError) as error:
        load_foreign(str(path), None, False)
    assert [word for word in words if word not in str(error.value)] == [], error.value
    assert "\n" not in str(error.value)


def test_n02_a_gguf_file_that_lacks_a_weight_is_refused(tmp_path):
    lost = "blk.1.ffn_down.weight"
    model = llama(vocabulary=len(byte_tokenizer()))
    path = gguf_of(tmp_path, model, lambda named: {n: w for n, w in named.items() if n != lost})
    refused(path, "no weights for model.layers.1.mlp.down_proj.weight; expected every weight")


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.1.ffn_down.bias", "blk.2.ffn_up.weight"]
)
def test_n02_a_gguf_file_of_which_a_weight_would_be_left_out_is_refused(name, tmp_path):
    """`rope_freqs` scales the positions of Llama 3; transformers reads past it."""
    model = llama(vocabulary=len(byte_tokenizer()))
    more = {name: np.ones(4, dtype=np.float32)}
    named = name if name == "rope_freqs.weight" else "of its blocks"
    count = sum(parameter.numel() for parameter in model.parameters())
    path = gguf_of(tmp_path, model, lambda tensors: tensors | more)
    refused(path, f"hold {count + 4} numbers, expected {count}", named)


def test_n02_a_gguf_file_with_a_nan_is_refused(tmp_path):
    model = llama(vocabulary=len(byte_tokenizer()))
    model.model.norm.weight.data[3] = float("nan")
    refused(gguf_of(tmp_path, model), "model.norm.weight holds NaN")
