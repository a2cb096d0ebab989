import json

import pytest

from stages.core.errors import InputError
from stages.core.rows.canonical import PreferenceRow, PromptRow, SftRow
from stages.knobs.base import Source
from stages.store.sources.inputs import open_source

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
