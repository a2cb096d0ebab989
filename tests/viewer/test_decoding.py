"""The text of single tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models

from stages.base.errors import InputError
from stages.sources.tiny import byte_tokenizer
from stages.viewer.decoding import token_texts


def test_the_texts_of_a_byte_tokenizer_join_to_a_line_with_special_tokens_by_name(tmp_path):
    tokenizer = byte_tokenizer(64)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("<|im_start|>user\na b\x1b<|im_end|>")["input_ids"]
    texts, halves, unknown = token_texts(tmp_path, [ids, tokenizer("é")["input_ids"], [9999]])
    assert texts == ["<|im_start|>user\n", "a", " ", "b", "\x1b", "<|im_end|>"]
    assert len(halves) == 2 and "\ufffd" not in "".join(halves)
    assert unknown == ["<9999?>"]


def test_a_word_piece_keeps_the_space_before_it(tmp_path):
    core = Tokenizer(models.BPE({"\u2581a": 0, "b": 1, "\u2581": 2}, []))
    core.decoder = decoders.Metaspace()
    core.save(str(tmp_path / "tokenizer.json"))
    assert token_texts(tmp_path, [[0, 1, 2]]) == [[" a", "b", " "]]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(InputError, match="tokenizer.json: missing"):
        token_texts(tmp_path, [])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not a readable tokenizer"):
        token_texts(tmp_path, [])
