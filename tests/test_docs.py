"""The pages for people hold what the code says."""

from pathlib import Path

from stages.base.params import all_knobs, keys
from stages.rl.objectives import OBJECTIVES
from tests.helpers.tiny import plain
from tools.knobs_page import page

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_of_knobs_is_that_of_the_code():
    assert (ROOT / "docs/knobs.md").read_text(encoding="utf-8") == page()


def test_the_readme_lists_every_objective():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in OBJECTIVES if f"| `{name}` |" not in readme] == []


def test_the_readme_counts_knobs_modules_and_stages_as_they_are():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    knobs = {key for section in all_knobs().values() for key in keys(section)}
    modules = list((ROOT / "stages").rglob("*.py"))
    assert f"each of the {len(knobs)} knobs and {len(modules)} modules in turn" in readme
    stages = plain(ROOT / "dvc.yaml")["stages"].values()
    rounds = len(plain(ROOT / "params.yaml")["rounds"])
    count = sum(rounds if "foreach" in stage else 1 for stage in stages)
    assert f"starting {count} stages" in readme
