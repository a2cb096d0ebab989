"""Which missing outputs a stage asks DVC for; tests/pipeline/test_own_files.py asks DVC itself."""

import subprocess
from pathlib import Path

import pytest

from stages.base import clones
from stages.base.errors import InputError

PIPELINE = """
stages:
  a:
    outs: [data/figures/a.json, models/a]
  b:
    foreach: ${rounds}
    do:
      outs:
      - data/figures/b/${key}.json
      - data/tables/${key}.parquet
  c:
    foreach: ${branches}
    do:
      outs:
      - data/figures/c/${key}.json
  d:
    metrics: [{metrics: {cache: false}}]
"""
KNOBS = {"rounds": {"1": "models/a", "10": "models/a"}, "branches": {}}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Paths that `dvc pull` was asked for, in a folder where DVC runs a stage; DVC finds them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_STAGE", "any")
    (tmp_path / "dvc.yaml").write_text(PIPELINE)
    found = []

    def pull(command):
        assert command[1:5] == ["-m", "dvc", "pull", "--quiet"]
        found.extend(command[5:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(clones.subprocess, "run", pull)
    return found


def touch(*paths: str) -> None:
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_missing_outputs_of_all_rounds_below_the_folders_are_asked_for(asked):
    touch("data/figures/b/1.json")
    clones.bring_outputs(KNOBS, Path("data/figures"))
    assert asked == ["data/figures/a.json", "data/figures/b/10.json"]


def test_nothing_is_asked_for_where_all_is_there_or_a_person_runs_the_stage(asked, monkeypatch):
    monkeypatch.delenv("DVC_STAGE")
    clones.bring_outputs(KNOBS, Path("data/figures"))
    clones.bring_sources(Path("data"))
    monkeypatch.setenv("DVC_STAGE", "any")
    touch("data/tables/1.parquet", "data/tables/10.parquet")
    clones.bring_outputs(KNOBS, Path("data/tables"))
    assert asked == []


def test_what_dvc_files_stand_for_is_asked_for_at_any_depth(asked):
    touch("data/source/x", "data/source/deep/er/y.dvc")
    Path("data/source/x.dvc").write_text("outs:\n- md5: abc\n  path: x\n")
    Path("data/source/deep/er/y.dvc").write_text("outs:\n- md5: abc.dir\n  path: y\n")
    clones.bring_sources(Path("data/source"), Path("models/source"))
    assert asked == ["data/source/deep/er/y"]


def test_what_dvc_cannot_bring_is_an_input_error(asked, monkeypatch):
    def fail(command):
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(clones.subprocess, "run", fail)
    with pytest.raises(InputError, match="data/tables/1.parquet: missing, and DVC could not"):
        clones.bring_outputs(KNOBS, Path("data/tables"))
