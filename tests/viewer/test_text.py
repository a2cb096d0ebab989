"""What a terminal gets: nothing that acts on it, and lines that fit."""

import io
from datetime import date

from rich.console import Console

from stages.viewer.text import cell, print_rows, shown


def test_values_become_short_text():
    assert cell(0.123456) == "0.1235"
    assert cell(None) == "null" and cell(True) == "true" and cell(12) == "12"
    assert cell("") == "''" and cell(date(2024, 1, 2)) == "2024-01-02"
    assert cell([0.5, 0.5, 0.5]) == "0.5 x 3"
    assert cell([1, 2, 3]) == "3 ids"
    assert cell([-1.5, 0.25]) == "-1.5..0.25 (2)"
    assert cell([1, 2], full=True) == "[1 2]"
    assert cell({"a": ["\x1b"]}) == '{"a": ["\\u001b"]}'
    assert cell("x" * 310).endswith("x... (10 more characters)")
    assert cell("x" * 310, full=True) == "x" * 310


def printed(rows, width):
    out = io.StringIO()
    print_rows(Console(file=out, width=width, highlight=False), shown(rows, full=False))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_rows_are_a_table_where_it_fits_and_records_where_it_does_not():
    rows = [{"group": 0, "answer": "abc", "reward": 1.5}, {"group": 10, "answer": "d", "reward": 2}]
    assert printed(rows, 40) == [
        "group  answer  reward",
        "    0  abc        1.5",
        "   10  d            2",
    ]
    narrow = printed(rows, 16)
    assert narrow == [
        "group 0",
        "answer abc",
        "reward 1.5",
        "",
        "group 10",
        "answer d",
        "reward 2",
        "",
    ]


def test_wide_characters_count_two_columns():
    rows = [{"a": "漢" * 8, "b": 1}]
    assert printed(rows, 19)[0].split() == ["a", "b"]
    assert printed(rows, 18)[0].startswith("a 漢")
