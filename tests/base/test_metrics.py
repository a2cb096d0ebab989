"""Figures: strict JSON, undefined values as null; curves as CSV."""

import json
import math

import pytest

from stages.base.errors import InputError
from stages.base.metrics import Means, growing_curve, read_json, strict, write_json

NAN, INFINITY = math.nan, math.inf


def refuse(word):
    raise AssertionError(f"{word} is not JSON")


def test_undefined_figures_become_null_at_any_depth(tmp_path):
    path = tmp_path / "figures.json"
    write_json(path, {"a": NAN, "b": {"c": [1.5, INFINITY, {"d": -INFINITY}]}, "e": None, "f": 0})
    found = json.loads(path.read_text(), parse_constant=refuse)
    assert found == {"a": None, "b": {"c": [1.5, None, {"d": None}]}, "e": None, "f": 0}


def test_figures_come_back_as_they_were(tmp_path):
    path = tmp_path / "figures.json"
    figures = {"reason": "Zeile “é”\n<b>", "loss": 0.1 + 0.2, "tiny": 5e-324, "rows": 2**53 + 1}
    write_json(path, figures)
    assert read_json(path) == figures
    assert path.read_text().endswith("}\n")


def test_the_same_figures_are_the_same_bytes_in_the_order_given(tmp_path):
    for name in ("a", "b"):
        write_json(tmp_path / name, {"z": 1, "a": 2.0})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_text() == '{\n  "z": 1,\n  "a": 2.0\n}\n'


def test_a_number_as_key_becomes_text():
    assert strict({1: (2, 3)}) == {"1": [2, 3]}


def test_a_figure_that_is_no_json_is_an_error_and_the_old_file_stays(tmp_path):
    path = tmp_path / "figures.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.json: missing; expected a stage's figures"):
        read_json(tmp_path / "none.json")


@pytest.mark.parametrize("text", ["", "{", '{"a": 1', "a: 1", b"\xff\xfe"])
def test_a_foreign_file_is_named(tmp_path, text):
    path = tmp_path / "odd.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=r"odd\.json: not JSON"):
        read_json(path)


def test_a_curve_has_a_line_per_step_at_once_and_empty_cells_for_what_is_undefined(tmp_path):
    path = tmp_path / "curves" / "sft.csv"
    with growing_curve(path) as add:
        add({"step": 1, "loss": 0.5, "value_loss": None})
        assert path.read_bytes() == b"step,loss,value_loss\n1,0.5,\n"
        add({"step": 2, "loss": NAN, "value_loss": INFINITY})
    assert path.read_bytes() == b"step,loss,value_loss\n1,0.5,\n2,,\n"


def test_a_curve_is_never_written_through_a_link_into_the_cache(tmp_path):
    cached, path = tmp_path / "cached", tmp_path / "curve.csv"
    cached.write_text("old")
    path.hardlink_to(cached)
    with growing_curve(path) as add:
        add({"step": 1})
    assert (cached.read_text(), path.read_text()) == ("old", "step\n1\n")


def test_a_curve_of_a_stage_that_fails_is_no_output(tmp_path):
    path = tmp_path / "curve.csv"
    with pytest.raises(ValueError, match="surplus"), growing_curve(path) as add:
        add({"step": 1})
        add({"step": 2, "surplus": 3})
    assert list(tmp_path.iterdir()) == []


def test_running_means_leave_out_what_could_not_be_measured():
    means = Means()
    for score, right in ((0.5, True), (None, None), (1.5, False), (4.0, False)):
        means.add(score=score, right=right, never=None)
    assert means.of("score") == 2.0 and means.of("right") == pytest.approx(1 / 3)
    assert means.of("never") is None and means.of("unheard of") is None
    assert means.known() == {"score": 2.0, "right": pytest.approx(1 / 3)}
    assert means.counts == {"score": 3, "right": 3}
