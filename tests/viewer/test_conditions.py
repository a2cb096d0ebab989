"""`--where`: a small grammar, and never code."""

import pytest

from stages.base.errors import InputError
from stages.viewer.conditions import Condition, parse


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("reward < 0.5", [("reward", "<", 0.5)]),
        ("reward<-1e-3", [("reward", "<", -0.001)]),
        ("group = 3", [("group", "==", 3)]),
        ("used != false", [("used", "!=", False)]),
        ("reward == null", [("reward", "==", None)]),
        (
            "completion >= 'a and b' and group == 7",
            [("completion", ">=", "a and b"), ("group", "==", 7)],
        ),
        ('answer == "it\'s"   and  kl > .1 ', [("answer", "==", "it's"), ("kl", ">", 0.1)]),
        ("completion~'ab'", [("completion", "~", "ab")]),
        ("x == ''", [("x", "==", "")]),
    ],
)
def test_conditions_are_read_as_they_are_meant(text, wanted):
    found = parse(text)
    assert found == [Condition(*part) for part in wanted]
    assert [type(c.value) for c in found] == [type(value) for *_, value in wanted]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("reward", "cannot read 'reward'"),
        ("", "expected `column operator value`"),
        ("reward < ", "cannot read"),
        ("reward < low", "found 'low', expected a number"),
        ("reward < 1 or kl > 2", "expected `and` before 'or kl > 2'"),
        ("reward < 1 and", "cannot read"),
        ("__import__('os').system('true') == 0", "cannot read"),
        ("reward < nan", "found 'nan'"),
        ("reward < (1).real", "found '(1).real'"),
    ],
)
def test_anything_else_is_refused_in_words(text, said):
    with pytest.raises(InputError, match="condition") as error:
        parse(text)
    assert said in str(error.value)
