"""From rows as files hold them to the four kinds of row that the stages work on.

The format of a file is detected from its columns, once, and holds for all its rows. A row that
cannot be used is `Dropped`; a row of another type than the first ones is an InputError, for then
the file is not what it seemed.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from stages.base.errors import InputError
from stages.rows.layouts import FORMATS, Layout, detect, values_of
from stages.rows.pairs import split_pair
from stages.text.messages import (
    Dropped,
    Message,
    Unusable,
    clean_messages,
    clean_tools,
    from_sharegpt,
)

SAMPLED_ROWS = 1000
MOST_REASONS = 20


@dataclass(frozen=True)
class SftRow:
    """A conversation in clean messages, or plain text for pre-training; the other one is None.

    `tools`, here and in the other kinds of row, is what the chat template is told of.
    """

    messages: list[Message] | None = None
    text: str | None = None
    tools: list[dict] | None = None


@dataclass(frozen=True)
class PreferenceRow:
    """A prompt and the messages that follow it in either answer. `margin` is finite and >= 0."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    margin: float = 0.0
    tools: list[dict] | None = None


@dataclass(frozen=True)
class PromptRow:
    """Messages to answer, the right answer as text and the task's own metadata, where given."""

    messages: list[Message]
    answer: str | None = None
    entry: dict | None = None
    tools: list[dict] | None = None


@dataclass(frozen=True)
class LabelledRow:
    """A conversation whose last answer is right (1) or wrong (0)."""

    messages: list[Message]
    label: int
    tools: list[dict] | None = None


CanonicalRow = SftRow | PreferenceRow | PromptRow | LabelledRow | Dropped


def open_rows(
    kind: str,
    rows: Iterable[tuple[int, dict]],
    name: str | None = None,
    columns: Mapping[str, str] | None = None,
    source: str = "rows",
) -> tuple[Layout, Iterator[tuple[int, CanonicalRow]]]:
    """Numbered raw rows -> the layout of the file, and its rows in canonical form, streaming.

    `kind` is "sft", "preferences", "labelled" or "prompts". `name` and `columns` ({field: column})
    stand in for detection; `source` is what errors call the file. Raises InputError where no format
    fits; the iterator does for a row of mixed type and, at its end, if no row was usable.
    """
    rows = iter(rows)
    first = list(islice(rows, SAMPLED_ROWS))
    try:
        layout = detect(kind, [row for _, row in first], name, columns)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    return layout, _canonical_rows(layout, chain(first, rows), source)


def canonical(layout: Layout, row: dict) -> CanonicalRow:
    """One raw row in canonical form; InputError for values of another type than the file's."""
    try:
        values = values_of(layout, row)
        return READERS[layout.kind](layout, values)
    except Unusable as error:
        return Dropped(str(error))


def count_reason(reasons: Counter[str], reason: str) -> str:
    """Count a dropped row, and say under which reason: the first ones, all further ones as one.

    Data may have got into a reason, so that without a limit there may be as many as rows.
    """
    if reason not in reasons and len(reasons) >= MOST_REASONS:
        reason = "other reasons"
    reasons[reason] += 1
    return reason


def _canonical_rows(layout: Layout, rows, source: str) -> Iterator[tuple[int, CanonicalRow]]:
    reasons: Counter = Counter()
    usable = False
    for number, row in rows:
        try:
            result = canonical(layout, row)
        except InputError as error:
            raise InputError(f"{source}: row {number}: {error}") from error
        if isinstance(result, Dropped):
            count_reason(reasons, result.reason)
        else:
            usable = True
        yield number, result
    if not usable:
        counts = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
        found = counts or "no rows"
        raise InputError(f"{source}: no usable row in format '{layout.name}': {found}")


def _sft(layout: Layout, values: dict) -> SftRow:
    if layout.name == "text":
        return SftRow(text=_text(values, "text"))
    messages = _with_system(values, _conversation(layout, values))
    return SftRow(messages=messages, tools=clean_tools(values.get("tools")))


def _conversation(layout: Layout, values: dict) -> list[Message]:
    match layout.name:
        case "messages" | "sharegpt":
            return _turns(next(iter(values.values())))
        case "alpaca":
            parts = [_text(values, "instruction"), values.get("input") or ""]
            question = "\n\n".join(part for part in parts if part.strip())
            history = _history(values.get("history"))
            return [*history, _user(question), _assistant(_text(values, "output"))]
        case "question_answer":
            answer = _answer(values["answer"])
            if not answer.strip():
                raise Unusable("'answer' is empty")
            return [_user(_text(values, "question")), _assistant(answer)]
    return _spoken(values, "prompt", _user) + _spoken(values, "completion", _assistant)


def _preference(layout: Layout, values: dict) -> PreferenceRow:
    margin = _margin(values.get("margin"))
    prompt = values.get("prompt", values.get("conversations"))
    prompt, *answers = split_pair(*map(_said, (prompt, values["chosen"], values["rejected"])))
    prompt = _with_system(values, prompt)
    return PreferenceRow(prompt, *answers, margin, clean_tools(values.get("tools")))


def _labelled(layout: Layout, values: dict) -> LabelledRow:
    label = _label(values["label"])
    messages = _with_system(values, _conversation(layout, values))
    return LabelledRow(messages, label, clean_tools(values.get("tools")))


def _prompt(layout: Layout, values: dict) -> PromptRow:
    field = next(iter(FORMATS["prompts"][layout.name][0]))
    messages = _spoken(values, field, _user)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise Unusable("no turn before the assistant's")
    answer = _answer(values["answer"]) if "answer" in values else ""
    entry = _object(values["entry"]) if "entry" in values else None
    messages = _with_system(values, messages)
    return PromptRow(
        messages, answer if answer.strip() else None, entry, clean_tools(values.get("tools"))
    )


READERS = {"sft": _sft, "preferences": _preference, "labelled": _labelled, "prompts": _prompt}


def _spoken(values: dict, field: str, turn) -> list[Message]:
    said = _said(values[field])
    return said if isinstance(said, list) else [turn(_text(values, field))]


def _said(value):
    """Turns as messages; text, or nothing, as it is."""
    return _turns(value) if isinstance(value, list | dict) else value


def _turns(turns: list | dict) -> list[Message]:
    """Clean messages of turns, or of one turn."""
    turns = [turns] if isinstance(turns, dict) else turns
    return clean_messages([from_sharegpt(turn) for turn in turns])


def _with_system(values: dict, messages: list[Message]) -> list[Message]:
    """The messages after the row's own system prompt, unless they have one already."""
    system = values.get("system", "")
    if not system.strip() or any(turn["role"] in ("system", "developer") for turn in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _history(value) -> list[Message]:
    """Earlier turns out of [question, answer] pairs, or their JSON."""
    pairs = _decoded(value) if value else []
    known = isinstance(pairs, list) and all(isinstance(pair, list) for pair in pairs)
    if not known or any(len(pair) != 2 for pair in pairs):
        raise Unusable("'history' is no list of [question, answer] pairs")
    turns = [(_user(question), _assistant(answer)) for question, answer in pairs]
    return clean_messages(list(chain(*turns))) if turns else []


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _text(values: dict, field: str) -> str:
    if not values[field].strip():
        raise Unusable(f"'{field}' is empty")
    return values[field]


def _answer(value) -> str:
    """The answer as text; a whole number that a table holds as 18.0 is 18."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def _margin(value) -> float:
    """Missing is 0, also as the empty cell of a CSV file."""
    if value is None or value == "":
        return 0.0
    try:
        margin = float(value)
    except ValueError:
        margin = math.nan
    if not 0 <= margin < math.inf:
        raise InputError(f"margin is {value!r}, expected a finite number of at least 0")
    return margin


def _label(value) -> int:
    """0 or 1; a file may also say true or false, or hold either as text (CSV)."""
    known = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}
    if (label := known.get(str(value).strip().lower())) is None:
        raise InputError(f"label is {value!r}, expected 0 or 1, false or true")
    return label


def _object(value) -> dict:
    value = _decoded(value)
    if not isinstance(value, dict):
        raise Unusable("'entry' is no JSON object")
    return value


def _decoded(value):
    """A value, decoded where it is JSON text; None where that is broken."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return None
