"""Tokenizers, apart from models: a stage that only tokenizes need not import a model."""

import re
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stages.base.errors import InputError
from stages.base.trust import check_own, object_of

GENERAL = ("TokenizersBackend", "PreTrainedTokenizerFast")
UNREADABLE = "no tokenizer can be made of its files; expected a tokenizer.json"
RANKS = re.compile(rb"[A-Za-z0-9+/=]+ \d+\r?\n")  # a line of tiktoken's format
NEEDED = {"tiktoken": ["tiktoken"], "sentencepiece": ["sentencepiece", "google.protobuf"]}


def load_tokenizer(folder: Path, trust: bool = False):
    """The tokenizer of a model folder that a stage wrote; its own code runs only with `trust`."""
    if not (folder / "tokenizer_config.json").is_file():
        raise InputError(f"{folder}: no tokenizer_config.json; expected a model folder of a stage")
    check_own(folder, trust)
    if not trust and not (folder / "tokenizer.json").is_file():
        raise InputError(f"{folder}: no tokenizer.json; expected a model folder of a stage")
    return read_tokenizer(folder, trust)


def read_tokenizer(folder: Path, trust: bool):
    """The tokenizer of a folder, as its tokenizer.json is wherever that is said to be all of it.

    AutoTokenizer puts a class of the architecture in place of a general one for some models, whose
    splitting and special tokens are others (Qwen2), and mistral_common's beside a tekken.json.
    """
    config = folder / "tokenizer_config.json"
    named = object_of(config) if config.is_file() else {}
    whole = (folder / "tokenizer.json").is_file() and "auto_map" not in named
    if whole and (named.get("tokenizer_class") in GENERAL or (folder / "tekken.json").is_file()):
        return PreTrainedTokenizerFast.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)


def published_tokenizer(folder: Path, trust: bool):
    """The fast tokenizer of a model folder from elsewhere."""
    if not trust:
        check_vocabulary(folder)
    try:
        tokenizer = read_tokenizer(folder, trust)
    except (ImportError, ValueError) as error:
        if "tiktoken" not in str(error):  # asked for whatever is wrong with the files
            raise
        raise InputError(f"{folder}: {UNREADABLE}") from error
    if not tokenizer.is_fast:
        raise InputError(f"{folder}: {type(tokenizer).__name__} is slow; expected a tokenizer.json")
    return tokenizer


def check_vocabulary(folder: Path) -> None:
    """Raise InputError where no file that can be read here says which tokens there are."""
    if (folder / "tokenizer.json").is_file():
        return
    models = sorted([*folder.glob("*.model"), *folder.glob("*.tiktoken")])
    if not models and not list(folder.glob("vocab.*")):
        also = " (tekken.json alone has neither template nor special tokens)"
        found = also if (folder / "tekken.json").is_file() else ""
        raise InputError(f"{folder}: no vocabulary{found}; expected a tokenizer.json")
    for file in models:
        with file.open("rb") as opened:
            kind = "tiktoken" if RANKS.match(opened.readline(1000)) else "sentencepiece"
        if lacking := [name for name in NEEDED[kind] if not installed(name)]:
            packages = " ".join(lacking).replace("google.", "")
            raise InputError(
                f"{file}: made for {kind}, which needs `pip install {packages}`; expected that or a"
                " tokenizer.json beside it"
            )


def installed(module: str) -> bool:
    """Whether Python finds a module, without importing it."""
    package = module.partition(".")[0]
    return find_spec(package) is not None and find_spec(module) is not None
