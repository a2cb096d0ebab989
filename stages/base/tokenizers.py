"""Tokenizers, apart from models: a stage that only tokenizes need not import a model."""

import re
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stages.base.errors import InputError
from stages.base.trust import check_own

VOCABULARIES = ("vocab.json", "vocab.txt", "tekken.json")
RANKS = re.compile(rb"[A-Za-z0-9+/=]+ \d+\r?\n")  # a line of tiktoken's format


def load_tokenizer(folder: Path, trust: bool = False):
    """The tokenizer of a model folder that a stage wrote; its own code runs only with `trust`."""
    if not (folder / "tokenizer_config.json").is_file():
        raise InputError(f"{folder}: no tokenizer_config.json; expected a model folder of a stage")
    check_own(folder, trust)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)


def published_tokenizer(source: Path, trust: bool):
    """The fast tokenizer of a folder or GGUF file from elsewhere."""
    if source.suffix == ".gguf":
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    else:
        check_vocabulary(source, trust)
        # With mistral_common installed AutoTokenizer would answer with a class of its own, without
        # template and special tokens as all others have them.
        auto = PreTrainedTokenizerFast if (source / "tekken.json").is_file() else AutoTokenizer
        tokenizer = auto.from_pretrained(source, trust_remote_code=trust)
    if not tokenizer.is_fast:
        raise InputError(f"{source}: {type(tokenizer).__name__} is slow; expected a tokenizer.json")
    return tokenizer


def check_vocabulary(folder: Path, trust: bool) -> None:
    """Raise InputError where no file says which tokens there are, or its package is missing."""
    if (folder / "tokenizer.json").is_file():
        return
    models = sorted([*folder.glob("*.model"), *folder.glob("*.tiktoken")])
    if not models and not any((folder / name).is_file() for name in VOCABULARIES) and not trust:
        raise InputError(f"{folder}: no vocabulary; expected a tokenizer.json")
    for file in models:
        with file.open("rb") as opened:
            package = "tiktoken" if RANKS.match(opened.readline(1000)) else "sentencepiece"
        if find_spec(package) is None:
            raise InputError(
                f"{file}: reading it takes the package {package}, which is not installed (`pip"
                f" install {package}`); expected that, or a tokenizer.json beside it"
            )
