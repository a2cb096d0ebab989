"""Raw rows of every known format, and what is done with rows that are not of it."""

import json
import math
from collections import Counter

import pytest

from stages.base.errors import InputError
from stages.rows.canonical import (
    PreferenceRow,
    PromptRow,
    SftRow,
    canonical,
    detect,
    open_rows,
)
from stages.text.messages import Dropped, clean_messages
from tests.helpers.shared import SHARED

DATA = SHARED / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no trial data at {DATA}")

USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
SYSTEM = {"role": "system", "content": "s"}


def read(kind, rows, name=None, columns=None):
    layout, results = open_rows(kind, enumerate(rows, start=1), name, columns, source="a.jsonl")
    return layout, [row for _, row in results]


def only(kind, row, name=None, columns=None):
    """The row in canonical form, beside the format that was detected."""
    layout = detect(kind, [row], name, columns)
    return layout.name, canonical(layout, row)


# SFT -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [USER, GOOD]}, "messages"),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}]},
            "sharegpt",
        ),
        ({"conversations": [USER, GOOD]}, "sharegpt"),
        ({"prompt": "q", "completion": "good"}, "prompt_completion"),
        ({"prompt": [USER], "completion": [GOOD]}, "prompt_completion"),
        ({"instruction": "q", "output": "good"}, "alpaca"),
        ({"instruction": "q", "input": "", "output": "good"}, "alpaca"),
        ({"instruction": "q", "input": None, "output": "good"}, "alpaca"),
        ({"question": "q", "answer": "good"}, "question_answer"),
        ({"messages": [USER, GOOD], "prompt": "other", "text": "other"}, "messages"),
    ],
)
def test_every_sft_format_comes_to_the_same_conversation(row, name):
    assert only("sft", row) == (name, SftRow(messages=[USER, GOOD]))


def test_plain_text_stays_text():
    assert only("sft", {"text": "once"}) == ("text", SftRow(text="once"))


def test_alpaca_input_follows_the_instruction():
    _, row = only("sft", {"instruction": "Add.", "input": "1 2", "output": "3"})
    assert row.messages[0]["content"] == "Add.\n\n1 2"


def test_sharegpt_names_of_roles_and_calls_are_those_of_templates():
    call = {"name": "f", "arguments": {"x": 1}}
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "seen"},
        {"from": "gpt", "value": "good"},
    ]
    _, row = only("sft", {"conversations": turns})
    assert [turn["role"] for turn in row.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert row.messages[2]["tool_calls"] == [{"type": "function", "function": call}]
    assert row.messages[2]["content"] == ""


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": None}, "'messages' is missing or null"),
        ({"other": 1}, "'messages' is missing or null"),
        ({"messages": []}, "a conversation without messages"),
        ({"messages": [USER, None]}, "a message is null, expected an object"),
        ({"messages": [USER, "hello"]}, "a message is text, expected an object"),
        ({"messages": [{"role": "usr", "content": "q"}]}, "unknown role 'usr'"),
        ({"messages": [{"content": "q"}]}, "unknown role None"),
    ],
)
def test_rows_that_cannot_be_used_are_dropped_one_by_one(row, reason):
    _, rows = read("sft", [{"messages": [USER, GOOD]}, row, {"messages": [USER, BAD]}])
    assert rows == [
        SftRow(messages=[USER, GOOD]),
        Dropped(reason),
        SftRow(messages=[USER, BAD]),
    ]


@pytest.mark.parametrize(
    ("human", "gpt", "call"),
    [("human", "gpt", "function_call"), ("Human", "GPT", "Function_Call")],
)
def test_sharegpt_roles_are_compared_in_lower_case(human, gpt, call):
    turns = [
        {"from": human, "value": "q"},
        {"from": call, "value": '{"name": "f"}'},
        {"from": gpt, "value": "good"},
    ]
    _, row = only("sft", {"conversations": turns})
    assert [turn["role"] for turn in row.messages] == ["user", "assistant", "assistant"]
    assert row.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("turn", "result"),
    [
        ({"from": "gpt"}, Dropped("a message without 'value'")),
        ({"from": "gpt", "content": "good"}, Dropped("a message without 'value'")),
        ({"from": "function_call"}, Dropped("a message without 'value'")),
        ({"role": "assistant", "value": "good"}, Dropped("a message without 'content'")),
        ({"role": "assistant"}, Dropped("a message without 'content'")),
        (
            {"from": "gpt", "value": None},
            SftRow(messages=[USER, {"role": "assistant", "content": ""}]),
        ),
        (
            {"role": "assistant", "content": None},
            SftRow(messages=[USER, {"role": "assistant", "content": ""}]),
        ),
    ],
)
def test_a_turn_without_its_text_is_dropped_where_null_is_empty(turn, result):
    assert only("sft", {"conversations": [USER, turn]})[1] == result


SYSTEMS = [
    ("sft", {"messages": [USER, GOOD]}),
    ("sft", {"conversations": [USER, GOOD]}),
    ("sft", {"prompt": "q", "completion": "good"}),
    ("sft", {"prompt": [USER], "completion": [GOOD]}),
    ("sft", {"instruction": "q", "output": "good"}),
    ("sft", {"question": "q", "answer": "good"}),
    ("preferences", {"prompt": "q", "chosen": "good", "rejected": "bad"}),
    ("preferences", {"chosen": [USER, GOOD], "rejected": [USER, BAD]}),
    ("prompts", {"prompt": "q"}),
    ("prompts", {"question": "q"}),
    ("prompts", {"messages": [USER]}),
    ("prompts", {"conversations": [USER]}),
]


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"train": False}, {"loss": 0}, {"train_detail": []}]
)
def test_n13_marks_of_turns_that_are_not_to_be_trained_come_along_in_every_layout(mark):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **mark}]
    shares = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", **mark}]
    rows = [
        {"messages": turns},
        {"messages": shares},
        {"conversations": shares},
        {"conversations": turns},
        {"prompt": turns[:1], "completion": turns[1:]},
        {"prompt": "q", "completion": shares[1:]},
    ]
    for row in rows:
        assert only("sft", row)[1] == SftRow(messages=turns)
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}', **mark}
    turn = only("sft", {"conversations": [shares[0], call]})[1].messages[1]
    assert turn | mark == turn


@pytest.mark.parametrize(("kind", "row"), SYSTEMS)
def test_a_system_column_opens_the_conversation_in_every_format(kind, row):
    def opening(system):
        result = only(kind, row | {"system": system})[1]
        return result.prompt if kind == "preferences" else result.messages

    assert opening("s")[:2] == [SYSTEM, USER]
    for blank in ("", " ", None):
        assert opening(blank)[0] == USER
    assert detect(kind, [row | {"system": "s"}]).unread == ()


def test_a_conversation_with_a_system_turn_keeps_its_own():
    for own in (SYSTEM, {"role": "developer", "content": "s"}):
        _, row = only("sft", {"messages": [own, USER, GOOD], "system": "other"})
        assert row.messages == [own, USER, GOOD]


PAIRS = [["one", "two"], ["three", None]]


@pytest.mark.parametrize("history", [PAIRS, json.dumps(PAIRS)])
def test_alpaca_history_becomes_the_turns_before(history):
    row = {"instruction": "q", "output": "good", "history": history, "system": "s"}
    said = ["s", "one", "two", "three", "", "q", "good"]
    roles = ["system", *["user", "assistant"] * 3]
    turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    assert only("sft", row) == ("alpaca", SftRow(messages=turns))


@pytest.mark.parametrize("history", [None, [], "", "[]"])
def test_alpaca_without_history_is_one_question(history):
    row = {"instruction": "q", "output": "good", "history": history}
    assert only("sft", row)[1] == SftRow(messages=[USER, GOOD])


@pytest.mark.parametrize("history", ["no json", "3", '{"a": 1}', [["q"]], ["qa"], [{"q": "a"}]])
def test_alpaca_history_of_another_form_drops_the_row(history):
    row = {"instruction": "q", "output": "good", "history": history}
    reason = "'history' is no list of [question, answer] pairs"
    assert only("sft", row)[1] == Dropped(reason)


@pytest.mark.parametrize("blank", ["", " \n", None])
@pytest.mark.parametrize("field", ["prompt", "completion"])
def test_an_empty_cell_where_text_is_needed_drops_the_row(field, blank):
    good = {"prompt": "q", "completion": "good"}
    _, rows = read("sft", [good, {**good, field: blank}])
    assert isinstance(rows[1], Dropped) and f"'{field}' is" in rows[1].reason


# Formats, knobs, mixed files -----------------------------------------------------------------


def test_the_format_is_detected_from_all_the_first_rows_together():
    layout, rows = read("sft", [{"messages": None, "id": 1}, {"id": 2, "messages": [USER, GOOD]}])
    assert (layout.name, layout.unread) == ("messages", ("id",))
    assert rows[0] == Dropped("'messages' is missing or null")


def test_columns_with_other_names_are_named_by_a_knob():
    row = {"ask": "q", "reply": "good", "text": "other"}
    columns = {"prompt": "ask", "completion": "reply"}
    name, result = only("sft", row, columns=columns)
    assert (name, result) == ("prompt_completion", SftRow(messages=[USER, GOOD]))


def test_a_format_can_be_named_where_several_fit():
    row = {"messages": [USER, GOOD], "text": "once"}
    assert only("sft", row, name="text") == ("text", SftRow(text="once"))


@pytest.mark.parametrize(
    ("rows", "name", "columns", "message"),
    [
        ([{"a": 1, "b": 2}], None, None, r"no sft format fits the columns \[a, b\]; expected mess"),
        ([{"text": "x"}], "messages", None, r"columns \[text\]; expected messages: messages"),
        ([{"text": "x"}], "mesages", None, "format 'mesages' is unknown; expected one of messages"),
        ([{"text": "x"}], None, {"txt": "x"}, "no field 'txt'"),
        (
            [{"text": "x"}],
            None,
            {"prompt": "ask"},
            r"no column 'ask' \(for 'prompt'\); .* \[text\]",
        ),
        ([{"a": "x", "b": 1}], None, {"prompt": "a"}, r"no sft format fits the columns \[a, b\]"),
        ([{"messages": "hello"}], None, None, "column 'messages' holds text, expected a list"),
        ([{"text": 3}], None, None, "column 'text' holds a number, expected text"),
        ([], None, None, "no sft format fits"),
    ],
)
def test_a_file_without_a_known_format_is_an_error(rows, name, columns, message):
    with pytest.raises(InputError, match=f"a.jsonl: .*{message}"):
        read("sft", rows, name, columns)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"text": "x"}, {"text": 3}, "row 2: column 'text' holds a number, in rows before .* text"),
        ({"text": "x"}, {"text": ["x"]}, "row 2: column 'text' holds a list"),
        ({"messages": [USER, GOOD]}, {"messages": "hi"}, "row 2: column 'messages' holds text"),
        (
            {"prompt": "q", "completion": "a"},
            {"prompt": [USER], "completion": "a"},
            "row 2: column 'prompt' holds a list, in rows before it was text",
        ),
        (
            {"messages": [USER, GOOD]},
            {"instruction": "q", "output": "a"},
            "row 2: has the columns of format 'alpaca', the file began with format 'messages'",
        ),
    ],
)
def test_a_file_of_mixed_types_is_an_error_naming_the_row(first, second, message):
    with pytest.raises(InputError, match=message):
        read("sft", [first, second])


def test_types_beyond_the_sample_are_checked_too():
    rows = ({"text": "x"} if number < 1500 else {"text": 3} for number in range(2000))
    with pytest.raises(InputError, match="a.jsonl: row 1501: column 'text' holds a number"):
        read("sft", rows)


def test_a_file_without_any_usable_row_is_an_error_with_the_reasons():
    rows = [{"messages": [None]}, {"messages": []}, {"messages": [None]}]
    with pytest.raises(InputError, match=r"a.jsonl: no usable .* is null.* \(2\); a conv"):
        read("sft", rows)


def test_rows_stream():
    seen = []

    def rows():
        for number in range(5000):
            seen.append(number)
            yield number, {"text": "x"}

    _, results = open_rows("sft", rows())
    assert next(results) == (0, SftRow(text="x"))
    assert len(seen) < 1500


# Preferences ---------------------------------------------------------------------------------

HUMAN = "\n\nHuman: q\n\nAssistant:"
# As LLaMA-Factory's files have them.
SAID = [
    {"from": "human", "value": "q"},
    {"from": "gpt", "value": "good"},
    {"from": "gpt", "value": "bad"},
]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"prompt": "q", "chosen": "good", "rejected": "bad"}, "prompted_pair"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, "prompted_pair"),
        ({"prompt": "q", "chosen": [GOOD], "rejected": [BAD]}, "prompted_pair"),
        ({"prompt": [USER], "chosen": "good", "rejected": "bad"}, "prompted_pair"),
        ({"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompted_pair"),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompted_pair"),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, "pair"),
        ({"chosen": f"{HUMAN} good", "rejected": f"{HUMAN} bad"}, "pair"),
        ({"chosen": f"{HUMAN} good".strip(), "rejected": f"{HUMAN} bad".strip()}, "pair"),
        ({"prompt": HUMAN, "chosen": "good", "rejected": "bad"}, "prompted_pair"),
        (
            {"prompt": HUMAN, "chosen": f"{HUMAN} good", "rejected": f"{HUMAN} bad"},
            "prompted_pair",
        ),
        ({"chosen": "q good", "rejected": "q bad"}, "pair"),
        ({"prompt": None, "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "pair"),
        ({"conversations": [SAID[0]], "chosen": SAID[1], "rejected": SAID[2]}, "sharegpt_pair"),
        ({"conversations": SAID[:1], "chosen": SAID[1:2], "rejected": SAID[2:]}, "sharegpt_pair"),
        ({"conversations": [USER], "chosen": GOOD, "rejected": BAD}, "sharegpt_pair"),
        ({"prompt": "q", "chosen": SAID[1], "rejected": SAID[2]}, "prompted_pair"),
        ({"prompt": SAID[:1], "chosen": GOOD, "rejected": BAD}, "prompted_pair"),
    ],
)
def test_every_preference_format_comes_to_the_same_pair(row, name):
    assert only("preferences", row) == (name, PreferenceRow([USER], [GOOD], [BAD]))


def test_n22_a_sharegpt_pair_keeps_its_system_turn_its_history_and_its_margin():
    history = [{"from": "system", "value": "s"}, SAID[0], SAID[1], SAID[0]]
    row = {"conversations": history, "chosen": SAID[1], "rejected": SAID[2], "score": 2}
    _, found = only("preferences", row, columns={"margin": "score"})
    prompt = [{"role": "system", "content": "s"}, USER, GOOD, USER]
    assert found == PreferenceRow(prompt, [GOOD], [BAD], 2.0)
    _, found = only("preferences", row | {"chosen": {"from": "gpt"}})
    assert found == Dropped("a message without 'value'")


def test_a_shared_start_of_several_turns_is_the_prompt():
    shared = [SYSTEM, USER, {"role": "assistant", "content": "a"}, USER]
    _, row = only("preferences", {"chosen": [*shared, GOOD], "rejected": [*shared, BAD]})
    assert row == PreferenceRow(shared, [GOOD], [BAD])


def test_a_transcript_of_several_turns_is_split_at_the_last_shared_one():
    start = "\n\nHuman: one\n\nmore\n\nAssistant: two\n\nHuman: three\n\nAssistant:"
    _, row = only("preferences", {"chosen": f"{start} four", "rejected": f"{start}\n\nfive"})
    assert [turn["content"] for turn in row.prompt] == ["one\n\nmore", "two", "three"]
    assert (row.chosen[0]["content"], row.rejected[0]["content"]) == ("four", "five")


def test_conversations_that_part_early_keep_the_turns_that_follow():
    more = [{"role": "user", "content": "then?"}, {"role": "assistant", "content": "so"}]
    row = {"chosen": [USER, GOOD, *more], "rejected": [USER, BAD]}
    assert only("preferences", row)[1] == PreferenceRow([USER], [GOOD, *more], [BAD])


def test_equal_answers_are_left_for_the_tokens_to_tell():
    _, row = only("preferences", {"chosen": [USER, GOOD], "rejected": [USER, GOOD]})
    assert row == PreferenceRow([USER], [GOOD], [GOOD])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": [GOOD], "rejected": [BAD]}, "share no prompt"),
        ({"chosen": [USER, GOOD], "rejected": [SYSTEM, BAD]}, "share no prompt"),
        ({"chosen": [USER, USER], "rejected": [USER, GOOD]}, "do not part at a turn of the assis"),
        (
            {"prompt": "z", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "'prompt' is not what chosen and rejected start with",
        ),
        (
            {"prompt": [SYSTEM], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "'prompt' is not what chosen and rejected start with",
        ),
        ({"prompt": " ", "chosen": "good", "rejected": "bad"}, "'prompt' is empty"),
        ({"prompt": "q", "chosen": "good", "rejected": ""}, "an empty answer"),
        ({"chosen": "good", "rejected": "bad"}, "share no prompt"),
        ({"chosen": f"{HUMAN} good", "rejected": "bad"}, "does not start with 'Human:'"),
        (
            {"chosen": f"{HUMAN} good\n\nHuman: x", "rejected": f"{HUMAN} bad"},
            "does not end with the assistant",
        ),
        ({"chosen": [USER, GOOD], "rejected": [USER, None]}, "a message is null"),
        ({"chosen": [USER, GOOD], "rejected": "bad"}, "one of chosen and rejected is text"),
    ],
)
def test_pairs_that_cannot_be_used_are_dropped_with_the_reason(row, reason):
    _, result = only("preferences", row)
    assert isinstance(result, Dropped) and reason in result.reason


@pytest.mark.parametrize(
    ("margin", "value"),
    [(None, 0.0), ("", 0.0), (0, 0.0), (1, 1.0), (0.5, 0.5), ("1.5", 1.5)],
)
def test_w05_a_missing_margin_is_zero(margin, value):
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    assert only("preferences", {**pair, "margin": margin})[1].margin == value
    assert only("preferences", pair)[1].margin == 0.0


def test_w05_rows_with_and_without_a_margin_stand_in_one_file():
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    rows = [pair, {**pair, "margin": 1}, {**pair, "margin": None}, {**pair, "margin": 0.25}]
    assert [row.margin for row in read("preferences", rows)[1]] == [0.0, 1.0, 0.0, 0.25]


@pytest.mark.parametrize("margin", [-1, -0.001, math.nan, math.inf, -math.inf, "much", "nan"])
def test_w05_a_negative_or_non_finite_margin_is_refused_with_the_row_number(margin):
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    with pytest.raises(InputError, match="a.jsonl: row 2: margin is .*, expected a finite number"):
        read("preferences", [pair, {**pair, "margin": margin}])


@pytest.mark.parametrize("margin", [True, [1], {"x": 1}])
def test_w05_a_margin_of_another_type_is_refused(margin):
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    with pytest.raises(InputError, match="column 'margin' holds"):
        read("preferences", [pair, {**pair, "margin": margin}])


# Prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"prompt": "q"}, "prompt"),
        ({"prompt": [USER]}, "prompt"),
        ({"question": "q"}, "question"),
        ({"messages": [USER]}, "messages"),
        ({"messages": [USER, GOOD]}, "messages"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "sharegpt"),
    ],
)
def test_every_prompt_format_comes_to_the_same_messages(row, name):
    assert only("prompts", row) == (name, PromptRow([USER]))


@pytest.mark.parametrize(
    ("answer", "text"), [("18", "18"), (18, "18"), (18.0, "18"), (0.5, "0.5"), (None, None)]
)
def test_an_answer_is_text(answer, text):
    assert only("prompts", {"question": "q", "answer": answer})[1] == PromptRow([USER], text)


@pytest.mark.parametrize("entry", [{"seed": 1}, '{"seed": 1}'])
def test_an_entry_is_an_object_or_its_json(entry):
    assert only("prompts", {"prompt": "q", "entry": entry})[1].entry == {"seed": 1}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": ""}, "'prompt' is empty"),
        ({"messages": [GOOD]}, "no turn before the assistant's"),
        ({"prompt": "q", "entry": "[1]"}, "'entry' is no JSON object"),
        ({"prompt": "q", "entry": "{"}, "'entry' is no JSON object"),
    ],
)
def test_prompts_that_cannot_be_used_are_dropped_with_the_reason(row, reason):
    assert only("prompts", row)[1] == Dropped(reason)


# All -----------------------------------------------------------------------------------------


def test_cleaning_clean_messages_changes_nothing():
    messages = [
        {"role": "human", "content": ["a", {"type": "text", "text": "b"}], "name": None},
        {"role": "model", "tool_calls": [{"name": "f", "arguments": '{"x": null, "y": [null]}'}]},
    ]
    once = clean_messages(messages)
    assert once == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"y": [None]}}}
            ],
        },
    ]
    assert clean_messages(once) == once


@needs_data
@pytest.mark.parametrize(
    ("kind", "file", "name", "rows"),
    [
        ("sft", "gsm8k_sft.jsonl", "messages", 7473),
        ("preferences", "gsm8k_preferences.jsonl", "prompted_pair", None),
        ("prompts", "gsm8k_prompts.jsonl", "question", 1319),
    ],
)
def test_every_row_of_the_trial_data_is_usable(kind, file, name, rows):
    with (DATA / file).open(encoding="utf-8") as lines:
        raw = [json.loads(line) for line in lines]
    layout, results = read(kind, raw)
    assert (layout.name, layout.unread) == (name, ())
    assert len(results) == len(raw) == (rows or len(raw))
    assert Counter(isinstance(row, Dropped) for row in results) == {False: len(raw)}


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "int"}}}}]


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("sft", {"messages": [USER, GOOD]}),
        ("sft", {"conversations": [USER, GOOD]}),
        ("sft", {"prompt": "q", "completion": "good"}),
        ("preferences", {"prompt": "q", "chosen": "good", "rejected": "bad"}),
        ("preferences", {"chosen": [USER, GOOD], "rejected": [USER, BAD]}),
        ("prompts", {"prompt": "q"}),
        ("prompts", {"messages": [USER]}),
    ],
)
def test_the_tools_of_a_row_come_along_as_objects_or_json_without_arrows_nulls(kind, row):
    padded = [{**TOOLS[0], "of_another_row": None}]
    for tools, wanted in (
        (TOOLS, TOOLS),
        (json.dumps(TOOLS), TOOLS),
        (padded, TOOLS),
        ([], None),
        ("", None),
        (None, None),
    ):
        assert only(kind, row | {"tools": tools})[1].tools == wanted
    for tools in ("no json", ["f"], '{"name": "f"}'):
        assert only(kind, row | {"tools": tools})[1] == Dropped("'tools' is no list of objects")
