"""The text of single tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models

from stages.base.errors import InputError
from stages.models.tiny import byte_tokenizer
from stages.viewer.pieces import Pieces


def test_pieces_of_a_byte_tokenizer_join_to_the_text_with_special_tokens_by_name(tmp_path):
    tokenizer = byte_tokenizer(64)
    tokenizer.save_pretrained(tmp_path)
    pieces = Pieces(tmp_path)
    ids = tokenizer("<|im_start|>user\na b\x1b<|im_end|>")["input_ids"]
    assert pieces.of(ids) == ["<|im_start|>user\n", "a", " ", "b", "\x1b", "<|im_end|>"]
    halves = pieces.of(tokenizer("é")["input_ids"])
    assert len(halves) == 2 and "\ufffd" not in "".join(halves)
    assert pieces.of([9999]) == ["<9999?>"]


def test_a_word_piece_keeps_the_space_before_it(tmp_path):
    core = Tokenizer(models.BPE({"\u2581a": 0, "b": 1, "\u2581": 2}, []))
    core.decoder = decoders.Metaspace()
    core.save(str(tmp_path / "tokenizer.json"))
    assert Pieces(tmp_path).of([0, 1, 2]) == [" a", "b", " "]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(InputError, match="tokenizer.json: missing"):
        Pieces(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not a readable tokenizer"):
        Pieces(tmp_path)
