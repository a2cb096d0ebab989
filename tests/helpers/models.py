"""Tiny random models, tokenizers and buffer rows for tests, and slow, plain ways to compute.

Models come in evaluation mode and are the same for the same seed. GPT-2 has absolute positions and
its usual dropout of 0.1, so that wrong positions and a forgotten `eval()` show.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from stages.base.files import replacing
from stages.models.checkpoints import save_model
from stages.sources import tiny

VOCABULARY = 48
NO_SPECIAL_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def llama_config(vocabulary: int = VOCABULARY, tied: bool = True, dropout: float = 0.0, **more):
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        **NO_SPECIAL_IDS | more,
    )


def gpt2_config(vocabulary: int = VOCABULARY, tied: bool = True, dropout: float = 0.1, **more):
    return GPT2Config(
        vocab_size=vocabulary,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.15,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=tied,
        **NO_SPECIAL_IDS | more,
    )


def llama(seed: int = 0, **options) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(**options)).eval()


def gpt2(seed: int = 0, **options) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(gpt2_config(**options)).eval()


def llama_scorer(seed: int = 0, **options) -> LlamaForSequenceClassification:
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(llama_config(num_labels=1, **options)).eval()


def gpt2_scorer(seed: int = 0, **options) -> GPT2ForSequenceClassification:
    torch.manual_seed(seed)
    return GPT2ForSequenceClassification(gpt2_config(num_labels=1, **options)).eval()


POLICIES = {
    "llama": llama,
    "llama untied": lambda **options: llama(tied=False, **options),
    "gpt2": gpt2,
}
SCORERS = {"llama": llama_scorer, "gpt2": gpt2_scorer}


def byte_tokenizer(pad_is_eos: bool = False):
    tokenizer = tiny.byte_tokenizer(64)
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def saved(folder: Path, model, tokenizer=None) -> Path:
    """Model and tokenizer (one of bytes by default) in a folder, as a stage saves them."""
    with replacing(folder, folder=True) as temporary:
        save_model(temporary, model, tokenizer or byte_tokenizer())
    return folder


def cpu_accelerator() -> Accelerator:
    """A fresh accelerator: its state is a singleton that an earlier test may have set."""
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True)


def random_ids(seed: int, *lengths: int, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """One list of ids for each length; no special meaning to any id, 0 included."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


def plain_logits(model, prompt, completion) -> Tensor:
    """(T, V): what the model's own forward over one unpadded row predicts each token with."""
    row = torch.tensor([[*prompt, *completion]])
    return model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]


def plain_log_probs(model, prompt, completion, temperature: float = 1.0) -> Tensor:
    """(T,): torch's log-softmax of `plain_logits` over the temperature, at the completion's ids."""
    log_probs = torch.log_softmax(plain_logits(model, prompt, completion).float() / temperature, -1)
    return torch.stack([log_probs[t, token] for t, token in enumerate(completion)])


def weights_of(model) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same_weights(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two sets of named weights are equal, bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def buffer_row(
    policy,
    prompt: list[int],
    completion: list[int],
    *,
    group: int = 0,
    sample: int = 0,
    reward: float | None = 0.0,
    temperature: float = 1.0,
    **more,
) -> dict:
    """A replay buffer's row, its old log-probs those of the policy's plain forward pass."""
    with torch.no_grad():
        old = plain_log_probs(policy, prompt, completion, temperature).tolist()
    return {
        "round": 1,
        "group": group,
        "sample": sample,
        "prompt_index": group,
        "prompt": "",
        "answer": None,
        "completion": "",
        "prompt_ids": prompt,
        "completion_ids": completion,
        "finished": True,
        "log_probs_old": old,
        "log_probs_sampler": None,
        "reward_correctness": None,
        "reward_format": None,
        "reward_length": None,
        "reward_model": None,
        "reward": reward,
        "log_probs_ref": None,
        "values_old": None,
    } | more


def sliding_mistral() -> MistralForCausalLM:
    """A model whose layers keep a window of 4 tokens, so that its prompts cannot be shared."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,
        sliding_window=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return MistralForCausalLM(config).eval()


def mixtral(vocabulary: int = VOCABULARY, **options) -> MixtralForCausalLM:
    """A model of four experts in its one layer."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        **NO_SPECIAL_IDS | options,
    )
    return MixtralForCausalLM(config).eval()
