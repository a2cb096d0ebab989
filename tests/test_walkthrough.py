"""docs/walkthrough.md says what the code does; run in a process of its own, as it sets threads."""

from tests.helpers.clone import run
from tests.helpers.tiny import ROOT

LAST = "tensor([[-0.6000, -0.8000]])"  # the gradient (3, 4), clipped


def test_every_example_of_the_walkthrough_prints_what_the_page_says(tmp_path):
    """One value is made wrong, so that a page without examples fails too: it alone is found."""
    text = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(text.replace(LAST, "tensor([[-3.0000, -4.0000]])"), encoding="utf-8")
    output = run(ROOT, "python", "-m", "doctest", page, check=False).stdout
    assert output.count("Failed example:") == 1, output
    assert f"Got:\n    {LAST}" in output
