"""However DVC links outputs to its cache, a stage never writes into it; and who shares one."""

import hashlib
import importlib
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from stages.base import command
from tests.helpers.clone import ENVIRONMENT, commit, run
from tests.helpers.tiny import command_line
from tests.pipeline.running import (
    ALL,
    changed,
    dvc,
    executed,
    lock_entries,
    lock_of,
    restored,
    set_params,
)

pytestmark = pytest.mark.slow


def cached(folder: Path) -> list[Path]:
    """Every object of the cache, whose content is checked against its name, its MD5."""
    files = [p for p in (folder / ".dvc/cache/files/md5").rglob("*") if p.is_file()]
    for path in files:
        name = path.parent.name + path.name.removesuffix(".dir")
        assert hashlib.md5(path.read_bytes()).hexdigest() == name, path
    return files


@pytest.mark.parametrize("kind", ["copy", "hardlink", "symlink"])
def test_d08_stages_replace_links_into_the_cache_and_never_write_through(copy, kind, monkeypatch):
    """As root too, for whom the cache's files are not read-only."""
    dvc(copy, "config", "--local", "cache.type", kind)
    dvc(copy, "checkout", "--relink", "--quiet")
    tables = [copy / "data/sft.parquet", copy / "models/policy/2/model.safetensors"]
    for path in tables:
        linked = {"symlink": path.is_symlink(), "hardlink": path.stat().st_nlink > 1}
        assert linked.get(kind, not any(linked.values())), path
    before = cached(copy)

    monkeypatch.setattr(command, "stop_with_parent", lambda: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for stage in lock_entries(copy):
        script, options = command_line(stage)
        main = getattr(importlib.import_module(f"stages.{script}"), script)
        with chdir(copy):
            main.main([w for pair in options.items() for w in pair], standalone_mode=False)
    assert not any(path.is_symlink() or path.stat().st_nlink > 1 for path in tables)
    assert cached(copy) == before
    assert "up to date" in dvc(copy, "status").stdout

    lock = lock_of(copy)
    dvc(copy, "repro", "--force", "--single-item", "optimize@2")
    assert cached(copy) == before and lock_of(copy) == lock


@pytest.mark.parametrize(
    ("options", "words"), [("size=16k", "are free on its disk"), ("ro", "Read-only file system")]
)
def test_a_disk_that_cannot_be_written_is_told_and_the_next_run_has_everything(
    copy, options, words
):
    lock = lock_of(copy)
    script = f"""
        mount -t tmpfs -o {options} tmpfs models/policy || exit 77
        dvc repro --force --single-item optimize@1
    """
    done = run(copy, "unshare", "--map-root-user", "--mount", "bash", "-c", script, check=False)
    if done.returncode == 77 or "unshare" in done.stdout:
        pytest.skip("mounting a small file system is not permitted here")
    assert done.returncode != 0
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("Error: stage")]
    assert words in told and "models/policy/" in told
    assert lock_of(copy) == lock
    assert executed(dvc(copy, "repro").stdout) == set()
    assert lock_of(copy) == lock and changed(copy) == []


def test_of_two_runs_at_once_the_second_stops_and_the_first_is_unharmed(copy):
    again = ["repro", "--force", "--single-item", "train_sft"]
    lock = lock_of(copy)
    first = subprocess.Popen(
        ["dvc", *again], cwd=copy, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    with first.stdout:
        while "Running stage" not in first.stdout.readline():
            assert first.poll() is None
        second = dvc(copy, *again, check=False)
        first.stdout.read()
    assert second.returncode != 0 and not executed(second.stdout)
    assert "is busy, it is being blocked by" in second.stdout
    assert first.wait() == 0
    assert lock_of(copy) == lock and "up to date" in dvc(copy, "status").stdout


def test_a_clone_pulls_what_it_needs_from_a_remote_and_runs_nothing(copy, tmp_path):
    dvc(copy, "remote", "add", "--default", "store", tmp_path / "store")
    commit(copy, "a remote")
    dvc(copy, "push", "--quiet")
    for name in ("clone", "narrow"):
        run(tmp_path, "git", "clone", "--quiet", copy, name)

    clone = tmp_path / "clone"
    dvc(clone, "pull", "--quiet")
    output = dvc(clone, "repro").stdout
    assert executed(output) == restored(output) == set()
    assert changed(clone) == []

    narrow = tmp_path / "narrow"
    set_params(narrow, rewards__reward_model=0.2)
    output = dvc(narrow, "repro", "--pull", "--allow-missing", "score@1").stdout
    assert executed(output) == {"score@1"}
    # models/base too: a reward model of adapters would need it.
    fetched = ("data/rollouts/round-1.parquet", "models/sft", "models/rm", "models/base")
    spared = ("data/sft.parquet", "data/task", "models/policy", "data/evaluations")
    assert [name for name in fetched if not (narrow / name).exists()] == []
    assert [name for name in spared if (narrow / name).exists()] == []


def test_clones_with_one_cache_folder_run_nothing_twice(copy, tmp_path):
    shutil.move(copy / ".dvc" / "cache", tmp_path / "shared")
    dvc(copy, "cache", "dir", tmp_path / "shared")
    commit(copy, "one cache for all")
    run(tmp_path, "git", "clone", "--quiet", copy, "clone")
    clone = tmp_path / "clone"
    dvc(clone, "checkout", "--quiet")
    assert executed(dvc(clone, "repro").stdout) == set()

    before = lock_of(clone)
    (clone / "dvc.lock").unlink()
    output = dvc(clone, "repro").stdout
    assert executed(output) == {"report"} and restored(output) == ALL - {"report"}
    assert lock_of(clone) == before
