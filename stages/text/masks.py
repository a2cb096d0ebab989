"""Where each answer of a rendered conversation starts and ends, in tokens, for any chat template.

Prefix route: the ids of the prompt, rendered and tokenized as for a rollout, begin the ids of the
whole. Offsets route, where they do not: the character at which the render parts from one with
another answer, taken to the token that starts there. Neither cuts by a difference of lengths.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from stages.text.messages import Message, Unusable
from stages.text.templates import (
    REASONING_TAGS,
    mark_for,
    mark_turn,
    render,
    render_prompt,
    shared_end,
    shared_start,
    usual_header,
)

TOOL_ROLES = ("tool", "ipython")
Route = Literal["prefix", "offsets", "all"]


@dataclass
class Rendered:
    """A conversation as text, the turns to train and the text of the prompt before each of them.

    A prompt is None where the template refuses it. `tokenize` fills in the last three fields: the
    ids of the text and of each prompt, and the tokenizer, for rows that need offsets too.
    """

    messages: list[Message]
    text: str
    turns: list[int]
    prompts: list[str | None]
    ids: list[int] | None = None
    prompt_ids: list[list[int] | None] | None = None
    tokenizer: object = None

    @cached_property
    def encoding(self):
        """Ids, tokens and offsets of the text, of the library tokenizers."""
        return self.tokenizer.backend_tokenizer.encode(self.text, add_special_tokens=False)


@dataclass(frozen=True)
class Header:
    """What a template mostly writes to open the assistant's turn ("": nothing), and its ids.

    `token` is the last added token in it, text and id, at which a tokenizer splits a text before
    anything else: what stands before it changes no id after it. `tail` are the ids after it. None
    and [] where there is no such token.
    """

    text: str
    token: tuple[str, int] | None
    tail: list[int]


def header_of(tokenizer) -> Header:
    """The header that a template and its tokenizer mostly show."""
    text, added = usual_header(tokenizer), tokenizer.added_tokens_decoder.items()
    splitting = {
        token.content: index
        for index, token in added
        if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
    }
    last = max(splitting, key=text.rfind, default="")
    if not last or last not in text or tokenizer.split_special_tokens:
        return Header(text, None, [])
    (ids,) = encode(tokenizer, [text[text.rfind(last) :]])
    return Header(text, (last, splitting[last]), ids[1:])


def render_turns(tokenizer, messages: list[Message], turns: list[int], header: Header) -> Rendered:
    """The render of clean messages and of what comes before each of their `turns`."""
    text = render(tokenizer, messages)
    prompts = [_prompt_before(tokenizer, messages, turn, text, header.text) for turn in turns]
    return Rendered(messages, text, turns, prompts)


def tokenize(tokenizer, rows: list[Rendered], header: Header) -> None:
    """Files the ids of all renders with them; those of a prompt only once, where that is exact."""
    for row, ids in zip(rows, encode(tokenizer, [row.text for row in rows]), strict=True):
        row.ids, row.tokenizer = ids, tokenizer
        row.prompt_ids = [_ids_within(row, text, header) for text in row.prompts]
    unknown = [
        (row, number)
        for row in rows
        for number, text in enumerate(row.prompts)
        if text is not None and row.prompt_ids[number] is None
    ]
    texts = [row.prompts[number] for row, number in unknown]
    for (row, number), ids in zip(unknown, encode(tokenizer, texts), strict=True):
        row.prompt_ids[number] = ids


def _ids_within(row: Rendered, prompt: str | None, header: Header) -> list[int] | None:
    """The ids of a prompt that ends with the usual header, out of those of the row; or None.

    Up to the header's last added token they are the row's, for a tokenizer splits there. They are
    its whole ids if the same ones follow as in the header.
    """
    if prompt is None or header.token is None:
        return None
    if not (prompt.endswith(header.text) and row.text.startswith(prompt)):
        return None
    word, index = header.token
    if row.text.count(word) != row.ids.count(index):
        return None  # not every one of them is a token
    position = -1
    for _ in range(prompt.count(word)):
        position = row.ids.index(index, position + 1)
    end = position + 1 + len(header.tail)
    return row.ids[:end] if row.ids[position + 1 : end] == header.tail else None


def encode(tokenizer, texts: list[str]) -> list[list[int]]:
    """Plain ids of each text: no special tokens, no padding, nothing cut.

    By the library behind the tokenizer, without the masks, types and offsets that nobody reads:
    they are two thirds of the time of `tokenizer(texts)`.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encoded]


def answer_start(tokenizer, row: Rendered, number: int) -> tuple[int, Route]:
    """Index of the first token of the answer in `row.turns[number]`, and how it was found."""
    ids, prompt = row.ids, row.prompt_ids[number]
    if prompt is not None and ids[: len(prompt)] == prompt:
        return len(prompt), "prefix"
    text = row.prompts[number]
    if text is not None and row.text.startswith(text):
        return _token_at(row, len(text)), "offsets"
    return _token_at(row, _answer_character(tokenizer, row, row.turns[number])), "offsets"


def answer_end(tokenizer, row: Rendered, number: int, start: int, stops) -> int:
    """Index after the token that ends the turn, or after the answer where no such token follows.

    An answer without one at the very end of the row ends with the row; one that goes on behind a
    tool's answer ends where it would if nothing followed.
    """
    ids, turn = row.ids, row.turns[number]
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
    if other[len(other) - shared - 1] == mark:
        return _token_at(row, len(row.text) - shared)
    return turn_end(tokenizer, row, number, stops)


def turn_end(tokenizer, row: Rendered, number: int, stops) -> int:
    """Index after all that a conversation that ends with the turn shows, its stop tokens apart."""
    ended = render(tokenizer, row.messages[: row.turns[number] + 1])
    shown = ""
    while shown != ended:
        shown, ended = ended, ended.rstrip()
        for stop in stops.values():
            ended = ended.removesuffix(stop)
    if not row.text.startswith(shown):
        raise Unusable("the chat template does not show where an answer ends")
    return _token_at(row, len(shown))


def text_start(tokenizer, row: Rendered, number: int) -> int:
    """Index of the first token of what the answer itself says, whatever was in the prompt."""
    return _token_at(row, _answer_character(tokenizer, row, row.turns[number]))


def said_by_tools(tokenizer, row: Rendered) -> list[range]:
    """The tokens that show the content of each tool's turn."""
    messages, mark = row.messages, mark_for(row.text)
    turns = [i for i, turn in enumerate(messages) if turn["role"] in TOOL_ROLES and turn["content"]]
    between = {
        i: {**messages[i], "content": f"{mark}{messages[i]['content']}{mark}"} for i in turns
    }
    if not turns:
        return []
    parts = render(tokenizer, [between.get(i, turn) for i, turn in enumerate(messages)]).split(mark)
    if "".join(parts) == row.text and len(parts) == 2 * len(turns) + 1:
        borders = list(accumulate(map(len, parts)))
        spans = list(zip(borders[::2], borders[1::2], strict=False))
    else:  # a template that trims or quotes what tools say
        others = [render(tokenizer, mark_turn(messages, turn, mark)) for turn in turns]
        size = len(row.text)
        spans = [(shared_start(row.text, o), size - shared_end(row.text, o)) for o in others]
    return [_tokens_of(row, *span) for span in spans if span[0] < span[1]]


def _tokens_of(row: Rendered, start: int, end: int) -> range:
    """All tokens that show one of the characters."""
    first = bisect_right(row.encoding.offsets, start, key=lambda offset: offset[0]) - 1
    return range(max(0, first), _first_from(row, end))


def last_word(row: Rendered) -> int | None:
    """Id of the last token of the render that is more than white space, None without any."""
    return next(
        (index for index in reversed(row.ids) if row.tokenizer.decode([index]).strip()), None
    )


def _prompt_before(
    tokenizer, messages: list[Message], turn: int, text: str, header: str
) -> str | None:
    """`render_prompt` of what comes before a turn.

    Where it ends with the usual header, and the answer follows at once in the whole `text`, the
    template took notice of `add_generation_prompt`; only elsewhere a second render must tell.
    """
    if not turn:
        return None
    try:
        prompt = render(tokenizer, messages[:turn], header=True)
        answer = messages[turn]["content"]
        if header and answer and prompt.endswith(header) and text.startswith(prompt + answer):
            return prompt
        return render_prompt(tokenizer, messages[:turn])
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
    size = len(row.ids)
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
