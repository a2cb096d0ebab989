"""Tokenizers, apart from models: a stage that only tokenizes need not import a model."""

from pathlib import Path

from transformers import AutoTokenizer

from stages.base.errors import InputError
from stages.base.trust import check_own


def load_tokenizer(folder: Path, trust: bool = False):
    """The tokenizer of a model folder that a stage wrote; its own code runs only with `trust`."""
    if not (folder / "tokenizer_config.json").is_file():
        raise InputError(f"{folder}: no tokenizer_config.json; expected a model folder of a stage")
    check_own(folder, trust)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
