import json

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


def test_columns_that_no_field_takes_are_printed(tmp_path, capsys):
    opened(tmp_path, "sft", {"prompt": "q", "completion": "good", "topic": "x"})
    assert "rows in format 'prompt_completion'; not read: topic" in capsys.readouterr().out


def test_reasons_are_few_and_add_up_whatever_the_rows_hold(capsys):
    intake = Intake("rows.jsonl")
    intake.keep(2)
    for number in range(300):
        intake.drop(number, f"unknown role 'r{number}'")
        intake.drop(number, "a message is null")
    intake.sums["tools_unseen"] = 2
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
        ({"prompt": "nowhere"}, r"rows.jsonl: no sft format fits the columns \[prompt, completion"),
    ],
)
def test_a_knob_that_names_no_field_or_column_is_refused(tmp_path, columns, message):
    with pytest.raises(InputError, match=message):
        opened(tmp_path, "sft", {"prompt": "q", "completion": "good"}, columns=columns)
