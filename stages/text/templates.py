"""Chat templates: rendering, and what a template does, found out by rendering with it.

A tokenizer without a template is rendered with PLAIN_TEMPLATE, so that everything goes one way:

    User:
    <content>

    Assistant:
    <answer><eos>

The header ends with a newline, which no common tokenizer joins with the word that follows (it does
join a space). A BOS stands at the start only where the tokenizer adds one by itself. Tools that a
row brings come before all turns, under "Tools:" as JSON, one a line, and a blank line; a tool call
follows the content of its turn as JSON in a line of its own.
"""

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import cache
from inspect import signature
from itertools import count
from os.path import commonprefix

from jinja2 import TemplateError, TemplateSyntaxError

from stages.base.errors import BadKnob, InputError
from stages.text.messages import REASONING_FIELDS, Message, Unusable

PLAIN_TEMPLATE = (
    "{%- if write_bos %}{{ bos_token }}{% endif -%}"
    "{%- if tools %}{{ 'Tools:\\n' }}"
    "{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '\\n' }}{% endif -%}"
    "{%- for message in messages -%}"
    "{%- if not loop.first %}{{ '\\n\\n' }}{% endif -%}"
    "{{- message.role | capitalize + ':\\n' + message.content -}}"
    "{%- for call in message.tool_calls or [] %}{{ '\\n' + call.function | tojson }}{% endfor -%}"
    "{%- if message.role == 'assistant' %}{{ eos_token }}{% endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '\\n\\nAssistant:\\n' }}{% endif -%}"
)

REASONING_TAGS = {
    "</think>": "<think>",
    "</thinking>": "<thinking>",
    "</reasoning>": "<reasoning>",
    "[/THINK]": "[THINK]",
    "</thought>": "<thought>",
    "</seed:think>": "<seed:think>",
    "<|END_THINKING|>": "<|START_THINKING|>",
    "◁/think▷": "◁think▷",
}
# Keys of tokenizer_config.json under which prepare_model says how to render.
DATE, OPTIONS = "chat_template_date", "chat_template_options"
CLOCK = "strftime_now"
DIRECTIVES = "aAbBcdDeFfGhHIjmMpRSTuUVwWxXyYZz"
NO_DATE = "2000-01-01"  # of a folder that prepare_model did not write: no two days differ
OTHER_CALL = "call_number_{}_of_this_row"
OTHER_REASONING = "reasoning_of_this_row"


class WithTools:
    """A tokenizer whose chat template is told of the tools that a row brings."""

    def __init__(self, tokenizer, tools: list[dict]):
        self._tokenizer, self._tools = tokenizer, tools

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments, **options):
        return self._tokenizer(*arguments, **options)

    def apply_chat_template(self, messages, **options):
        return self._tokenizer.apply_chat_template(messages, tools=self._tools, **options)

    def get_chat_template(self):
        return self._tokenizer.get_chat_template(tools=self._tools)


def record_template(tokenizer, date: str, options: dict) -> None:
    """Note in a tokenizer with which date and options its chat template is to be rendered.

    They are saved with it, so that every later stage renders alike. A template that prints no date
    gets none. BadKnob for an option of which the template takes no notice.
    """
    template = str(tokenizer.chat_template or "")
    for name in options:
        ours = name in signature(tokenizer.apply_chat_template).parameters
        if ours or not re.search(rf"\b{re.escape(name)}\b", template):
            raise BadKnob(
                "model.template_options",
                f"found {name!r}, of which the chat template takes no notice",
            )
    recorded = {DATE: date if CLOCK in template else None, OPTIONS: options or None}
    for key, value in recorded.items():
        tokenizer.init_kwargs.pop(key, None)
        if value is not None:
            tokenizer.init_kwargs[key] = value


def render(tokenizer, messages: list[Message], *, header: bool = False) -> str:
    """Text of clean messages; with `header`, what opens the next assistant turn follows.

    Raises Unusable where the template refuses the messages, InputError where it is broken itself.
    """
    options = tokenizer.init_kwargs.get(OPTIONS) or {}
    clock = CLOCK in str(tokenizer.chat_template)
    if not tokenizer.chat_template:
        options = {"chat_template": PLAIN_TEMPLATE, "write_bos": adds_bos(tokenizer)}
    elif clock:
        stopped = stopped_clock(tokenizer.init_kwargs.get(DATE) or NO_DATE)
        options = {**options, "chat_template": stopped + tokenizer.get_chat_template()}
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=header, **options
        )
    except TemplateSyntaxError as error:
        line = error.lineno - clock
        raise InputError(f"the chat template is broken at line {line}: {error}") from error
    except (TemplateError, TypeError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0][:200]
        raise Unusable(f"the chat template refuses it: {reason}") from error
    check_unicode(text)
    return text


@cache
def stopped_clock(date: str) -> str:
    """A line of Jinja in which `strftime_now` always says this date (ISO), at midnight.

    transformers hands a template the real one, and no function of ours.
    """
    day = datetime.fromisoformat(date)
    shown = {f"%{letter}": day.strftime(f"%{letter}") for letter in DIRECTIVES}
    shown |= {f"%-{letter}": str(int(shown[f"%{letter}"])) for letter in "dmyHIMSj"}
    return (
        f"{{%- macro {CLOCK}(format) -%}}{{%- set said = namespace(text=format) -%}}"
        f"{{%- for sign, shown in {json.dumps(list(shown.items()))} -%}}"
        "{%- set said.text = said.text.replace(sign, shown) -%}{%- endfor -%}"
        "{{- said.text -}}{%- endmacro %}\n"
    )


def tools_unseen(tokenizer, messages: list[Message], tools: list[dict] | None) -> bool:
    """Whether a row brings tools of which the template takes no notice."""
    if not tools:
        return False
    told = WithTools(tokenizer, tools)
    try:
        messages = adapt(told, messages)
        return render(told, messages) == render(tokenizer, messages)
    except Unusable:
        return False


def render_prompt(tokenizer, messages: list[Message]) -> str:
    """Text of clean messages with the header of the assistant turn that is to be generated.

    Where the template takes no notice of `add_generation_prompt`, the header is what it writes
    before an assistant's text, without the spaces at its end (they belong to the answer's first
    token).
    """
    text = render(tokenizer, messages, header=True)
    if text != render(tokenizer, messages):
        return text
    mark = mark_for(text)
    try:
        answered = render(tokenizer, [*messages, {"role": "assistant", "content": mark}])
    except Unusable:
        return text
    before, found, _ = answered.partition(mark)
    return before.rstrip(" ") if found and before.rstrip().startswith(text) else text


def usual_header(tokenizer) -> str:
    """What the template adds after a user's turn to open the assistant's; "" where it adds none."""
    question = [{"role": "user", "content": "a"}]
    try:
        text, opened = render(tokenizer, question), render(tokenizer, question, header=True)
    except Unusable:
        return ""
    return opened.removeprefix(text) if opened.startswith(text) else ""


def check_unicode(text: str) -> None:
    """Raises Unusable for half a surrogate pair, on which a tokenizer fails for the whole batch."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unusable("text that is not valid Unicode") from None


def adds_bos(tokenizer) -> bool:
    """Whether the tokenizer puts a BOS before plain text by itself."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("")["input_ids"][:1] == [bos]


def adapt(tokenizer, messages: list[Message]) -> list[Message]:
    """Clean messages in the form that this template renders as it should.

    - A template that prints tool arguments as a Python dict, or wants text, gets them as JSON text.
    - An answer «plan </think> result», whose opening tag stood in the generation header when it was
      sampled, gets the tag back where the template would put an empty block before it.

    Raises Unusable where the template leaves out a tool call.
    """
    if any("tool_calls" in message for message in messages):
        if not _takes_objects(tokenizer):
            messages = [_with_text_arguments(message) for message in messages]
        _check_calls_shown(tokenizer, messages)
    return [_with_opening_tag(tokenizer, message) for message in messages]


def check_reasoning_shown(tokenizer, messages: list[Message]) -> None:
    """Unusable where the template leaves out what the last message, an answer, says in reasoning.

    That of earlier turns is left out by design of many templates.
    """
    other = _with_reasoning(messages[-1], OTHER_REASONING)
    if other != messages[-1] and OTHER_REASONING not in render(tokenizer, [*messages[:-1], other]):
        raise Unusable("the chat template does not show reasoning")


def mark_for(text: str) -> str:
    """A character that does not occur in the text."""
    return next(char for char in map(chr, range(0xE000, 0xF8FF)) if char not in text)


def mark_turn(messages: list[Message], turn: int, mark: str) -> list[Message]:
    """The messages with `mark` as all that a turn says: no reasoning, no tool calls."""
    hidden = (*REASONING_FIELDS, "tool_calls")
    kept = {key: value for key, value in messages[turn].items() if key not in hidden}
    return [*messages[:turn], kept | {"content": mark}, *messages[turn + 1 :]]


def shared_start(left: str, right: str) -> int:
    """Number of leading characters that two texts share."""
    return len(commonprefix([left, right]))


def shared_end(left: str, right: str) -> int:
    """Number of trailing characters that two texts share."""
    return len(commonprefix([left[::-1], right[::-1]]))


def turn_end_ids(tokenizer) -> set[int]:
    """Ids of the tokens with which the template really ends an assistant turn, found by rendering.

    Empty where it writes no added token after an answer. A turn that calls a tool may end with a
    token of its own, which counts only where the ordinary one and EOS are absent.
    """
    tokens = tokenizer.added_tokens_decoder.items()
    added = {index: token.special for index, token in tokens if token.content.strip()}
    mark = mark_for("")
    tail = _tail(tokenizer, {"role": "assistant", "content": mark}, mark)
    if tail is None:
        raise InputError("the chat template does not show what the assistant says after the user")
    ends = set([index for index in tail if index in added][:1])
    tail = _tail(tokenizer, _with_text_arguments(_calling(mark)), mark) or []
    if not ends & set(tail) and tokenizer.eos_token_id not in tail:
        ends |= set([index for index in tail if added.get(index)][:1])
    return ends


def _tail(tokenizer, answer: Message, mark: str) -> list[int] | None:
    try:
        text = render(tokenizer, [{"role": "user", "content": "a"}, answer])
    except Unusable:
        return None
    _, found, tail = text.rpartition(mark)
    return tokenizer(tail, add_special_tokens=False)["input_ids"] if found else None


def _takes_objects(tokenizer) -> bool:
    try:
        text = render(tokenizer, [{"role": "user", "content": "a"}, _calling("key")])
    except Unusable:
        return False
    return "'key':" not in text  # a call in Python's own form, f(key='key'), is no dict


def _check_calls_shown(tokenizer, messages: list[Message]) -> None:
    """Unusable unless each call is in the render; words of its own tell it from the text."""
    numbers = count()

    def other(function):
        word = OTHER_CALL.format(next(numbers))
        as_object = isinstance(function["arguments"], dict)
        arguments = {word: word}
        return {"name": word, "arguments": arguments if as_object else json.dumps(arguments)}

    text = render(tokenizer, [_with_functions(message, other) for message in messages])
    if not all(OTHER_CALL.format(number) in text for number in range(next(numbers))):
        raise Unusable("the chat template does not show tool calls")


def _with_reasoning(message: Message, word: str) -> Message:
    """The message with `word` in place of its reasoning, in a field or between tags."""
    fields = {key: word for key in REASONING_FIELDS if str(message.get(key) or "").strip()}
    content = message["content"]
    for closing, opening in REASONING_TAGS.items():
        before, found, after = content.partition(closing)
        plan = before.rpartition(opening)[2].strip()
        if found and plan:
            content = before[: before.rindex(plan)] + word + closing + after
    return {**message, **fields, "content": content}


def _calling(word: str) -> Message:
    """An assistant turn whose one call says `word` as name, key and value."""
    function = {"name": word, "arguments": {word: word}}
    calls = [{"id": "call00001", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _with_text_arguments(message: Message) -> Message:
    def text(function):
        return {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}

    return _with_functions(message, text)


def _with_functions(message: Message, change: Callable[[dict], dict]) -> Message:
    """The message with what `change` makes of each called function put into it."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": function | change(function)})
    return {**message, "tool_calls": calls}


def _with_opening_tag(tokenizer, message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    content = message["content"]
    for closing, opening in REASONING_TAGS.items():
        before, found, _ = content.partition(closing)
        if found and opening not in before:
            return {**message, "content": _lost_opening(tokenizer, opening, closing) + content}
    return message


def _lost_opening(tokenizer, opening: str, closing: str) -> str:
    """What the template needs before an answer that has only the closing tag; mostly nothing."""

    def leaves_open(text: str) -> bool:
        return text.rfind(opening) > text.rfind(closing)

    mark = mark_for("")
    question = [{"role": "user", "content": "a"}]
    answer = {"role": "assistant", "content": f"{mark}\n{closing}\n\nb"}
    before, found, _ = render(tokenizer, [*question, answer]).partition(mark)
    if not found or leaves_open(before):
        return ""
    header = render_prompt(tokenizer, question)
    if leaves_open(header):
        return header[header.rfind(opening) :]
    return f"{opening}\n" if opening in before else ""
