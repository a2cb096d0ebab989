"""Messages as every other module expects them, whatever the file held.

A clean message is `{"role": str, "content": str, ...}` without nulls. Roles are those of chat
templates. Tool calls are `{"type": "function", "function": {"name", "arguments"}}` with the
arguments as an object: a JSON string is decoded once, and keys whose value is null are left out,
because Arrow gives every row the keys of all rows (so a null argument equals an absent one).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

Message = dict

FUNCTION_KEYS = ("name", "arguments")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# Of OpenAI, of axolotl (two), of slime (two), of ms-swift.
TRAIN_MARKS = ("weight", "train", "training", "loss_mask", "step_loss_mask", "loss")
SHOWN = 40  # characters of data in a reason

# Compared in lower case.
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "ipython": "ipython",
}


@dataclass(frozen=True)
class Dropped:
    """A row that cannot be used; `reason` is one of few phrases, so that rows count by it."""

    reason: str


class Unusable(ValueError):
    """Raised on the way through a row; the public functions hand it back as `Dropped`."""


def clean_messages(messages) -> list[Message]:
    """Messages as in the module's docstring; raises Unusable naming what stands in the way."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise Unusable(f"a conversation is {kind_of(messages)}, expected a list of messages")
    if not messages:
        raise Unusable("a conversation without messages")
    return [_clean_message(message) for message in messages]


def clean_tools(value) -> list[dict] | None:
    """The tools that a row offers, as templates take them; JSON text is decoded, [] is None."""
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value or None
    except json.JSONDecodeError:
        tools = value
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("'tools' is no list of objects")
    return drop_nulls(tools)


def text_of(content) -> str:
    """Content as text: null is empty, a list of text parts is joined without a separator."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    raise Unusable(f"the content of a message is {kind_of(content)}, expected text")


def kind_of(value) -> str:
    """What a value is, in the words of an error message."""
    kinds = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        tuple: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), f"a {type(value).__name__}")


def shown(value) -> str:
    """A value in a reason: as Python writes it, so without control characters, and cut."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def drop_nulls(value):
    """The value without the keys that hold null, at any depth; nulls in lists stay."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


def says_something(message: Message) -> bool:
    """Whether a clean message has text, reasoning or a tool call."""
    if message["content"].strip() or message.get("tool_calls"):
        return True
    return any(message.get(field) for field in REASONING_FIELDS)


def may_train(message: Message) -> bool:
    """Whether a clean message is not marked with 0 or false in one of TRAIN_MARKS."""
    marks = {key: message[key] for key in TRAIN_MARKS if key in message}
    for key, mark in marks.items():
        if mark not in (0, 1):
            raise Unusable(f"a message with {key} {shown(mark)}, expected 0 or 1")
    if "train_detail" in message:
        raise Unusable("a message with train_detail, parts of it to train, which is not known here")
    return all(marks.values())


def from_sharegpt(turn):
    """A turn with `from` and `value` as one with `role` and `content`; others as they are.

    A turn from `function_call` is the assistant's, its value the call as JSON.
    """
    if not isinstance(turn, dict) or "role" in turn or "from" not in turn:
        return turn
    if "value" not in turn:
        raise Unusable("a message without 'value'")
    role, value = turn["from"], turn["value"]
    marks = {key: turn[key] for key in (*TRAIN_MARKS, "train_detail") if key in turn}
    if not isinstance(role, str) or role.lower() != "function_call":
        return {"role": role, "content": value, **marks}
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        raise Unusable("the value of a function_call turn is no JSON") from None
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": None, "tool_calls": calls, **marks}


def _clean_message(message) -> Message:
    if not isinstance(message, dict):
        raise Unusable(f"a message is {kind_of(message)}, expected an object")
    role = message.get("role")
    known = ROLES.get(role.lower()) if isinstance(role, str) else None
    if known is None:
        raise Unusable(f"unknown role {shown(role)}")
    clean = {key: drop_nulls(value) for key, value in message.items() if value is not None}
    clean |= {"role": known, "content": text_of(message.get("content"))}
    calls = clean.pop("tool_calls", None)
    if calls:
        clean["tool_calls"] = [_clean_call(call) for call in calls]
    if "content" not in message and not says_something(clean):
        raise Unusable("a message without 'content'")
    return clean


def _part_text(part) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise Unusable(f"a content part is {kind_of(part)}, expected a text part")
    kind = part.get("type") or "text"
    if kind != "text":
        raise Unusable(f"a content part of type {shown(kind)}, expected 'text'")
    return text_of(part.get("text"))


def _clean_call(call) -> dict:
    if not isinstance(call, dict):
        raise Unusable(f"a tool call is {kind_of(call)}, expected an object")
    function = call.get("function") or {key: call[key] for key in call if key in FUNCTION_KEYS}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unusable("a tool call without the name of its function")
    function = {**function, "arguments": _arguments(function.get("arguments"))}
    rest = {key: value for key, value in call.items() if key not in FUNCTION_KEYS}
    return {"type": "function", **rest, "function": function}


def _arguments(arguments) -> dict:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError:
            raise Unusable("the arguments of a tool call are no JSON object") from None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise Unusable("the arguments of a tool call are no JSON object")
    return drop_nulls(arguments)
