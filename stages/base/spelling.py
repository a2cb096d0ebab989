"""Values as plain text: what a terminal, a log or a browser would obey is spelled out."""

import unicodedata
from collections.abc import Mapping


def spelled_out(text: str, keep: str = "") -> str:
    """Text in which nothing acts where it is printed: `\\x1b[2J` is seen, not done.

    Control and format characters (C0, C1, direction overrides, zero-width ones), line separators,
    surrogates and private ones become escapes, all but those in `keep`; a space of any kind is one.
    """
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def _escape(character: str) -> str:
    return " " if unicodedata.category(character) == "Zs" else repr(character)[1:-1]


def flat(values: Mapping, prefix: str = "") -> dict[str, object]:
    """Nested mappings by dotted key, in their order; an empty one stays as it is."""
    found = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
