"""Tokens as text, one by one, by a model folder's tokenizer.json, without torch or transformers."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from stages.base.errors import InputError


def token_texts(folder: Path, ids: Sequence[Sequence[int]]) -> list[list[str]]:
    """Text of each id as it adds to a line: special tokens, and those that are part of a character,
    by their name.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(
            f"{path}: missing; name the model folder that knows the tokens with --tokenizer"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more narrow
        raise InputError(f"{path}: not a readable tokenizer ({error})") from error
    return [[_text(tokenizer, token) for token in part] for part in ids]


def _text(tokenizer: Tokenizer, token: int) -> str:
    name = tokenizer.id_to_token(token)
    if name is None:
        return f"<{token}?>"
    text = tokenizer.decode([token], skip_special_tokens=False)
    if not text or "\ufffd" in text:
        return name.replace("\u2581", " ")
    return f" {text}" if name.startswith("\u2581") and not text.startswith(" ") else text
