"""Vocabularies as people publish them: a tokenizer, or one line that says what is wanted."""

import json
from importlib.util import find_spec

import pytest
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from stages.base.errors import InputError
from stages.base.tokenizers import load_tokenizer, published_tokenizer
from tests.helpers.models import byte_tokenizer, gpt2, llama, saved

SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"
RANKS = b"IQ== 0\nIg== 1\n"
TEKKEN = b'{"config": {"pattern": "."}, "vocab": [], "special_tokens": []}'


def folder_with(tmp_path, *lost: str, make=llama, **files: bytes):
    """A model folder that lost some of its files and got others (`_` for a dot in their names)."""
    folder = saved(tmp_path / "source", make(vocabulary=262))
    for name in lost:
        (folder / name).unlink()
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return folder


@pytest.fixture
def missing(monkeypatch):
    """Packages that Python finds no more."""
    names = {"sentencepiece", "tiktoken"}
    monkeypatch.setattr(
        "stages.base.tokenizers.find_spec", lambda n: None if n in names else find_spec(n)
    )
    return names


@pytest.mark.parametrize(
    ("content", "package"), [(SENTENCEPIECE, "sentencepiece"), (RANKS, "tiktoken")]
)
def test_n20_a_tokenizer_model_names_the_package_that_reads_it(content, package, missing, tmp_path):
    folder = folder_with(tmp_path, "tokenizer.json", tokenizer_model=content)
    with pytest.raises(InputError) as error:
        published_tokenizer(folder, False)
    assert f"tokenizer.model: made for {package}, which needs" in str(error.value)
    assert f"pip install {package}`" in str(error.value)
    assert "or a tokenizer.json beside it" in str(error.value)
    assert ("tiktoken" in str(error.value)) == (package == "tiktoken")


def test_n20_sentencepiece_needs_protobuf_too(missing, tmp_path):
    missing.clear()
    missing.update({"sentencepiece", "google.protobuf"})
    folder = folder_with(tmp_path, "tokenizer.json", tokenizer_model=SENTENCEPIECE)
    with pytest.raises(InputError, match="needs `pip install sentencepiece protobuf`"):
        published_tokenizer(folder, False)


def test_n20_a_tokenizer_json_needs_no_other_package(missing, tmp_path):
    folder = folder_with(tmp_path, tokenizer_model=SENTENCEPIECE)
    assert published_tokenizer(folder, False).get_vocab() == byte_tokenizer().get_vocab()


def test_n20_a_tokenizer_json_comes_before_a_tekken_json(monkeypatch, tmp_path):
    """AutoTokenizer would take mistral_common's class wherever that is installed."""
    folder = folder_with(tmp_path, tekken_json=TEKKEN)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("asked"))
    found = published_tokenizer(folder, False)
    assert found.get_vocab() == byte_tokenizer().get_vocab()
    assert found.chat_template == byte_tokenizer().chat_template


def test_n20_a_tekken_json_alone_is_refused(tmp_path):
    folder = folder_with(tmp_path, "tokenizer.json", tekken_json=TEKKEN)
    with pytest.raises(InputError, match="tekken.json alone .*; expected a tokenizer.json"):
        published_tokenizer(folder, False)


def test_a_folder_without_a_vocabulary_is_refused(tmp_path):
    folder = folder_with(tmp_path, "tokenizer.json")
    with pytest.raises(InputError, match="no vocabulary; expected a tokenizer.json"):
        published_tokenizer(folder, False)


def test_n20_a_vocabulary_that_cannot_be_read_gives_no_hint_to_another_package(tmp_path):
    folder = folder_with(tmp_path, "tokenizer.json", vocab_json=b'{"a": 0}', merges_txt=b"")
    with pytest.raises(InputError) as error:
        published_tokenizer(folder, False)
    assert "no tokenizer can be made of its files; expected a tokenizer.json" in str(error.value)
    assert "tiktoken" not in str(error.value)


def test_words_and_merges_of_gpt2_are_read(tmp_path):
    words = json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}).encode()
    lost = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    files = {"vocab_json": words, "merges_txt": b"#version: 0.2\na b\n"}
    found = published_tokenizer(folder_with(tmp_path, *lost, make=gpt2, **files), False)
    assert found("abba")["input_ids"] == [2, 1, 0]


def test_a_tokenizer_of_no_architecture_is_its_tokenizer_json_whatever_the_model(tmp_path):
    """For Qwen2 AutoTokenizer adds a token, another normalizer and another way to split."""
    config = Qwen2Config(
        vocab_size=262,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    folder = saved(tmp_path / "source", Qwen2ForCausalLM(config))
    whole = byte_tokenizer().backend_tokenizer.to_str()
    assert AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str() != whole
    for found in (published_tokenizer(folder, False), load_tokenizer(folder)):
        assert found.backend_tokenizer.to_str() == whole
        assert found.special_tokens_map == byte_tokenizer().special_tokens_map
