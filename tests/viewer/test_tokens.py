"""Which tokens a row holds and what is known of each; expected values by hand."""

import math

import pytest

from stages.viewer.tokens import Span, extent, shade, spans

BUFFER = {
    "prompt_ids": [4, 5],
    "completion_ids": [7, 8, 2],
    "log_probs_old": [-0.5, -1.0, 0.0],
    "log_probs_ref": [-1.0, -0.5, 0.0],
    "values_old": None,
}


def test_a_completion_has_what_the_buffer_and_the_update_know():
    prompt, completion = spans(BUFFER, {"advantage": [2.0, 2.0, 2.0], "ratio": [1.0, 1.25, 0.8]})
    assert prompt == Span("prompt", [4, 5], False)
    assert (completion.title, completion.ids, completion.answer) == ("completion", [7, 8, 2], True)
    assert completion.figures == {
        "log-prob": [-0.5, -1.0, 0.0],
        "reference": [0.5, -0.5, 0.0],
        "advantage": [2.0, 2.0, 2.0],
        "ratio": [1.0, 1.25, 0.8],
    }


def test_a_completion_that_was_never_trained_on_has_no_ratio():
    _, completion = spans(BUFFER, {"advantage": [0.0] * 3, "ratio": None})
    assert set(completion.figures) == {"log-prob", "reference", "advantage"}


def test_an_sft_row_parts_what_is_read_from_what_is_learned():
    row = {"input_ids": [4, 5, 7, 2, 9], "labels": [-100, -100, 7, 2, -100]}
    assert [(s.title, s.ids, s.answer) for s in spans(row, None)] == [
        ("read", [4, 5], False),
        ("learned", [7, 2], True),
        ("read", [9], False),
    ]


def test_a_pair_has_a_prompt_and_two_answers_and_a_row_without_ids_nothing():
    row = {"prompt_ids": [4], "chosen_ids": [5], "rejected_ids": [6, 7], "margin": 0.0}
    assert [s.title for s in spans(row, None)] == ["prompt", "chosen", "rejected"]
    assert spans({"round": 1}, None) == []
    scored = spans(
        row | {"log_probs_ref_chosen": [-1.0], "log_probs_ref_rejected": [0.0, -2.0]}, None
    )
    assert [s.figures for s in scored] == [{}, {"log-prob": [-1.0]}, {"log-prob": [0.0, -2.0]}]


@pytest.mark.parametrize("measure", ["ratio", "advantage", "reference"])
def test_shades_are_white_at_the_neutral_point_green_above_and_red_below(measure):
    neutral = 1.0 if measure == "ratio" else 0.0
    assert shade(measure, neutral, 1.0) == (245, 245, 245)
    red, green, blue = shade(measure, neutral + 0.5, 1.0)
    assert green > red and green > blue
    red, green, blue = shade(measure, neutral - 0.5, 1.0)
    assert red > green and red > blue


def test_a_certain_token_is_white_and_an_impossible_one_red():
    assert shade("log-prob", 0.0, 1.0) == (245, 245, 245)
    assert shade("log-prob", -50.0, 1.0) == (244, 109, 92)


def test_the_farthest_value_sets_the_scale_but_rounding_does_not():
    assert extent("advantage", [0.1, -3.0]) == 3.0
    assert extent("advantage", [1e-9]) == 1.0
    assert extent("ratio", [1.0, 0.5]) == pytest.approx(math.log(2))
    assert extent("ratio", [1.0]) == pytest.approx(math.log(1.2))
