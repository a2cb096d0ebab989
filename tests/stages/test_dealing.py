"""Stages that only read models deal whole batches: any number of processes, the same bytes."""

import importlib
import shutil
import sys
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner

from stages.base import command
from stages.base.tables import ROLLOUTS, iterate_rows
from stages.models import processes
from stages.models.checkpoints import load_policy, save_model
from tests.helpers.models import byte_tokenizer, llama_scorer
from tests.helpers.stage import succeed
from tests.helpers.tiny import command_line, small_params, write
from tests.helpers.together import together
from tests.pipeline.running import content

KNOBS = {
    "prompts_per_step": 5,
    "rollout_batch_size": 4,  # two groups a batch: three batches
    "score_batch_size": 3,
    "evaluate__batch_size": 4,
    "overlong_buffer": 2,
    "verifier": "odd_rule:share",
    "critic": "reward_model",
}
RULE = """
def share(text, answer, entry):
    return float(len(text) % 2)
"""
STAGES = ("rollout@1", "score@1", "evaluate_sft", "score_pairs@dpo")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder with prompts, pairs, a policy and a reward model; half of its answers are right."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "data" / "source").mkdir(parents=True)
    (folder / "data" / "source" / "odd_rule.py").write_text(RULE)
    (folder / "models" / "source").mkdir(parents=True)
    for stage in ("prepare_task", "prepare_model", "tokenize_preferences", "split_preferences"):
        succeed(folder, stage, **KNOBS)
    shutil.copytree(folder / "models" / "base", folder / "models" / "sft")
    (folder / "models" / "rm").mkdir()
    size = load_policy(folder / "models" / "sft", "sdpa", "cpu").config.vocab_size
    tokenizer = byte_tokenizer()
    assert len(tokenizer) <= size
    save_model(folder / "models" / "rm", llama_scorer(vocabulary=size), tokenizer)
    return folder


def set_knobs(folder: Path, count: int, tries: int) -> None:
    knobs = {"branches": {"dpo": "models/sft"}, "processes": count, "dynamic_sampling": tries}
    write(folder / "params.yaml", small_params(**KNOBS | knobs))


def run_all(folder: Path) -> None:
    """The stages in their order, as one process of several or as the only one.

    Each waits for what all processes did of the one before, as DVC does.
    """
    command.stop_with_parent = lambda: None
    path = list(sys.path)
    forget_rule()
    for stage in STAGES:
        script, arguments = command_line(stage, {"1": "models/sft", "dpo": "models/sft"})
        words = [word for pair in arguments.items() for word in pair]
        main = getattr(importlib.import_module(f"stages.{script}"), script)
        with chdir(folder):
            result = CliRunner().invoke(main, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        processes.gathered(stage)
    sys.path[:] = path
    forget_rule()


def forget_rule() -> None:
    """Let the next import look again: the stages name its folder by a relative path, for which
    Python keeps a finder of the folder that an earlier test was in.
    """
    sys.modules.pop("odd_rule", None)
    sys.path_importer_cache.pop("data/source", None)


@pytest.fixture(scope="module", params=[0, 4], ids=["every group", "dynamic sampling"])
def one(request, project, tmp_path_factory) -> tuple[Path, int]:
    """What one process writes, with every group kept or those without spread replaced."""
    stop = command.stop_with_parent
    folder = tmp_path_factory.mktemp("one") / "folder"
    shutil.copytree(project, folder)
    set_knobs(folder, 1, request.param)
    run_all(folder)
    command.stop_with_parent = stop
    return folder, request.param


def same_bytes(project: Path, one: tuple[Path, int], count: int, tmp_path: Path) -> None:
    reference, tries = one
    folder = tmp_path / "folder"
    shutil.copytree(project, folder)
    set_knobs(folder, count, tries)
    together(count, run_all, folder)
    for name in ("rollouts", "buffers", "evaluations", "direct", "figures"):
        assert content(folder / "data" / name) == content(reference / "data" / name), name
    assert not list(folder.rglob("*.partial")) and not list(folder.glob(".scratch/*"))


def test_two_processes_write_the_bytes_of_one(project, one, tmp_path):
    same_bytes(project, one, 2, tmp_path)


@pytest.mark.slow
def test_three_processes_write_the_bytes_of_one(project, one, tmp_path):
    same_bytes(project, one, 3, tmp_path)


def test_the_tables_hold_several_batches_and_a_cut_off_one(one):
    """Otherwise nothing was dealt. With groups dropped the last batch holds one too many."""
    folder, tries = one
    rows = list(iterate_rows(folder / "data" / "rollouts" / "round-1.parquet", ROLLOUTS))
    groups = [row["group"] for row in rows]
    assert groups == [group for group in range(5) for _ in range(2)]
    assert bool(tries) == all(
        {row["reward_correctness"] for row in rows if row["group"] == group} == {0.0, 1.0}
        for group in range(5)
    )
