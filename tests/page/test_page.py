"""The report's page: well-formed, self-contained; what a model says stays text."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from stages.page.page import chains, definitions, in_order, page, spread, visible
from tests.helpers.runs import run_of
from tests.helpers.tiny import ROOT

CHAIN = {"1": "models/sft", "2": "models/policy/1", "3": "models/policy/2"}
BRANCHES = CHAIN | {"4": "models/policy/1", "5": "models/policy/4", "6": "models/sft"}
LONG = {"1": "models/sft"} | {str(k): f"models/policy/{k - 1}" for k in range(2, 41)}

HOSTILE = [
    "<script>alert(1)</script>",
    "</script></style></details>",
    "\" onmouseover='alert(1)' x=\"",
    "</bdi></td></table><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }} {% raw %} &lt;b&gt; &#60;",
    "<!-- ]]> -->",
    "line\nbreak\ttab\r\x00\x1b[31m\x7f\x85",
    "\u202eright to left\u2066 \u05e9\u05dc\u05d5\u05dd \ufeff\u2028",
    "\ud7ff\ufffe\U0001f600\U000e0041",
    "",
    " ",
    "x" * 200_000,
]


def parsed(text: str) -> list[ElementTree.Element]:
    """The elements of a page; what is not closed in order is an error."""
    return list(ElementTree.fromstring(text.strip().removeprefix("<!DOCTYPE html>")).iter())


def values(elements: list[ElementTree.Element], *names: str) -> set[str]:
    return {element.get(name) for element in elements for name in names} - {None}


@pytest.mark.parametrize(
    ("rounds", "known", "group"),
    [
        ({"1": "models/sft"}, True, 1),
        (CHAIN, True, 4),
        (CHAIN, False, 4),
        (BRANCHES, True, 65),
        (LONG, True, 3),
    ],
    ids=["one round", "a chain", "nothing measured", "branches", "forty rounds"],
)
def test_a_page_is_well_formed_and_needs_no_network(rounds, known, group):
    text = page(run_of(rounds, known=known, group=group))
    document = parsed(text)
    assert not {"script", "iframe", "img", "object", "embed"} & {e.tag for e in document}
    assert {v for v in values(document, "href", "src") if not v.startswith("#")} == {"data:,"}
    assert "url(" not in text and "@import" not in text
    assert "://" not in text
    links = {v[1:] for v in values(document, "href") if v.startswith("#")}
    assert links <= values(document, "id")
    assert len(text) < 1_000_000


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_model_says_is_text_and_nothing_else(text):
    whole = page(run_of(CHAIN, text))
    document, plain = parsed(whole), parsed(page(run_of(CHAIN)))
    assert [(e.tag, list(e.keys())) for e in document] == [(e.tag, list(e.keys())) for e in plain]
    shown = visible(text)
    assert [e.text for e in document].count(shown) >= 3 or not shown.strip()
    assert not [c for c in whole if ord(c) < 32 and c != "\n" and c != "\t"]
    assert len(whole) < len(page(run_of(CHAIN))) + 200_000


def test_characters_that_a_browser_hides_or_obeys_are_spelled_out():
    assert visible("a\x00b\x1b\r") == r"a\x00b\x1b\r"
    assert visible("\u202eabc\u200b") == r"\u202eabc\u200b"
    assert visible("two\nlines\tלום") == "two\nlines\tלום"
    assert visible("x" * 1600, 600) == "x" * 600 + " … (1,000 more characters)"
    assert visible(None) == ""


def test_the_same_run_gives_the_same_bytes():
    assert page(run_of(BRANCHES)) == page(run_of(BRANCHES))


def test_parameters_stand_in_order_of_their_numbers():
    pairs = [(f"rounds.{k}", None) for k in (1, 2, 9, 10, 40)]
    assert sorted(reversed(pairs), key=in_order) == pairs


def test_rounds_are_chains_from_where_they_branch_off():
    assert chains(BRANCHES) == [[0, 1, 2, 3], [1, 4, 5], [0, 6]]
    assert chains({"7": "models/sft"}) == [[0, 7]]


def test_the_headline_goes_from_the_sft_policy_to_the_last_round():
    text = " ".join("".join(parsed(page(run_of(CHAIN)))[0].itertext()).split())
    # accuracy_sampled is 0.16 + 0.1 a round in the made-up run, and rewards begin with round 1.
    assert "Accuracy, sampled 0.16 → 0.46 SFT → round 3, +0.3" in text
    assert "Reward 0.16 → 0.36 round 1 → 3, +0.2" in text
    assert "KL to reference 0.16 → 0.36 round 1 → 3" in text


@pytest.mark.parametrize(("after", "said"), [(-12.0, "fell by 11"), (-0.5, None), (-1.0, None)])
def test_a_chosen_answer_that_became_less_likely_is_said_in_words(after, said):
    """Its margin looks right all the same: the rejected answers fell further."""
    row = {name: 0.5 for name in ("accuracy_sampled", "accuracy_greedy", "pairs_kl_ref")}
    for name, before in (("chosen_log_prob", -1.0), ("rejected_log_prob", -2.0), ("accuracy", 0.0)):
        row |= {f"pairs_{name}_before": before, f"pairs_{name}": 1.0}
    row |= {"branch": "dpo", "start": "models/sft", "pairs_rejected_log_prob": -30.0}
    text = page(replace(run_of(CHAIN), branches=[row | {"pairs_chosen_log_prob": after}]))
    assert text.count("fell by") == (said is not None)
    assert said is None or said in text


def test_reward_models_stand_side_by_side_where_there_is_more_than_the_default_one():
    usual = {"name": "rm", "kind": "bradley_terry", "data": "data/preferences/train.parquet"}
    names = ("validation_accuracy", "validation_ties", "calibration_error", "outcome_accuracy")
    names += tuple(f"{of}_{what}" for of in ("outcome", "buffer") for what in ("auc", "ranking"))
    usual |= dict.fromkeys((*names, "outcome_best", "buffer_best")) | {"validation_accuracy": 0.875}
    further = usual | {"name": "o", "kind": "outcome", "data": "data/buffers/round-1.parquet"}
    further |= {"validation_accuracy": 0.625, "outcome_auc": 0.9375, "buffer_auc": 0.8125}
    assert 'id="rewards"' not in page(replace(run_of(CHAIN), reward_models=[usual]))
    text = page(replace(run_of(CHAIN), reward_models=[usual, further]))
    parsed(text)
    rows = re.findall(r"<tr>.*?</tr>", text.split('id="rewards"')[1].split("</table>")[0])
    assert "models/rm" in rows[1] and "0.875" in rows[1] and "bradley terry" in rows[1]
    assert "models/reward/o" in rows[2] and "0.625" in rows[2]
    assert "0.938" in rows[2] and "0.812" in rows[2]
    alone = page(replace(run_of(CHAIN), reward_models=[usual | {"kind": "outcome"}]))
    assert 'id="rewards"' in alone


def test_what_was_not_measured_has_no_chart_and_no_place_in_the_headline():
    run = run_of(CHAIN, known=False)
    text = page(run)
    for title in ("Entropy", "Value loss", "Reward against KL", "Clip share"):
        assert f">{title}</" not in text and f"{title}</" in page(run_of(CHAIN))
    assert "KL to sampler" in text and "KL to reference" not in text


def test_a_legend_names_only_what_was_measured():
    run = run_of(CHAIN)
    legend = '<i class="s2"></i>reward format'
    table = [{**row, "reward_format": None} for row in run.table]
    assert legend in page(run) and legend not in page(replace(run, table=table))
    assert '<i class="s3"></i>reward length' in page(replace(run, table=table))


def test_numbers_carry_their_meaning_from_the_page_of_figures():
    found = definitions("| figure | meaning |\n|---|---|\n| `a`, `b` | of `x` \\| y |\n| c | d |\n")
    assert found == {"a": "of x | y", "b": "of x | y"}
    text = page(run_of(CHAIN, text="what it means"))
    assert '<abbr title="what it means">Reward</abbr>' in text


def test_every_chart_and_every_tile_says_what_it_shows():
    meanings = definitions((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    text = page(replace(run_of(CHAIN), definitions=meanings))
    titles = re.findall(r"<h3>(.*?)</h3>", text)
    assert len(titles) > 20
    assert [title for title in titles if not title.strip().startswith("<abbr title=")] == []


def test_evenly_spaced_items_begin_with_the_first_and_end_with_the_last():
    assert spread([1, 2, 3], 8) == [1, 2, 3]
    assert spread(list(range(41)), 5) == [0, 10, 20, 30, 40]
