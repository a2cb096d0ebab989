"""Tiny random models of many architectures, each of a few thousand parameters.

What decides whether rows may share a cache is in each: windows of 5 tokens, local layers, ALiBi,
recurrent states, experts, layers that borrow keys.
"""

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 16}
HEADS = {"head_dim": 8}
WINDOW = {"sliding_window": 5}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"]} | WINDOW
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
# name of the configuration class without `Config` -> its fields
ARCHITECTURES: dict[str, dict] = {
    # plain keys and values
    "Llama": BASE,
    "Qwen2": BASE,
    "Qwen3": BASE | HEADS,
    "Phi": BASE,
    "Phi3": BASE | {"pad_token_id": 0},
    "StableLm": BASE,
    "Olmo2": BASE,
    "SmolLM3": BASE | {"pad_token_id": 0},
    "Glm": BASE | HEADS | {"pad_token_id": 0},
    "Helium": BASE | HEADS,
    "Nemotron": BASE,
    "Arcee": BASE,
    "Gemma": BASE | HEADS,
    "GPT2": GPT,
    "GPTNeoX": BASE,
    "GPTJ": GPT | {"rotary_dim": 8},
    "GPTBigCode": GPT,
    "CodeGen": GPT | {"rotary_dim": 8},
    "OPT": BASE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3},
    "BioGpt": BASE,
    "XGLM": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "init_std": 0.3}
    | {"max_position_embeddings": 128},
    "Falcon": BASE,
    "Granite": BASE | {"logits_scaling": 4.0},
    "Cohere": BASE,
    "Persimmon": BASE,
    "Mixtral": BASE | EXPERTS,
    "Qwen2Moe": BASE | EXPERTS | {"shared_expert_intermediate_size": 16},
    "Qwen3Moe": BASE | EXPERTS | HEADS,
    "Olmoe": BASE | EXPERTS,
    "GraniteMoe": BASE | EXPERTS,
    "DeepseekV2": BASE | LATENT | EXPERTS,
    "DeepseekV3": BASE | LATENT | EXPERTS,
    # windows and distances
    "Mistral": BASE | WINDOW,
    "Gemma2": BASE | HEADS | WINDOW | {"final_logit_softcapping": 5.0},
    "Gemma3Text": BASE | HEADS | WINDOWED,
    "GptOss": BASE | EXPERTS | HEADS | WINDOWED,
    "Olmo3": BASE | WINDOWED,
    "Exaone4": BASE | WINDOWED,
    "Cohere2": BASE | WINDOWED,
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}
    | {"initializer_range": 0.3, "expansion_ratio": 2},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    "GPTNeo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 5}
    | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128}
    | {"initializer_range": 0.3, "intermediate_size": 48},
    "Gemma3nText": BASE
    | HEADS
    | WINDOWED
    | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 0, "laurel_rank": 4}
    | {"hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0, 0.0]}
    | {"altup_num_inputs": 2},
    "Gemma4Text": BASE
    | HEADS
    | WINDOWED
    | {"global_head_dim": 8, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 0}
    | {"hidden_size_per_layer_input": 8},
    "Llama4Text": BASE
    | EXPERTS
    | HEADS
    | {"attention_chunk_size": 8, "intermediate_size_mlp": 48}
    | {"layer_types": ["chunked_attention", "full_attention"]},
    # recurrent states
    "Qwen3Next": BASE | EXPERTS | HEADS | LINEAR | {"shared_expert_intermediate_size": 16},
    "Qwen3_5Text": BASE | HEADS | LINEAR,
    "Jamba": BASE
    | EXPERTS
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}
    | {"use_mamba_kernels": False},
    "Mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    | {"initializer_range": 0.3},
    "Mamba2": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 8}
    | {"head_dim": 8, "n_groups": 1, "chunk_size": 8, "initializer_range": 0.3},
    "FalconMamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    | {"initializer_range": 0.3},
    "Lfm2": BASE | {"layer_types": ["conv", "full_attention"]},
    "Bamba": BASE
    | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}
    | {"mamba_chunk_size": 8},
    "FalconH1": BASE
    | HEADS
    | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}
    | {"mamba_chunk_size": 8},
    "GraniteMoeHybrid": BASE
    | EXPERTS
    | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8}
    | {"mamba_d_state": 4, "mamba_chunk_size": 8, "shared_intermediate_size": 16},
    "RecurrentGemma": BASE
    | {"lru_width": 32, "attention_window_size": 5}
    | {"block_types": ["recurrent", "attention"], "num_hidden_layers": 2},
    "Rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}
    | {"context_length": 128},
    # no decoders, or without a cache
    "OpenAIGPT": GPT,
    "CTRL": GPT | {"dff": 48},
    "Bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
    | {"decoder_ffn_dim": 48, "encoder_layers": 1, "max_position_embeddings": 128},
    "Bert": BASE,
    "XLNet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
}


def make(name: str, vocabulary: int, attn: str | None = None, **more) -> PreTrainedModel:
    """A model with random weights from torch's global generator."""
    fields = ARCHITECTURES[name] | {"bos_token_id": None, "eos_token_id": 1} | more
    if "vocab_size_per_layer_input" in fields:
        fields["vocab_size_per_layer_input"] = vocabulary
    config = getattr(transformers, f"{name}Config")(vocab_size=vocabulary, **fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn)


def seeded(name: str, vocabulary: int, seed: int = 0, **more) -> PreTrainedModel:
    """`make` from a seed, in evaluation mode."""
    torch.manual_seed(seed)
    return make(name, vocabulary, **more).eval()
