"""Tokenizers, apart from models: a stage that only tokenizes need not import a model."""

from pathlib import Path

from transformers import AutoTokenizer

from stages.core.errors import InputError


def load_tokenizer(folder: Path):
    """The tokenizer of a model folder that a stage wrote."""
    if not (folder / "tokenizer_config.json").is_file():
        raise InputError(f"{folder}: no tokenizer_config.json; expected a model folder of a stage")
    return AutoTokenizer.from_pretrained(folder)
