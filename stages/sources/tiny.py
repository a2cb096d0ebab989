"""The model of the default run: a small random Llama over bytes, with a ChatML template."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
# A turn's whole header is one token: bytes are for what is said, and prompts become half as long.
HEADERS = [f"{START}{role}\n" for role in ("system", "user", "assistant")]
CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)


def byte_tokenizer(max_positions: int) -> PreTrainedTokenizerFast:
    """One token per byte, and special ones; pad and EOS (the turn end) differ."""
    special = [PAD, START, END, *HEADERS]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START, *HEADERS],
        chat_template=CHATML,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def random_llama(
    tokenizer,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    max_positions: int,
    init_std: float,
    dropout: float,
) -> LlamaForCausalLM:
    """A Llama with random weights, drawn from torch's global generator; embeddings are tied."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_positions,
        initializer_range=init_std,
        attention_dropout=dropout,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)
