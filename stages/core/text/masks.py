"""Where each answer of a rendered conversation starts and ends, in tokens, for any chat template.

Prefix route: the ids of the prompt, rendered and tokenized as for a rollout, begin the ids of the
whole. Offsets route, where they do not: the character at which the render parts from one with
another answer, taken to the token that starts there. Neither cuts by a difference of lengths.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from stages.core.text.messages import Message, Unusable
from stages.core.text.templates import (
    REASONING_TAGS,
    mark_for,
    mark_turn,
    render,
    render_prompt,
    shared_end,
    shared_start,
)

Route = Literal["prefix", "offsets", "all"]


@dataclass
class Rendered:
    """A conversation as text, the turns to train and the text of the prompt before each of them.

    A prompt is None where the template refuses it. `tokenize` fills in the last two fields:
    `encoding` (of tokenizers: ids, tokens, offsets) and the ids of each prompt.
    """

    messages: list[Message]
    text: str
    turns: list[int]
    prompts: list[str | None]
    encoding: object = None
    prompt_ids: list[list[int] | None] | None = None


def render_turns(tokenizer, messages: list[Message], turns: list[int]) -> Rendered:
    """The render of clean messages and of what comes before each of their `turns`."""
    prompts = [_prompt_before(tokenizer, messages, turn) for turn in turns]
    return Rendered(messages, render(tokenizer, messages), turns, prompts)


def tokenize(tokenizer, rows: list[Rendered]) -> None:
    """Files the ids of all renders with them, in one call of the tokenizer."""
    prompts = [text for row in rows for text in row.prompts if text is not None]
    texts = [row.text for row in rows] + prompts
    if not texts:
        return
    encodings = encode(tokenizer, texts).encodings
    rest = iter(encodings[len(rows) :])
    for row, encoding in zip(rows, encodings, strict=False):
        row.encoding = encoding
        row.prompt_ids = [None if text is None else next(rest).ids for text in row.prompts]


def encode(tokenizer, texts: list[str]):
    """The tokenizer's batch of plain ids, without lists of masks that nobody reads."""
    return tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )


def answer_start(tokenizer, row: Rendered, number: int) -> tuple[int, Route]:
    """Index of the first token of the answer in `row.turns[number]`, and how it was found."""
    ids, prompt = row.encoding.ids, row.prompt_ids[number]
    if prompt is not None and ids[: len(prompt)] == prompt:
        return len(prompt), "prefix"
    text = row.prompts[number]
    if text is not None and row.text.startswith(text):
        return _token_at(row, len(text)), "offsets"
    return _token_at(row, _answer_character(tokenizer, row, row.turns[number])), "offsets"


def answer_end(tokenizer, row: Rendered, number: int, start: int, stops) -> int:
    """Index after the token that ends the turn, or after the answer where no such token follows.

    An answer without one at the very end of the row ends with the row.
    """
    ids, turn = row.encoding.ids, row.turns[number]
    last = turn == len(row.messages) - 1
    bound = len(ids) if last else _within_next_turn(tokenizer, row, turn)
    for index in range(start, bound):
        if ids[index] in stops:
            return index + 1
    if last:
        return len(ids)
    mark = mark_for(row.text)
    other = render(tokenizer, mark_turn(row.messages, turn, mark))
    shared = shared_end(row.text, other)
    if other[len(other) - shared - 1] != mark:
        raise Unusable("the chat template does not show where an answer ends")
    return _token_at(row, len(row.text) - shared)


def last_word(row: Rendered) -> int | None:
    """Id of the last token of the render that is more than white space, None without any."""
    for index in reversed(range(len(row.encoding.ids))):
        if row.text[slice(*row.encoding.offsets[index])].strip():
            return row.encoding.ids[index]
    return None


def _prompt_before(tokenizer, messages: list[Message], turn: int) -> str | None:
    try:
        return render_prompt(tokenizer, messages[:turn]) if turn else None
    except Unusable:
        return None


def _answer_character(tokenizer, row: Rendered, turn: int) -> int:
    """The character at which the answer of a turn starts: where another answer would part from it.

    An opening reasoning tag belongs to the answer, though the other render may show it too.
    """
    mark = mark_for(row.text)
    other = render(tokenizer, mark_turn(row.messages, turn, mark))
    character = shared_start(row.text, other)
    shown = row.text[:character].rstrip()
    for opening in REASONING_TAGS.values():
        if shown.endswith(opening):
            return len(shown) - len(opening)
    if other[character : character + 1] != mark:
        raise Unusable("the chat template does not show where an answer starts")
    return character


def _within_next_turn(tokenizer, row: Rendered, turn: int) -> int:
    """Index of a token after the end of this turn and before the end of the next one."""
    other = render(tokenizer, mark_turn(row.messages, turn + 1, mark_for(row.text)))
    return _first_from(row, shared_start(row.text, other))


def _token_at(row: Rendered, character: int) -> int:
    """Index of the token that starts at a character; Unusable where a token spans it."""
    size = len(row.encoding.ids)
    index = _first_from(row, character)
    while index < size and _span(row, index)[1] <= character:
        index += 1
    spanned = index < size and _span(row, index)[0] < character
    if spanned or (index and _span(row, index - 1)[1] > character):
        raise Unusable("a token spans the border between prompt and answer")
    return index


def _first_from(row: Rendered, character: int) -> int:
    return bisect_left(row.encoding.offsets, character, key=lambda offset: offset[0])


def _span(row: Rendered, index: int) -> tuple[int, int]:
    """Characters of a token, with the spaces at its ends that byte-level offsets may leave out."""
    start, end = row.encoding.offsets[index]
    token, shown = row.encoding.tokens[index], row.text[start:end]
    if not shown.startswith(" "):
        start -= len(token) - len(token.lstrip("Ġ"))
    if shown and not shown.endswith(" "):
        end += len(token) - len(token.rstrip("Ġ"))
    return start, end
