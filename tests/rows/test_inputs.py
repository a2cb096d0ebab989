import json
from collections import Counter

import pytest

from stages.base.errors import InputError
from stages.base.knobs import Source
from stages.rows.canonical import PreferenceRow, PromptRow, SftRow
from stages.rows.inputs import Intake, open_source

USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
KNOBS = dict.fromkeys(Source.model_fields) | {"split": "train"}


def opened(folder, kind, row, **knobs):
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    source = Source(**KNOBS | {"dataset": str(file)} | knobs)
    return [row for _, row in open_source(kind, source, folder / "task.jsonl", 0)[1]]


@pytest.mark.parametrize(
    ("kind", "row", "columns", "expected"),
    [
        (
            "sft",
            {"ask": "q", "reply": "good", "text": "other"},
            {"prompt": "ask", "completion": "reply"},
            SftRow(messages=[USER, GOOD]),
        ),
        (
            "preferences",
            {"prompt": "q", "better": "good", "worse": "bad"},
            {"chosen": "better", "rejected": "worse"},
            PreferenceRow([USER], [GOOD], [BAD]),
        ),
        (
            "prompts",
            {"problem": "q", "final": 3, "answer": "long"},
            {"question": "problem", "answer": "final"},
            PromptRow([USER], "3"),
        ),
    ],
)
def test_columns_that_go_by_another_name_are_named_by_a_knob_and_printed(
    tmp_path, capsys, kind, row, columns, expected
):
    assert opened(tmp_path, kind, row, columns=columns) == [expected]
    printed = capsys.readouterr().out
    assert all(f"{column!r} as {field!r}" in printed for field, column in columns.items())


NESTED = {"extra": {"ask": "q", "deep": {"good": "good", "bad": "bad"}}, "id": 7}


@pytest.mark.parametrize(
    ("kind", "columns", "expected"),
    [
        (
            "prompts",
            {"prompt": "extra.ask", "answer": "extra.deep.good"},
            PromptRow([USER], "good"),
        ),
        (
            "sft",
            {"prompt": "extra.ask", "completion": "extra.deep.good", "system": "extra.deep.bad"},
            SftRow(messages=[{"role": "system", "content": "bad"}, USER, GOOD]),
        ),
        (
            "preferences",
            {
                "prompt": "extra.ask",
                "chosen": "extra.deep.good",
                "rejected": "extra.deep.bad",
                "margin": "id",
            },
            PreferenceRow([USER], [GOOD], [BAD], 7.0),
        ),
    ],
)
def test_n08_a_dotted_name_reaches_into_a_mapping(tmp_path, kind, columns, expected):
    assert opened(tmp_path, kind, NESTED, columns=columns) == [expected]


def test_n08_a_column_of_that_very_name_comes_before_what_a_mapping_holds(tmp_path):
    row = {"prompt": "q", "a.b": "good", "a": {"b": "bad"}}
    expected = [PromptRow([USER], "good")]
    assert opened(tmp_path, "prompts", row, columns={"answer": "a.b"}) == expected


def test_n08_what_is_left_of_a_mapping_is_printed_as_not_read(tmp_path, capsys):
    columns = {"prompt": "extra.ask", "answer": "extra.deep.good"}
    opened(tmp_path, "prompts", NESTED, columns=columns)
    assert "; not read: extra.deep.bad, id\n" in capsys.readouterr().out


FIELDS = {
    "sft": ({"prompt": "q", "completion": "a"}, ("prompt", "completion", "system", "tools")),
    "preferences": (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        ("prompt", "chosen", "rejected", "margin", "system", "tools"),
    ),
    "prompts": ({"prompt": "q"}, ("prompt", "answer", "entry", "system", "tools")),
}


@pytest.mark.parametrize(
    ("kind", "field"), [(k, f) for k, (_, names) in FIELDS.items() for f in names]
)
@pytest.mark.parametrize("column", ["ground_thruth", "more.ground_thruth", "more.x.y", "id.x"])
def test_n08_a_column_that_is_not_there_is_refused_for_every_field(tmp_path, kind, field, column):
    row = FIELDS[kind][0] | {"id": 7, "more": {"ground_truth": "a", "x": None}}
    with pytest.raises(InputError, match=rf"no column '{column}' \(for '{field}'\)") as error:
        opened(tmp_path, kind, row, columns={field: column})
    assert str(error.value).endswith(
        f"[{', '.join(FIELDS[kind][0])}, id, more.ground_truth, more.x]"
    )


def test_n08_a_column_that_is_null_in_the_first_rows_is_there(tmp_path):
    row = {"prompt": "q", "final": None}
    assert opened(tmp_path, "prompts", row, columns={"answer": "final"}) == [PromptRow([USER])]


def test_columns_that_no_field_takes_are_printed(tmp_path, capsys):
    opened(tmp_path, "sft", {"prompt": "q", "completion": "good", "topic": "x"})
    assert "rows in format 'prompt_completion'; not read: topic" in capsys.readouterr().out


def test_reasons_are_few_and_add_up_whatever_the_rows_hold(capsys):
    intake = Intake("rows.jsonl")
    intake.add(["a", "b"], [], Counter(tools_unseen=2))
    for number in range(300):
        intake.drop(number, f"unknown role 'r{number}'")
        intake.drop(number, "a message is null")
    intake.close()
    figures, printed = intake.figures(), capsys.readouterr().out.splitlines()
    reasons = figures["dropped_by_reason"]
    assert (figures["rows"], figures["kept"], figures["dropped"]) == (602, 2, 600)
    assert sum(reasons.values()) == 600 and reasons["a message is null"] == 300
    assert len(reasons) == len(printed) - 1 == 21
    assert (reasons["other reasons"], reasons["unknown role 'r0'"]) == (281, 1)
    assert "rows.jsonl: dropped 281 rows: other reasons (first: row 19)" in printed
    assert printed[-1] == "rows.jsonl: the chat template takes no notice of the tools of 2 rows"
    assert figures["tools_unseen"] == 2


def test_control_characters_in_a_reason_are_spelled_out():
    intake = Intake("rows.jsonl")
    intake.drop(1, "the chat template refuses it: \x1b[31m")
    assert list(intake.figures()["dropped_by_reason"]) == [
        r"the chat template refuses it: \x1b[31m"
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": "ask"}, r"rows.jsonl: columns: no field 'promt'"),
        (
            {"prompt": "nowhere"},
            r"rows.jsonl: columns: no column 'nowhere' .* \[prompt, completion\]",
        ),
    ],
)
def test_a_knob_that_names_no_field_or_column_is_refused(tmp_path, columns, message):
    with pytest.raises(InputError, match=message):
        opened(tmp_path, "sft", {"prompt": "q", "completion": "good"}, columns=columns)
