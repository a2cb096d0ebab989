"""Another folder, another hash seed, a terminal or none, an experiment's folder: the same bytes."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.clone import ENVIRONMENT, run
from tests.pipeline.running import ALL, changed, duplicate, dvc, executed, lock_entries, lock_of

pytestmark = pytest.mark.slow

ON_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def on_a_terminal(folder, *command) -> str:
    done = subprocess.run(
        ["python", "-c", ON_A_TERMINAL, *command],
        cwd=folder,
        env=ENVIRONMENT | {"PYTHONHASHSEED": "12345", "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_d09_a_forced_run_writes_the_same_bytes_wherever_it_runs(first, tmp_path):
    reference, _ = first
    there, aside = (duplicate(reference, tmp_path / name) for name in ("there", "aside"))
    with ThreadPoolExecutor() as pool:
        terminal = pool.submit(on_a_terminal, there, "dvc", "repro", "--force")
        temporary = pool.submit(dvc, aside, "exp", "run", "--temp", "--force", "--name", "aside")
    assert executed(terminal.result()) == executed(temporary.result().stdout) == ALL
    assert "\x1b[" in terminal.result(), "no colour: that was no terminal"
    assert "\x1b[" not in temporary.result().stdout

    assert lock_of(there) == lock_of(reference)
    assert changed(there) == []
    shown = run(aside, "git", "for-each-ref", "--format=%(refname)", "refs/exps/**/aside").stdout
    lock = run(aside, "git", "show", f"{shown.strip()}:dvc.lock").stdout
    assert lock == lock_of(reference).decode()


# What a person or a machine may have set; none of it is a knob, so none may reach an output.
ELSEWHERE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TZ": "Pacific/Kiritimati",
    "LANG": "C",
    "LC_ALL": "C",
    "PYTHONHASHSEED": "7",
    "COLUMNS": "40",
    "USER": "someone",
    "LOGNAME": "someone",
}
FOLDERS = ("HF_HOME", "HOME", "TMPDIR", "XDG_CACHE_HOME")


def test_n27_variables_umask_and_folder_change_no_byte(first, tmp_path):
    """The first run had the variables of whoever runs the tests, and the usual umask."""
    reference, _ = first
    folder = duplicate(reference, tmp_path / "a folder of another name")
    places = {name: str(tmp_path / name.lower()) for name in FOLDERS}
    for place in places.values():
        Path(place).mkdir()
    done = subprocess.run(
        ["dvc", "repro", "--force"],
        cwd=folder,
        env=ENVIRONMENT | ELSEWHERE | places,
        umask=0o077,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0 and executed(done.stdout) == ALL, done.stdout[-4000:]
    before, after = lock_entries(reference), lock_entries(folder)
    differs = {
        out["path"]
        for stage, entry in after.items()
        for out, old in zip(entry["outs"], before[stage]["outs"], strict=True)
        if out != old
    }
    assert differs == set()
    assert lock_of(folder) == lock_of(reference)


def test_every_json_file_is_strict_and_the_lock_file_names_every_output(first):
    folder, _ = first

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    for path in [*folder.glob("data/figures/**/*.json"), *folder.glob("metrics/*.json")]:
        json.loads(path.read_text(), parse_constant=refuse)
    assert lock_entries(folder).keys() == ALL
