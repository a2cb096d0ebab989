import sys
from decimal import Decimal

import numpy as np
import pytest
import reasoning_gym

from stages.base.errors import InputError
from stages.rollouts import rewards as module
from stages.rollouts.rewards import Rules, final_number, find_verifier, overlong_penalty


def entry_of(name: str, **config) -> dict:
    return reasoning_gym.create_dataset(name, size=1, seed=0, **config)[0]


@pytest.fixture
def rules_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_rules.py").write_text(
        "def first_letter(text, answer, entry):\n"
        "    return float(text[:1] == answer[:1])\n"
        "def nearly(text, answer, entry):\n"
        "    return 1 - 1e-12\n"
        "def unknown(text, answer, entry):\n"
        "    return None\n"
        "def yes(text, answer, entry):\n"
        "    return True\n"
        "def broken(text, answer, entry):\n"
        "    return 1 / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_rules", None)


@pytest.mark.parametrize(
    "text, number",
    [
        ("42", "42"),
        ("The answer is 42.", "42"),
        ("first 7, then 8", "8"),
        ("-3", "-3"),
        ("it costs $1,234,567.50 now", "1234567.50"),
        ("0.50", "0.5"),
        (".25", "0.25"),
        ("-.5", "-0.5"),
        ("so #### 12", "12"),
        ("#### 12\nand 99 more", "12"),
        ("#### 1\n#### 2\n3", "2"),
        (r"thus \boxed{17} of 20", "17"),
        (r"\boxed{1} or \boxed{2} #### 3", "2"),
        (r"\boxed{x} #### 3", "3"),
        ("7 and #### none", "7"),
        ("the list is 1,2,3", "3"),
        ("1,2345", "2345"),
        ("5, ", "5"),
        ("007", "7"),
        ("3-5", "5"),
        ("pages 10-12", "12"),
        ("(2)-5", "5"),
        ("x-.5", "0.5"),
        ("x = -5", "-5"),
        ("$-5", "-5"),
        ("8 - 3 = 5", "5"),
    ],
)
def test_the_final_number_of_a_text(text, number):
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", r"\boxed{x}", "#### ?", "-", "."])
def test_a_text_without_a_number_has_no_final_number(text):
    assert final_number(text) is None


@pytest.mark.parametrize(
    "text, answer, score",
    [
        ("abc", "abc", 1.0),
        (" abc\n", "abc", 1.0),
        ("abc", " abc ", 1.0),
        ("Abc", "abc", 0.0),
        ("abc.", "abc", 0.0),
        ("", "abc", 0.0),
        ("", "", 1.0),
        ("abc", None, None),
    ],
)
def test_exact_compares_text_but_for_white_space_at_its_ends(text, answer, score):
    assert find_verifier("exact", None)(text, answer, None) == score


@pytest.mark.parametrize(
    "text, answer, score",
    [
        ("I get 1,000.0", "#### 1000", 1.0),
        ("#### 12", "12", 1.0),
        ("12 apples", "13", 0.0),
        ("none", "13", 0.0),
        ("none", "no number", None),
        ("12", None, None),
    ],
)
def test_numeric_compares_final_numbers(text, answer, score):
    assert find_verifier("numeric", None)(text, answer, None) == score


@pytest.mark.parametrize(
    "text, answer, score",
    [
        ("<answer>abc</answer>", "abc", 1.0),
        ("so <answer> a\nbc </answer> it is", "a\nbc", 1.0),
        ("<answer>abd</answer>", "abc", 0.0),
        ("abc", "abc", 0.0),
        ("<answer>abc</answer>", None, None),
    ],
)
def test_regex_compares_the_first_group(text, answer, score):
    verify = find_verifier("regex", r"<answer>(.*?)</answer>")
    assert verify(text, answer, None) == score


@pytest.mark.parametrize("pattern", [None, "abc", "(?:abc)", "(", ""])
def test_a_pattern_that_is_broken_or_without_a_group_is_refused(pattern):
    with pytest.raises(InputError, match="verifier_pattern"):
        find_verifier("regex", pattern)


@pytest.mark.parametrize("name", ["no_such_module:f", "math:no_such_function"])
def test_a_function_that_cannot_be_imported_is_refused(name):
    with pytest.raises(InputError, match="cannot import"):
        find_verifier(name, None)


def test_an_unknown_verifier_is_refused_naming_the_known_ones():
    with pytest.raises(InputError, match="'fuzzy', expected task, exact, numeric, regex"):
        find_verifier("fuzzy", None)


def test_the_task_verifier_scores_right_answers_one_and_wrong_ones_less():
    entry = entry_of("spell_backward", min_word_len=4, max_word_len=5)
    verify = find_verifier("task", None)
    assert verify(entry["answer"], entry["answer"], entry) == 1.0
    assert verify(f" {entry['answer']}\n", None, entry) == 1.0
    assert verify(entry["answer"][::-1] + "x", None, entry) < 1.0
    assert verify("", None, entry) < 1.0
    assert verify("anything", "answer", None) is None


def test_a_verifier_of_ones_own_is_called_with_text_answer_and_entry(rules_of_ones_own):
    verify = find_verifier("own_rules:first_letter", None)
    assert verify("abc", "axx", {}) == 1.0
    assert verify("bbc", "axx", {}) == 0.0
    assert find_verifier("own_rules:unknown", None)("a", "b", {}) is None
    yes = rules("own_rules:yes").components("a", 1, "b", {})["reward_correctness"]
    assert yes == 1.0 and isinstance(yes, float)


@pytest.mark.parametrize("close", [0.9999999, 1 - 1e-9, 6 * (1 / 6)])
def test_a_score_close_to_one_does_not_become_one_in_float32(monkeypatch, close):
    monkeypatch.setattr(module, "_task_verifier", lambda name: lambda text, entry: close)
    entry = {"metadata": {"source_dataset": "x"}}
    score = rules("task").components("a", 1, "b", entry)["reward_correctness"]
    assert (np.float32(score) == 1.0) == (close == 1.0)
    assert score == pytest.approx(close, abs=1e-6)


def test_a_score_of_ones_own_close_to_one_does_not_become_one_in_float32(rules_of_ones_own):
    score = rules("own_rules:nearly").components("a", 1, "b", {})["reward_correctness"]
    assert np.float32(score) < 1.0
    assert score == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    "length, penalty",
    [(1, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (9, -0.75), (10, -1.0), (12, -1.0)],
)
def test_the_overlong_penalty_falls_from_zero_to_minus_one_over_its_buffer(length, penalty):
    assert overlong_penalty(length, max_length=10, buffer=4) == penalty


@pytest.mark.parametrize("buffer", [0, -1, 11])
def test_an_overlong_buffer_outside_the_cap_is_refused(buffer):
    with pytest.raises(ValueError, match="overlong buffer"):
        overlong_penalty(5, max_length=10, buffer=buffer)


def rules(verify="exact", pattern=None, cap=10, buffer=0) -> Rules:
    return Rules(find_verifier(verify, None), pattern, cap, buffer)


def test_each_rule_has_its_column_and_is_null_where_it_is_not_asked_for():
    assert rules().components("abc", 4, "abc", None) == {
        "reward_correctness": 1.0,
        "reward_format": None,
        "reward_length": None,
    }
    assert rules(buffer=4, pattern="a.*").components("abc", 9, None, None) == {
        "reward_correctness": None,
        "reward_format": 1.0,
        "reward_length": -0.75,
    }


@pytest.mark.parametrize(
    "text, matched",
    [
        ("<think>a\nb</think>c", 1.0),
        ("x<think>a</think>c", 0.0),
        ("<think>a", 0.0),
        ("", 0.0),
    ],
)
def test_the_format_pattern_matches_the_whole_text_over_lines(text, matched):
    found = rules(pattern="<think>.*</think>.*").components(text, 1, None, None)
    assert found["reward_format"] == matched


@pytest.mark.parametrize("text, matched", [("aa", 1.0), ("aab", 0.0), ("baa", 0.0), ("aa\n", 0.0)])
def test_text_around_what_the_format_pattern_matches_is_a_miss(text, matched):
    assert rules(pattern="a+").components(text, 1, None, None)["reward_format"] == matched


def test_a_rule_that_raises_is_not_swallowed(rules_of_ones_own):
    with pytest.raises(ZeroDivisionError):
        rules("own_rules:broken").components("abc", 3, "abc", None)


def test_components_are_the_numbers_that_a_float32_column_keeps(monkeypatch):
    def third(text, answer, entry):
        return 1 / 3

    found = Rules(third, None, 10, 7).components("abc", 9, "abc", None)
    assert found["reward_correctness"] == float(np.float32(1 / 3))
    assert found["reward_length"] == float(np.float32(-6 / 7))


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_refused(score):
    rules = Rules(lambda text, answer, entry: score, None, 10, 0)
    with pytest.raises(ValueError, match=f"the score is {score}, expected a finite number or None"):
        rules.components("a", 1, None, None)
