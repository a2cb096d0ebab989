"""Tokens as text, one by one, by a model folder's tokenizer.json, without torch or transformers."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from stages.base.errors import InputError


class Pieces:
    """The text of single tokens; special ones by their name."""

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(
                f"{path}: missing; name the model folder that knows the tokens with --tokenizer"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more narrow
            raise InputError(f"{path}: not a readable tokenizer ({error})") from error

    def of(self, ids: Sequence[int]) -> list[str]:
        """Text of each id as it adds to a line; the name of one that is part of a character."""
        return [self._piece(token) for token in ids]

    def _piece(self, token: int) -> str:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return f"<{token}?>"
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if not text or "\ufffd" in text:
            return name.replace("\u2581", " ")
        return f" {text}" if name.startswith("\u2581") and not text.startswith(" ") else text
