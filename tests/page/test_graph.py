"""The picture of the pipeline is that of dvc.yaml, the tree of rounds that of the knob."""

from xml.etree import ElementTree

from stages.page.graph import ARROWS, PER_ROUND, STAGES, chains, parents, pipeline, tree
from tests.helpers.tiny import ROOT, plain

DOCUMENT = plain(ROOT / "dvc.yaml")["stages"]
BRANCHES = {
    "1": "models/sft",
    "2": "models/policy/1",
    "3": "models/policy/2",
    "4": "models/policy/1",
    "5": "models/policy/4",
    "6": "models/sft",
}


def test_every_stage_is_in_the_picture():
    assert set(STAGES) == set(DOCUMENT)
    assert set(PER_ROUND) == {name for name, stage in DOCUMENT.items() if "foreach" in stage}


def test_every_arrow_is_a_file_that_goes_from_stage_to_stage():
    bodies = {name: stage.get("do", stage) for name, stage in DOCUMENT.items()}

    def feeds(start, end):
        deps = bodies[end]["deps"]
        deps = [d.replace("${item}", "models/sft") for d in deps]  # what round 1 starts from
        outs = bodies[start]["outs"]
        return any(
            o == d or o.startswith(f"{d}/") or d.startswith(f"{o}/") for o in outs for d in deps
        )

    assert [pair for pair in ARROWS if not feeds(*pair)] == []


def test_rounds_are_chains_from_where_they_branch_off():
    parent = parents(BRANCHES)
    assert parent == {1: 0, 2: 1, 3: 2, 4: 1, 5: 4, 6: 0}
    assert chains(parent) == [[0, 1, 2, 3], [1, 4, 5], [0, 6]]
    assert chains({7: 0}) == [[0, 7]]


def test_the_pictures_show_every_stage_and_every_round_once():
    names = [text.text for text in ElementTree.fromstring(pipeline()).iter("text")]
    assert sorted(names) == sorted(
        ["next round"] + [f"{name}@k" if name in PER_ROUND else name for name in STAGES]
    )
    picture = tree(parents(BRANCHES), {k: f"<{k}>" for k in range(7)})
    root = ElementTree.fromstring(picture)
    names = [text.text for text in root.iter("text")]
    assert names == ["models/sft  <0>", *(f"round {k}  <{k}>" for k in range(1, 7))]
    places = {(box.get("x"), box.get("y")) for box in root.iter("rect")}
    assert len(places) == 7
