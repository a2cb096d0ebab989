"""The pages for people hold what the code says."""

from pathlib import Path

from stages.core.rl.objectives import OBJECTIVES
from tools.knobs_page import page

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_of_knobs_is_that_of_the_code():
    assert (ROOT / "docs/knobs.md").read_text(encoding="utf-8") == page()


def test_the_readme_lists_every_objective():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in OBJECTIVES if f"| `{name}` |" not in readme] == []
