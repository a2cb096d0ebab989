"""A temporary copy of the working tree (committed and not) as a Git repository of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.tiny import ROOT

ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    "OMP_NUM_THREADS": "1",
    "DVC_NO_ANALYTICS": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "PYTHONPATH": "",
}


def run(folder: Path, *command, check: bool = True, **options) -> subprocess.CompletedProcess:
    """Run a command in a folder, with the tests' own python and dvc first on the path."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    if check and done.returncode:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done


def copy_of_working_tree(folder: Path) -> Path:
    """All files that Git tracks or would track, but nothing that a run wrote; committed."""
    listed = run(ROOT, "git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for name in filter(None, listed.stdout.split("\0")):
        made_by_a_run = name == "dvc.lock" or name.startswith(("metrics/", "plots/"))
        if not made_by_a_run and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    run(folder, "git", "init", "--quiet", "--initial-branch", "main")
    run(folder, "git", "config", "user.name", "Test")
    run(folder, "git", "config", "user.email", "test@example.org")
    commit(folder, "the working tree")
    return folder


def commit(folder: Path, message: str) -> None:
    run(folder, "git", "add", "--all")
    run(folder, "git", "commit", "--quiet", "--allow-empty", "--message", message)
