"""The pages for people hold what the code, the files of figures and the commands say."""

import re
import shlex
from pathlib import Path

import pytest
from dvc.cli.parser import get_main_parser
from dvc.utils.hydra import apply_overrides

from stages.base import params
from stages.base.spelling import flat
from stages.direct.losses import LOSSES
from stages.rl.objectives import OBJECTIVES
from tests.helpers.tiny import ROOT, plain
from tools.docs_numbers import BLOCKS, PLACE, filled, pages
from tools.knobs_page import page

PAGES = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in pages(ROOT)}
README = PAGES[Path("README.md")]


def test_the_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert len(README.split()) <= 1200
    assert [line for line in lines if len(line) > 120] == []


def test_the_page_of_knobs_is_that_of_the_code():
    assert PAGES[Path("docs/knobs.md")] == page()


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_the_figures_of_a_page_are_those_of_the_files(path):
    assert filled(PAGES[path]) == PAGES[path], "run: python tools/docs_numbers.py --write"
    assert PAGES[path].count("<!-- numbers: ") == len(PLACE.findall(PAGES[path]))


def test_every_block_of_figures_is_shown_on_some_page():
    shown = {name for text in PAGES.values() for _, name, _ in PLACE.findall(text)}
    assert shown == set(BLOCKS)


@pytest.mark.parametrize(("page_of", "names"), [("objectives", OBJECTIVES), ("direct", LOSSES)])
def test_a_page_lists_every_name_of_its_registry(page_of, names):
    text = PAGES[Path(f"docs/{page_of}.md")]
    assert [name for name in names if f"| `{name}` |" not in text] == []


def links(text: str) -> list[str]:
    """Targets of the links of a page, those into the web left out."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [target for target in found if "://" not in target]


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_the_links_of_a_page_lead_somewhere(path):
    for target in links(PAGES[path]):
        file, _, anchor = target.partition("#")
        found = (ROOT / path).parent / file if file else ROOT / path
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text(encoding="utf-8")), target


def test_the_readme_links_every_page():
    linked = {Path(target.partition("#")[0]) for target in links(README)}
    assert [str(path) for path in PAGES if path.parent.name == "docs" and path not in linked] == []


def test_the_tree_of_the_readme_names_every_room():
    tree = README.split("## The tree")[1].split("\n## ")[0]
    rooms = {p.name for p in (ROOT / "stages").iterdir() if list(p.glob("*.py"))}
    assert {name for name in rooms if not re.search(rf"\b{name}/", tree)} == set()


def test_the_readme_names_every_stage():
    table = README.split("## The stages")[1].split("## The tree")[0]
    names = plain(ROOT / "dvc.yaml")["stages"]
    assert [name for name in names if not re.search(rf"`{name}(@\w)?`", table)] == []


def commands() -> list[str]:
    """The command lines of all pages: indented lines, comments and `&&` parted off."""
    lines = [line for text in PAGES.values() for line in re.findall(r"(?m)^    (\S.*)$", text)]
    parts = [part.strip() for line in lines for part in line.split(" && ")]
    return [part for part in parts if re.match(r"(RLHF_\w+=\S+ )?(dvc|make|python) ", part)]


DVC = [line[line.index("dvc ") :] for line in commands() if re.match(r"(RLHF_\w+=\S+ )?dvc", line)]


@pytest.mark.parametrize("line", DVC)
def test_dvc_knows_a_command_of_a_page(line):
    """The options too; what the shell would fill in stands for a preset."""
    words = shlex.split(line.replace("$(python tools/preset.py ", "-S seed=1 # "), comments=True)
    assert get_main_parser().parse_args(words[1:]).func


def settings(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    return [word for flag, word in zip(words, words[1:], strict=False) if flag == "-S"]


@pytest.mark.parametrize("line", [line for line in DVC if settings(line)])
def test_the_settings_of_a_command_make_valid_knobs(line, tmp_path):
    file = tmp_path / "params.yaml"
    file.write_bytes((ROOT / "params.yaml").read_bytes())
    before = flat(plain(file))
    words = [re.sub(r"^([\w.]*loss=\w+),.*", r"\1", word) for word in settings(line)]
    apply_overrides(file, words)
    assert flat(plain(file)) != before or words == ["loss=grpo"]
    params.load(params.all_knobs()["report"], file)


def test_make_and_python_know_the_commands_of_the_pages():
    targets = re.findall(r"(?m)^([\w]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for line in commands():
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert words[1] in targets, line
        elif words[0] == "python" and words[1] == "-m" and words[2].startswith("stages."):
            assert (ROOT / (words[2].replace(".", "/") + ".py")).is_file(), line
        elif words[0] == "python" and words[1].startswith("tools/"):
            assert (ROOT / words[1]).is_file(), line


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_the_files_that_a_page_names_in_its_repository_are_there(path):
    """`stages/...`, `tools/...`, `tests/...` in backticks."""
    named = re.findall(r"`((?:stages|tools|tests|presets|docs)/[\w/.-]*)`", PAGES[path])
    assert [name for name in named if not (ROOT / name).exists()] == []
