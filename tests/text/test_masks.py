"""The short ways to prompts and their ids give what the long ones do."""

import pytest

from stages.text import masks
from stages.text.masks import encode, header_of, render_turns, tokenize
from stages.text.templates import render_prompt
from tests.text.test_chat import (
    CHATML,
    CHATML_WITHOUT_FLAG,
    EMPTY_BLOCK_HEADER,
    GEMMA,
    LLAMA2,
    NO_TURN_END,
    OPEN_HEADER,
    PHI,
    QWEN3,
    byte_tokenizer,
    llama_tokenizer,
    talk,
)

TOKENIZERS = {
    "chatml": lambda: byte_tokenizer(CHATML, merges=60),
    "chatml without flag": lambda: byte_tokenizer(CHATML_WITHOUT_FLAG, merges=60),
    "gemma": lambda: byte_tokenizer(GEMMA, bos="<bos>"),
    "phi": lambda: byte_tokenizer(PHI, merges=60),
    "qwen3": lambda: byte_tokenizer(QWEN3, merges=60),
    "open header": lambda: byte_tokenizer(OPEN_HEADER),
    "empty block": lambda: byte_tokenizer(EMPTY_BLOCK_HEADER),
    "no turn end": lambda: byte_tokenizer(NO_TURN_END),
    "split special": lambda: byte_tokenizer(CHATML, split_special_tokens=True),
    "plain": lambda: byte_tokenizer(None),
    "llama2": lambda: llama_tokenizer(LLAMA2),
}
CONVERSATIONS = [
    talk("hello", "the answer"),
    talk("hello", "\n\nthe answer"),
    talk("hello", "  two"),
    talk("one", "two", "three", "four"),
    talk("say <|im_start|> and <|im_start|>assistant\n", "<|im_start|>assistant\nforty"),
    talk("<|im_end|>\n<|im_start|>assistant\n", "assistant\n"),
    talk("<start_of_turn>model\n", "<start_of_turn>model\nforty"),
    talk("<|assistant|>\n", "<|assistant|>\n<|assistant|>\n"),
    talk("[INST] a [/INST]", "[/INST] b"),
    talk("assistant:", "assistant:assistant:"),
]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompts_and_their_ids_are_those_of_a_rollout_whatever_the_row_says(name):
    tokenizer = TOKENIZERS[name]()
    header = header_of(tokenizer)
    turns = [[i for i, m in enumerate(talk) if m["role"] == "assistant"] for talk in CONVERSATIONS]
    rows = [
        render_turns(tokenizer, *pair, header) for pair in zip(CONVERSATIONS, turns, strict=True)
    ]
    tokenize(tokenizer, rows, header)
    for row in rows:
        prompts = [render_prompt(tokenizer, row.messages[:turn]) for turn in row.turns]
        assert row.prompts == prompts
        assert row.prompt_ids == encode(tokenizer, prompts)
        assert row.ids == encode(tokenizer, [row.text])[0]


def test_an_ordinary_row_is_rendered_twice_and_its_text_encoded_once(monkeypatch):
    tokenizer = byte_tokenizer(CHATML, merges=60)
    header, calls = header_of(tokenizer), {"render": 0, "encode": 0}

    def counting(name, count):
        function = getattr(masks, name)

        def counted(*arguments, **options):
            calls[name] += count(arguments)
            return function(*arguments, **options)

        monkeypatch.setattr(masks, name, counted)

    counting("render", lambda arguments: 1)
    counting("encode", lambda arguments: len(arguments[1]))
    tokenize(tokenizer, [render_turns(tokenizer, talk("hello", "two"), [1], header)], header)
    assert calls == {"render": 2, "encode": 1}
