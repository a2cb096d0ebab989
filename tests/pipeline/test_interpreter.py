"""`.venv/bin/dvc` without the environment activated: another `python` comes first on the path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.clone import ENVIRONMENT
from tests.helpers.tiny import ROOT
from tests.pipeline.running import lock_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")


@pytest.fixture
def bare(tmp_path):
    """An environment in which another Python, without torch, comes first."""
    command = [sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"]
    subprocess.run(command, check=True)
    path = os.pathsep.join([str(tmp_path / "bare" / "bin"), "/usr/bin", "/bin"])
    return ENVIRONMENT | {"PATH": path}


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_a_stage_runs_under_the_python_that_runs_dvc(shell, copy, bare):
    dvc = Path(sys.executable).parent / "dvc"
    before = lock_of(copy)
    done = subprocess.run(
        [dvc, "repro", "--force", "--single-item", "split_preferences"],
        cwd=copy,
        env=bare | {"SHELL": shell},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train pairs" in done.stdout and lock_of(copy) == before


def test_a_python_without_torch_says_in_one_line_what_to_do(bare):
    stage = "python -m stages.split_preferences; exit $?"  # a shell of its own above, and another
    done = subprocess.run(
        ["/bin/sh", "-c", f"/bin/sh -c '{stage}'; exit $?"],
        cwd=ROOT,
        env=bare,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "bare/bin/python) has no torch" in line and "source .venv/bin/activate" in line
