"""The columns of a file: which of the known formats they are, and the values of one row by field.

A format is a set of fields; a field is read from the column of its own name unless `columns` names
another. A column `reward_model.ground_truth` is what a mapping holds under a key. Each field holds
one type of value in the whole file.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from stages.base.errors import InputError
from stages.text.messages import Unusable, kind_of

ABSENT = object()
TEXT, TURNS = ("text",), ("a list",)
TEXT_OR_TURNS = ("text", "a list")
FIELD_TYPES = {
    "messages": TURNS,
    "conversations": TURNS,
    "prompt": TEXT_OR_TURNS,
    "completion": TEXT_OR_TURNS,
    "chosen": (*TEXT_OR_TURNS, "an object"),
    "rejected": (*TEXT_OR_TURNS, "an object"),
    "system": TEXT,
    "instruction": TEXT,
    "input": TEXT,
    "output": TEXT,
    "question": TEXT,
    "text": TEXT,
    "answer": ("text", "a number"),
    "entry": ("an object", "text"),
    "margin": ("a number", "text"),
    "label": ("a boolean", "a number", "text"),
    "history": ("a list", "text"),
    "tools": ("a list", "text"),
}

# kind -> format -> (fields that it needs, fields that it may have); the first that fits is taken.
FORMATS = {
    "sft": {
        "messages": (("messages",), ("system", "tools")),
        "sharegpt": (("conversations",), ("system", "tools")),
        "prompt_completion": (("prompt", "completion"), ("system", "tools")),
        "alpaca": (("instruction", "output"), ("system", "history", "input")),
        "question_answer": (("question", "answer"), ("system",)),
        "text": (("text",), ()),
    },
    "preferences": {
        "prompted_pair": (("prompt", "chosen", "rejected"), ("margin", "system", "tools")),
        "sharegpt_pair": (("conversations", "chosen", "rejected"), ("margin", "system", "tools")),
        "pair": (("chosen", "rejected"), ("margin", "system", "tools")),
    },
    "labelled": {
        "prompt_completion": (("prompt", "completion", "label"), ("system", "tools")),
        "messages": (("messages", "label"), ("system", "tools")),
    },
    "prompts": {
        "prompt": (("prompt",), ("answer", "entry", "system", "tools")),
        "question": (("question",), ("answer", "entry", "system", "tools")),
        "messages": (("messages",), ("answer", "entry", "system", "tools")),
        "sharegpt": (("conversations",), ("answer", "entry", "system", "tools")),
    },
}


@dataclass(frozen=True)
class Layout:
    """The format of a file: its name, the column of each field and the type of its values.

    `unread` are the columns that no field takes; a script prints them, so that nothing is left out
    unnoticed.
    """

    kind: str
    name: str
    columns: dict[str, str]
    types: dict[str, str]
    unread: tuple[str, ...]


def detect(
    kind: str,
    rows: Sequence[dict],
    name: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Layout:
    """The layout of a file from its first rows; a column counts where one of them fills it."""
    formats, named = FORMATS[kind], dict(columns or {})
    _check_knobs(formats, name, named)
    samples: dict = {}
    for row in rows:
        for column in (*row, *named.values()):
            if samples.get(column) is None:
                samples[column] = _value_at(row, column)
    _check_columns(named, rows)
    for candidate, (needed, optional) in formats.items():
        fields = {field: named.get(field, field) for field in needed + optional}
        filled = {field: col for field, col in fields.items() if samples.get(col) is not None}
        if name in (None, candidate) and set(named) <= set(fields) and set(needed) <= set(filled):
            types = {field: _type_of(field, col, samples[col]) for field, col in filled.items()}
            unread = _unread(samples, set(fields.values()))
            return Layout(kind, candidate, fields, types, unread)
    raise InputError(_no_format(kind, formats, samples, name))


def _check_knobs(formats: dict, name: str | None, named: dict) -> None:
    if name is not None and name not in formats:
        raise InputError(f"format '{name}' is unknown; expected one of {', '.join(formats)}")
    fields = {
        field
        for candidate, (needed, optional) in formats.items()
        if name in (None, candidate)
        for field in needed + optional
    }
    for field in named:
        if field not in fields:
            raise InputError(f"columns: no field '{field}'; expected some of {sorted(fields)}")


def _check_columns(named: dict, rows: Sequence[dict]) -> None:
    """InputError for a column that a knob names and none of the first rows has."""
    for field, column in named.items():
        if all(_value_at(row, column, ABSENT) is ABSENT for row in rows):
            names = chain.from_iterable(_columns(row, lambda _: True) for row in rows)
            found = ", ".join(dict.fromkeys(names))
            raise InputError(f"columns: no column {column!r} (for {field!r}); there are [{found}]")


def _columns(values: dict, opened: Callable[[str], bool], prefix: str = "") -> Iterator[str]:
    """Names of the columns; of a mapping that is `opened`, the dotted names of what it holds."""
    for key, value in values.items():
        if isinstance(value, dict) and value and opened(f"{prefix}{key}"):
            yield from _columns(value, opened, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _unread(samples: dict, used: Collection[str]) -> tuple[str, ...]:
    """The columns that no field takes; of a mapping that one reaches into, what else it holds."""

    def opened(column: str) -> bool:
        return column not in used and any(name.startswith(f"{column}.") for name in used)

    return tuple(dict.fromkeys(name for name in _columns(samples, opened) if name not in used))


def _type_of(field: str, column: str, value) -> str:
    kind, wanted = kind_of(value), FIELD_TYPES[field]
    if kind not in wanted:
        raise InputError(f"column '{column}' holds {kind}, expected {' or '.join(wanted)}")
    return kind


def _no_format(kind: str, formats: dict, samples: dict, name: str | None) -> str:
    found = ", ".join(column for column, value in samples.items() if value is not None)
    wanted = "; ".join(
        f"{candidate}: {' + '.join(needed)}"
        for candidate, (needed, _) in formats.items()
        if name in (None, candidate)
    )
    return f"no {kind} format fits the columns [{found}]; expected {wanted} (or name the columns)"


def values_of(layout: Layout, row: dict) -> dict:
    """Field -> value without nulls; Unusable where a needed one is missing."""
    needed, _ = FORMATS[layout.kind][layout.name]
    values = {}
    for field, column in layout.columns.items():
        value = _value_at(row, column)
        if value is not None:
            values[field] = value
            wanted = (layout.types[field],) if field in layout.types else FIELD_TYPES[field]
            if kind_of(value) not in wanted:
                raise InputError(
                    f"column '{column}' holds {kind_of(value)}, "
                    f"in rows before it was {' or '.join(wanted)}"
                )
    missing = [layout.columns[field] for field in needed if field not in values]
    if missing:
        _check_same_format(layout, row)
        raise Unusable(f"'{missing[0]}' is missing or null")
    return values


def _value_at(row: dict, column: str, absent=None):
    """The value of a column, or of what a mapping holds under the keys after a dot."""
    outer, dot, rest = column.partition(".")
    if column in row or not dot:
        return row.get(column, absent)
    inner = row.get(outer)
    return _value_at(inner, rest, absent) if isinstance(inner, dict) else absent


def _check_same_format(layout: Layout, row: dict) -> None:
    if any(_value_at(row, column, ABSENT) is not ABSENT for column in layout.columns.values()):
        return
    for name, (needed, _) in FORMATS[layout.kind].items():
        if all(row.get(field) is not None for field in needed):
            raise InputError(
                f"has the columns of format '{name}', the file began with format '{layout.name}'"
            )
