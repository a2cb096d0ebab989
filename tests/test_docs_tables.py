"""The pages' snippets over the tables, each run as it stands; answers known from the rows."""

import re
import shlex
import shutil
from collections import defaultdict
from contextlib import chdir

import pandas as pd
import pytest
from click.testing import CliRunner
from datasets import Dataset

from stages.models.checkpoints import save_model
from stages.show import show
from stages.sources.tiny import byte_tokenizer, random_llama
from tests.helpers.handmade import COMPLETIONS, write_run
from tests.helpers.tiny import ROOT
from tools.docs_numbers import pages

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in pages(ROOT)}


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)


BLOCKS = blocks("tables")
TOOLS = ["duckdb", "pandas", "polars", "datasets"]


def plain(table) -> list[tuple]:
    """The rows of whatever a tool returns, in one order."""
    if isinstance(table, set | pd.Index):
        rows = [(value,) for value in table]
    elif isinstance(table, pd.Series):
        rows = table.items()
    elif isinstance(table, pd.DataFrame):
        rows = table.itertuples(index=False, name=None)
    elif isinstance(table, Dataset):
        rows = [(row["round"], row["completion"], row["ratio_max"]) for row in table]
    else:
        rows = table.fetchall() if hasattr(table, "fetchall") else table.rows()
    return sorted(map(tuple, rows))


def mean_advantage_by_length() -> list[tuple]:
    found = defaultdict(list)
    for *_, said, _, advantage, _ in COMPLETIONS:
        found[len(said) + 1].append(advantage)
    return sorted((length, sum(x) / len(x)) for length, x in found.items())


def test_there_is_a_snippet_for_each_tool():
    imported = re.compile(rf"(?:import|from) ({'|'.join(TOOLS)})\b")
    assert [imported.search(block)[1] for block in BLOCKS] == TOOLS


@pytest.mark.parametrize("block", BLOCKS, ids=TOOLS)
def test_a_snippet_answers_its_three_questions(block, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    found = {}
    with chdir(write_run(tmp_path)):
        exec(block, found)
        never, clipped, by_length = (plain(found[x]) for x in ("never", "clipped", "by_length"))
    assert never == [("<|im_start|>user\nxyz<|im_end|>",)]
    assert clipped == [(1, "b", 1.5), (2, "yz", 2.0)]
    assert by_length == [pytest.approx(row) for row in mean_advantage_by_length()]


def test_the_page_finds_what_got_worse_and_what_lies_behind_it(tmp_path):
    """Prompt 3 parts at its second token: z, with an advantage of 0.25 there, instead of a."""
    tokenizer = byte_tokenizer(64)
    z, a = (tokenizer(letter)["input_ids"][0] for letter in "za")
    for number in (1, 2):
        model = random_llama(tokenizer, 16, 32, 1, 2, 64, 0.1, 0.0)
        save_model(tmp_path / f"models/policy/{number}", model, tokenizer)
    found = {}
    with chdir(write_run(tmp_path)):
        exec("".join(blocks("worse")), found)
        worse, behind = found["worse"].fetchall(), found["behind"].fetchall()
    assert worse == [(3, "ba", "ba", "bz", 2, a, z, 0.0, 0.25)]
    assert behind == [(0, 0, "yz", "zyx", 0.0, None, 0.25)]
    for policy in ("models/policy/1", "models/policy/2"):
        assert found["likely"][policy].keys() == {"a", "z"}
        assert all(0 < chance < 1 for chance in found["likely"][policy].values())


# A round, group, sample and prompt that the tiny run lacks become some that it has.
OTHERS = {"--round": "1", "--group": "0", "--sample": "1", "--where": "prompt_index == 3"}


def commands() -> list[list[str]]:
    """The words after `python -m stages.show` of each such line of the pages."""
    lines = re.findall(
        r"^    python -m stages\.show (.*)$", "\n".join(PAGES.values()), re.MULTILINE
    )
    return [shlex.split(line, comments=True) for line in lines]


def fitted(words: list[str]) -> list[str]:
    """The words of a command with numbers that the tiny run has."""
    found = [words[0].replace("round-3", "round-1")]
    for option, word in zip(words, words[1:], strict=False):
        other = option in OTHERS and (option != "--where" or "prompt_index" in word)
        found.append(OTHERS[option] if other else word)
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_a_page_shows_something(words, tmp_path):
    words = fitted(words)
    with chdir(write_run(tmp_path)):
        if words[0].startswith("models/policy"):
            (tmp_path / "models/policy").mkdir(parents=True)
            shutil.copytree(tmp_path / "models/sft", tmp_path / words[0])
            (tmp_path / words[0] / "config.json").write_text("{}")
        result = CliRunner().invoke(show, words)
    assert result.exit_code == 0, result.output


def test_the_pages_hold_commands_of_the_viewer():
    assert len(commands()) >= 8
