"""Charts against coordinates worked out by hand."""

import re
from xml.etree import ElementTree

import pytest

from stages.page.charts import MOST_POINTS, Line, histogram, line_chart, short, ticks


def polylines(chart):
    return [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in ElementTree.fromstring(chart).iter("polyline")
    ]


@pytest.mark.parametrize(
    ("values", "whole", "expected"),
    [
        ([0, 1], False, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ([3, 47], False, [0, 10, 20, 30, 40, 50]),
        ([1, 2], True, [1, 2]),
        ([0, 40], True, [0, 10, 20, 30, 40]),
        ([0], False, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ([-1, -1], False, [-1.6, -1.4, -1.2, -1, -0.8, -0.6, -0.4]),
    ],
)
def test_ticks_are_round_numbers_around_all_values(values, whole, expected):
    assert ticks(values, whole) == pytest.approx(expected)


@pytest.mark.parametrize("low", [-1e300, -3.7e-9, 0, 5, 123456.7])
@pytest.mark.parametrize("size", [1e-7, 0.3, 7, 1e6])
def test_ticks_are_few_and_enclose_all_values(low, size):
    found = ticks([low, low + size])
    assert 2 <= len(found) <= 9
    slack = 1e-8 * (found[-1] - found[0])
    assert found[0] <= low + slack and found[-1] >= low + size - slack
    assert found == sorted(set(found))


def test_a_line_runs_between_the_corners_of_its_axes():
    # 300 x 190 with 44 left, 12 right, 26 above, 32 below: x from 44 to 288, y from 158 up to 26.
    chart = line_chart([Line("a", [[(0, 0.0), (5, 1.0)]])], "step", "loss")
    assert polylines(chart) == [[(44.0, 158.0), (288.0, 26.0)]]


def test_undefined_values_are_left_out():
    nan = float("nan")
    chain = [(0, 0.0), (1, None), (2, nan), (None, 0.5), (5, 1.0)]
    assert len(polylines(line_chart([Line("a", [chain])], "x", "y"))[0]) == 2
    assert line_chart([Line("a", [[(1, None)]]), Line("b", [])], "x", "y") is None


def test_a_long_curve_becomes_means_of_equal_parts():
    chain = [(i, float(i % 2)) for i in range(2 * MOST_POINTS)]
    chart = line_chart([Line("a", [chain])], "x", "y", zero=True)
    points = polylines(chart)[0]
    assert len(points) == MOST_POINTS
    assert len({up for _, up in points}) == 1  # the mean of 0 and 1 everywhere


def test_names_and_values_of_points_are_escaped():
    line = Line('<b>"', [[(1, 2.0)]], dots=True, labels=[["</svg>"]])
    root = ElementTree.fromstring(line_chart([line], "<x>", "<y>"))
    assert root.find("circle/title").text == '<b>" </svg>: 2 at 1'
    assert {"<x>", "<y>", "</svg>"} <= {text.text for text in root.iter("text")}


def test_bars_stand_on_the_axis_and_are_as_high_as_their_counts():
    root = ElementTree.fromstring(histogram([-1.0, 0.0, 1.0], [1, 4], "gap", "pairs"))
    bars = list(root.iter("rect"))
    heights = [float(bar.get("height")) for bar in bars]
    assert heights == pytest.approx([33.0, 132.0])
    assert {float(b.get("y")) + float(b.get("height")) for b in bars} == {158.0}
    assert [bar.get("class") for bar in bars] == ["bar below", "bar"]
    assert histogram([0.0], [], "gap", "pairs") is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "–"), (float("nan"), "–"), (0.0, "0"), (3072, "3,072"), (0.54687, "0.547")]
    + [(1234.56, "1,235"), (-0.00744, "-0.00744"), (2.4e-8, "2.4e-08"), (float("inf"), "–")],
)
def test_numbers_are_short(value, expected):
    assert short(value) == expected


def test_a_chart_is_the_same_text_every_time():
    lines = [Line("a", [[(i, i / 3) for i in range(9)]], dots=True)]
    assert len({line_chart(lines, "x", "y") for _ in range(3)}) == 1
    assert not re.search(r"\d\.\d{3,}", line_chart(lines, "x", "y").partition("<circle")[0])
