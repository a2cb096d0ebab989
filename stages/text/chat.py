"""From messages to ids, with labels only where the model is to learn.

Each row is rendered once as a whole and its ids are those of that one render. An answer is trained
up to and with the token that ends its turn (EOS is appended where the template writes none); what
the template writes after that token is never trained. `text/masks.py` says where answers start and
end; a row without an exact mask is dropped. Special tokens come from the template alone: one BOS at
most. Functions for many rows tokenize them in one batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from stages.base.errors import InputError
from stages.base.tables import IGNORED
from stages.text.masks import (
    Rendered,
    Route,
    answer_end,
    answer_start,
    encode,
    header_of,
    last_word,
    render_turns,
    said_by_tools,
    text_start,
    tokenize,
    turn_end,
)
from stages.text.messages import (
    REASONING_FIELDS,
    Dropped,
    Message,
    Unusable,
    clean_messages,
    may_train,
    says_something,
)
from stages.text.templates import (
    WithTools,
    adapt,
    adds_bos,
    check_reasoning_shown,
    check_unicode,
    render_prompt,
    turn_end_ids,
)

Messages = Sequence[Message]
Tools = Sequence[list[dict] | None]  # what each row of a batch offers; None: no row offers any
TrainOn = Literal["last_assistant", "all_assistants", "all"]
Stops = dict[int, str]


@dataclass(frozen=True)
class Encoded:
    """A row to train on: `input_ids` and `labels` of one length; a label is an id or -100.

    `route` says how the mask was found ("all": nothing is masked). After "offsets" the untrained
    ids at the front differ from those that a rollout would be prompted with.
    """

    input_ids: list[int]
    labels: list[int]
    truncated: bool
    route: Route


@dataclass(frozen=True)
class EncodedPair:
    """Two answers to one prompt; `prompt_ids + chosen_ids` is a whole row, so is the other.

    Both answers end with their stop token, as completions of a rollout do: what a template writes
    after it is left out, since the reward model scores at the last token.
    """

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    truncated: bool
    route: Route


def prompt_ids(tokenizer, messages: Messages) -> list[int]:
    """Ids of the prompt with the generation header; InputError where it cannot be rendered."""
    ids = encode_prompts(tokenizer, [messages])[0]
    if isinstance(ids, Dropped):
        raise InputError(f"a prompt cannot be used: {ids.reason}")
    return ids


def encode_prompts(
    tokenizer, prompts: Sequence[Messages], tools: Tools | None = None
) -> list[list[int] | Dropped]:
    """Ids of each prompt with the generation header, the same in every stage; or why not."""
    _check_fast(tokenizer)

    def text(told, messages):
        return render_prompt(told, adapt(told, clean_messages(messages)))

    each = zip(_told(tokenizer, tools, len(prompts)), prompts, strict=True)
    return _batch_ids(tokenizer, [_attempt(text, told, prompt) for told, prompt in each])


def stop_token_ids(tokenizer, generation_config_eos: int | Sequence[int] | None) -> list[int]:
    """Ids at which generation must stop, in ascending order.

    The tokenizer's EOS, what the generation config lists, and the token that the template really
    writes after an assistant turn. InputError if there is none at all.
    """
    listed = generation_config_eos if generation_config_eos is not None else []
    listed = [listed] if isinstance(listed, int) else listed
    return sorted({*_stops(tokenizer), *listed})


def encode_conversation(
    tokenizer, messages: Messages, train_on: TrainOn, max_length: int | None
) -> Encoded | Dropped:
    """One row of `encode_conversations`."""
    return encode_conversations(tokenizer, [messages], train_on, max_length)[0]


def encode_conversations(
    tokenizer,
    conversations: Sequence[Messages],
    train_on: TrainOn,
    max_length: int | None,
    tools: Tools | None = None,
) -> list[Encoded | Dropped]:
    """Ids and labels of each conversation, cut on the right to `max_length` ids (None: never).

    - "last_assistant" trains the last assistant turn, "all_assistants" each of them; turns after
      the last one are left out before rendering, for nothing that is trained can see them.
    - "all" trains every id of the render.

    An untruncated row has one trained stop token at the end of its last trained turn. Dropped:
    rows without an assistant turn, that the template refuses, whose tool calls or last reasoning it
    leaves out, with an answer to train that is empty or holds the text of a stop token, without an
    exact mask, or without a target once cut. Turns that are not trained may be empty. Messages
    marked `"weight": 0`, `"train": false` or the like (TRAIN_MARKS) are not trained, and what a
    tool said never is.
    """
    _check_fast(tokenizer)
    stops, header = _stops(tokenizer), header_of(tokenizer)

    def rendered(told, messages):
        messages = adapt(told, clean_messages(messages))
        messages, turns = _trained_turns(messages, train_on, stops)
        check_reasoning_shown(told, messages)
        return render_turns(told, messages, turns, header)

    def encoded(told, row):
        label = _everything if train_on == "all" else _answers
        return _cut(label(told, row, stops), max_length)

    told = _told(tokenizer, tools, len(conversations))
    rows = [_attempt(rendered, *each) for each in zip(told, conversations, strict=True)]
    tokenize(tokenizer, [row for row in rows if isinstance(row, Rendered)], header)
    return [_attempt(encoded, *each) for each in zip(told, rows, strict=True)]


def encode_text(tokenizer, text: str, max_length: int | None) -> Encoded | Dropped:
    """One row of `encode_texts`."""
    return encode_texts(tokenizer, [text], max_length)[0]


def encode_texts(
    tokenizer, texts: Sequence[str], max_length: int | None
) -> list[Encoded | Dropped]:
    """Plain text for pre-training: BOS where the tokenizer adds one, the text, EOS; all trained."""
    _check_fast(tokenizer)
    eos = _eos(tokenizer)
    bos = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []

    def encoded(ids):
        ids = ids[1:] if bos and ids[:1] == bos else ids
        ids = [*bos, *ids] + ([] if ids[-1:] == [eos] else [eos])
        return _cut(Encoded(ids, list(ids), truncated=False, route="all"), max_length)

    texts = [_attempt(_plain_text, text) for text in texts]
    return [_attempt(encoded, ids) for ids in _batch_ids(tokenizer, texts)]


def encode_pair(
    tokenizer, prompt: Messages, chosen: Messages, rejected: Messages, max_length: int | None
) -> EncodedPair | Dropped:
    """One row of `encode_pairs`."""
    return encode_pairs(tokenizer, [(prompt, chosen, rejected)], max_length)[0]


def encode_pairs(
    tokenizer,
    pairs: Sequence[tuple[Messages, Messages, Messages]],
    max_length: int | None,
    tools: Tools | None = None,
) -> list[EncodedPair | Dropped]:
    """Ids of (prompt, chosen, rejected), where the answers are the messages that follow the prompt.

    Answers are cut on the right so that prompt and answer have at most `max_length` ids together.
    Dropped, beside what SFT drops: rows whose answers do not start and end with an assistant turn,
    whose prompt alone fills `max_length`, or whose answers are token-identical, also once cut.
    """
    _check_fast(tokenizer)
    stops, header = _stops(tokenizer), header_of(tokenizer)

    def rendered(told, prompt, answer):
        messages, turns = _side_turns(told, prompt, answer, stops)
        return render_turns(told, messages, turns, header)

    def side(told, row):
        return _side(told, row, stops)

    told = [each for each in _told(tokenizer, tools, len(pairs)) for _ in range(2)]
    answers = [(prompt, answer) for prompt, *both in pairs for answer in both]
    rows = [_attempt(rendered, each, *pair) for each, pair in zip(told, answers, strict=True)]
    tokenize(tokenizer, [row for row in rows if isinstance(row, Rendered)], header)
    sides = [_attempt(side, *each) for each in zip(told, rows, strict=True)]
    return [
        _attempt(_joined, chosen, rejected, max_length)
        for chosen, rejected in zip(sides[::2], sides[1::2], strict=True)
    ]


def _trained_turns(messages, train_on: TrainOn, stops: Stops) -> tuple[list[Message], list[int]]:
    """The messages up to the last answer, and its trained turns; for "all" none stands out."""
    if train_on == "all":
        if not all(map(may_train, messages)):
            raise Unusable("a message marked as not to train, but train_on is all")
        return messages, []
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise Unusable("no assistant turn")
    turns = {"last_assistant": turns[-1:], "all_assistants": turns}[train_on]
    turns = [turn for turn in turns if may_train(messages[turn])]
    if not turns:
        raise Unusable("no answer that is not marked as not to train (weight 0, train false)")
    for turn in turns:
        _check_answer(messages[turn], stops)
    return messages[: turns[-1] + 1], turns


def _side_turns(
    tokenizer, prompt: Messages, answer: Messages, stops: Stops
) -> tuple[list[Message], list[int]]:
    """Prompt and answer as one conversation, and the turns at which the answer starts and ends."""
    messages = adapt(tokenizer, clean_messages([*prompt, *answer]))
    turns = sorted({len(prompt), len(messages) - 1})
    if not answer or any(messages[turn]["role"] != "assistant" for turn in turns):
        raise Unusable("an answer does not start and end with an assistant turn")
    for message in messages[len(prompt) :]:
        _check_answer(message, stops)
    check_reasoning_shown(tokenizer, messages)
    return messages, turns


def _check_answer(message: Message, stops: Stops) -> None:
    if message["role"] == "assistant" and not says_something(message):
        raise Unusable("an empty answer")
    said = [message.get(key) for key in ("content", *REASONING_FIELDS)]
    for stop in stops.values():
        if any(stop in text for text in said if isinstance(text, str)):
            raise Unusable(f"an answer holds the text of the stop token {stop}")


def _everything(tokenizer, row: Rendered, stops: Stops) -> Encoded:
    ids = list(row.ids)
    if last_word(row) not in stops:
        ids.append(_eos(tokenizer))
    return Encoded(ids, list(ids), truncated=False, route="all")


def _answers(tokenizer, row: Rendered, stops: Stops) -> Encoded:
    ids = list(row.ids)
    labels = [IGNORED] * len(ids)
    routes = set()
    tools = said_by_tools(tokenizer, row)
    for number in range(len(row.turns)):
        start, end, route = _span(tokenizer, row, number, stops, tools)
        _check_shown(ids[start:end], stops)
        labels[start:end] = ids[start:end]
        routes.add(route)
    if not _stopped(ids[start:end], stops):
        ids.append(_eos(tokenizer))
        labels.append(ids[-1])
    route = "offsets" if "offsets" in routes else "prefix"
    return Encoded(ids, labels, truncated=False, route=route)


def _span(
    tokenizer, row: Rendered, number: int, stops: Stops, tools: list[range]
) -> tuple[int, int, Route]:
    """Where the answer of a turn starts and ends, without what a tool said before or behind it."""

    def holds_tools(start: int, end: int) -> bool:
        return any(max(start, said.start) < min(end, said.stop) for said in tools)

    start, route = answer_start(tokenizer, row, number)
    end = answer_end(tokenizer, row, number, start, stops)
    if holds_tools(start, end):
        start, route = text_start(tokenizer, row, number), "offsets"
    if holds_tools(start, end):
        end = min(end, turn_end(tokenizer, row, number, stops))
    if holds_tools(start, end):
        raise Unusable("the chat template shows what a tool said within an answer")
    return start, end, route


def _side(tokenizer, row: Rendered, stops: Stops) -> tuple[list[int], list[int], Route]:
    """Ids of the prompt, ids of the answer up to its stop token, the route of their border."""
    split, route = answer_start(tokenizer, row, 0)
    start, _ = answer_start(tokenizer, row, -1)
    end = answer_end(tokenizer, row, -1, start, stops)
    ids = row.ids
    eos = [] if _stopped(ids[start:end], stops) else [_eos(tokenizer)]
    _check_shown(ids[start:end], stops)
    return ids[:split], ids[split:end] + eos, route


def _stopped(ids: list[int], stops: Stops) -> bool:
    return bool(ids) and ids[-1] in stops


def _check_shown(ids: list[int], stops: Stops) -> None:
    said = ids[:-1] if _stopped(ids, stops) else ids
    if not said:
        raise Unusable("the chat template shows nothing of an answer")


def _joined(chosen, rejected, max_length: int | None) -> EncodedPair:
    prompt, chosen, route = chosen
    if rejected[0] != prompt:
        raise Unusable("chosen and rejected do not share the ids of their prompt")
    rejected = rejected[1]
    if chosen == rejected:
        raise Unusable("chosen and rejected are token-identical")
    room = None if max_length is None else max(0, max_length - len(prompt))
    if room == 0:
        raise Unusable("the prompt alone fills max_length")
    if chosen[:room] == rejected[:room]:
        raise Unusable("chosen and rejected are token-identical once cut to max_length")
    truncated = room is not None and max(len(chosen), len(rejected)) > room
    return EncodedPair(prompt, chosen[:room], rejected[:room], truncated, route)


def _cut(row: Encoded, max_length: int | None) -> Encoded:
    """The first `max_length` ids; a label at position 0 is no target, for nothing predicts it."""
    ids, labels = row.input_ids[:max_length], row.labels[:max_length]
    truncated = len(ids) < len(row.input_ids)
    if labels[1:].count(IGNORED) == len(labels[1:]):
        raise Unusable("no target left within max_length" if truncated else "no target")
    return Encoded(ids, labels, truncated, row.route)


def _plain_text(text) -> str:
    if not isinstance(text, str) or not text:
        raise Unusable("no text")
    check_unicode(text)
    return text


def _stops(tokenizer) -> Stops:
    """Ids that end an assistant turn, with their text; the EOS is always among them."""
    ids = turn_end_ids(tokenizer)
    if tokenizer.eos_token_id is not None or not ids:
        ids = {*ids, _eos(tokenizer)}
    return dict(zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True))


def _eos(tokenizer) -> int:
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer names no EOS token and its template ends no turn with one")
    return tokenizer.eos_token_id


def _told(tokenizer, tools: Tools | None, count: int) -> list:
    """The tokenizer that renders each row, one that knows its tools where it brings some."""
    tools = tools if tools is not None else [None] * count
    return [WithTools(tokenizer, each) if each else tokenizer for each in tools]


def _check_fast(tokenizer) -> None:
    if not getattr(tokenizer, "is_fast", False):
        kind = type(tokenizer).__name__
        raise InputError(f"{kind} is a slow tokenizer; expected a fast one, which knows offsets")


def _attempt(function: Callable, *arguments):
    """The function's result; or why there is none, which may be one of its arguments already."""
    for argument in arguments:
        if isinstance(argument, Dropped):
            return argument
    try:
        return function(*arguments)
    except Unusable as error:
        return Dropped(str(error))


def _batch_ids(tokenizer, texts: list[str | Dropped]) -> list[list[int] | Dropped]:
    usable = [text for text in texts if isinstance(text, str)]
    if not usable:
        return texts
    rows = iter(encode(tokenizer, usable))
    return [next(rows) if isinstance(text, str) else text for text in texts]
