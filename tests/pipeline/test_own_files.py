"""What a person brings and keeps by `dvc add`: no command of DVC loses it (faults N01, N07)."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.clone import ENVIRONMENT, commit, run
from tests.helpers.tiny import plain
from tests.pipeline.running import changed, content, duplicate, dvc, executed, set_params

pytestmark = pytest.mark.slow

ROWS = "".join(json.dumps({"prompt": f"say {c}", "completion": c}) + "\n" for c in "abcdefgh" * 3)
FILE, DEEP, FOLDER = "data/source/m.jsonl", "data/source/deep/er/n.jsonl", "data/source/folder"
MODEL, WEIGHTS = "models/source/mine", "models/source/deep/weights"
OWN = (FILE, DEEP, FOLDER, MODEL, WEIGHTS)


@pytest.fixture(scope="module")
def owned(first, tmp_path_factory):
    """A finished repository, its own files added, pushed and committed. Read only."""
    folder = duplicate(first[0], tmp_path_factory.mktemp("owned") / "repository")
    for name in (FILE, DEEP, f"{FOLDER}/part.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(ROWS)
    for name in (MODEL, WEIGHTS):
        shutil.copytree(folder / "models" / "base", folder / name)
    dvc(folder, "add", *OWN)
    dvc(folder, "remote", "add", "--default", "store", folder.parent / "store")
    dvc(folder, "commit", "--force")  # nothing read them: the outputs are what they would be
    commit(folder, "own files")
    dvc(folder, "push")
    return folder


def whole(folder: Path) -> dict:
    """Name of each of the own files and folders -> its content."""
    return {name: content(folder / name) for name in OWN}


def test_a_clone_pulls_what_was_added_and_pushed(owned, tmp_path):
    tracked = run(owned, "git", "ls-files", "data", "models").stdout.split()
    assert {f"{name}.dvc" for name in OWN} <= set(tracked)
    assert not [
        name for name in tracked if name in OWN or name.startswith((f"{FOLDER}/", f"{MODEL}/"))
    ]
    run(tmp_path, "git", "clone", "--quiet", owned, "clone")
    clone = tmp_path / "clone"
    assert set(whole(clone).values()) == {None}
    dvc(clone, "pull", "--recursive", "data/source", "models/source")
    assert whole(clone) == whole(owned)
    assert not (clone / "models" / "sft").exists()
    dvc(clone, "pull")
    assert "up to date" in dvc(clone, "status").stdout and changed(clone) == []


def test_checkout_and_gc_leave_them_and_bring_them_back(owned, tmp_path):
    copy = duplicate(owned, tmp_path / "copy")
    for command in (["checkout"], ["gc", "--workspace", "--force"], ["checkout", "--force"]):
        dvc(copy, *command)
        assert whole(copy) == whole(owned), command
    (copy / FILE).unlink()
    shutil.rmtree(copy / WEIGHTS)
    dvc(copy, "checkout")
    assert whole(copy) == whole(owned) and changed(copy) == []


def test_experiments_in_workspace_queue_and_a_folder_of_their_own_see_and_keep_them(
    owned, tmp_path
):
    copy = duplicate(owned, tmp_path / "copy")
    words = ["exp", "run", "tokenize_sft", "--name"]
    dvc(copy, *words, "queued", "--queue", "-S", f"sft.dataset={FOLDER}/part.jsonl")
    dvc(copy, *words, "apart", "--temp", "-S", f"sft.dataset={DEEP}")
    assert whole(copy) == whole(owned) and changed(copy) == []
    output = dvc(copy, *words, "here", "-S", f"sft.dataset={FILE}", "-S", f"model.source={MODEL}")
    assert executed(output.stdout) == {"prepare_task", "prepare_model", "tokenize_sft"}
    assert whole(copy) == whole(owned) and changed(copy) == [" M dvc.lock"]

    dvc(copy, "queue", "start")
    deadline = time.monotonic() + 300
    while "Success" not in (status := dvc(copy, "queue", "status").stdout):
        assert "Failed" not in status and time.monotonic() < deadline, status
        time.sleep(0.5)
    assert whole(copy) == whole(owned)
    figures = json.loads((copy / "data/figures/tokenize_sft.json").read_text())
    for name in ("apart", "queued"):
        dvc(copy, "exp", "apply", name)
        again = json.loads((copy / "data/figures/tokenize_sft.json").read_text())
        assert again["kept"] == figures["kept"] == len(ROWS.splitlines())
        assert plain(copy / "params.yaml")["sft"]["dataset"].startswith("data/source/")
    assert whole(copy) == whole(owned)


def test_a_file_that_is_not_committed_yet_survives_an_experiment(owned, tmp_path):
    copy = duplicate(owned, tmp_path / "copy")
    late, plainly = (copy / "data" / "source" / name for name in ("late.jsonl", "plain.jsonl"))
    for path in (late, plainly):
        path.write_text(ROWS)
    dvc(copy, "add", late)
    dvc(copy, "exp", "run", "-S", "sft.dataset=data/source/late.jsonl", "tokenize_sft")
    assert late.read_text() == plainly.read_text() == ROWS
    assert whole(copy) == whole(owned)


def test_n07_a_clone_changes_a_knob_and_fetches_what_that_needs(owned, tmp_path):
    """Also what the own files below data/source need: in a clone their folders are half empty."""
    run(tmp_path, "git", "clone", "--quiet", owned, "clone")
    clone = tmp_path / "clone"
    set_params(clone, ppo_epochs=2)
    output = dvc(clone, "repro", "--pull", "--allow-missing").stdout
    later = {f"{stage}@2" for stage in ("rollout", "score", "optimize", "evaluate")}
    sources = {"prepare_task", "prepare_model"}  # only they can ask DVC for the own files
    assert executed(output) == {"optimize@1", "evaluate@1", "report"} | later | sources
    assert whole(clone) == whole(owned)
    spared = ("data/sft.parquet", "data/preferences", "data/rollouts/round-1.parquet")
    assert not [name for name in spared if (clone / name).exists()]

    lock = (clone / "dvc.lock").read_bytes()
    dvc(clone, "pull")
    assert executed(dvc(clone, "repro").stdout) == set()
    assert (clone / "dvc.lock").read_bytes() == lock


def test_n07_a_clone_without_a_remote_says_what_is_missing(owned, tmp_path):
    run(tmp_path, "git", "clone", "--quiet", owned, "clone")
    clone = tmp_path / "clone"
    dvc(clone, "remote", "remove", "store")
    done = dvc(clone, "repro", "--allow-missing", check=False)
    assert done.returncode != 0 and executed(done.stdout) == {"prepare_task"}
    assert f"{DEEP}: missing, and DVC could not pull it" in done.stdout


def interrupted(folder: Path, stage: str) -> None:
    """`dvc repro`, and Ctrl-C once that stage runs."""
    process = subprocess.Popen(
        ["dvc", "repro"],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Where a shell runs these tests in the background, it has switched Ctrl-C off.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process.stdout:
        while f"Running stage '{stage}'" not in process.stdout.readline():
            assert process.poll() is None
        # DVC says so before the stage's process is there to hear it: once may be too early.
        for _ in range(120):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                time.sleep(0.5)
    assert process.wait(timeout=60) != 0


def test_after_a_run_that_failed_or_was_interrupted_git_adds_no_output(first, tmp_path):
    run(tmp_path, "git", "clone", "--quiet", first[0], "clone")
    clone = tmp_path / "clone"
    run(clone, "git", "rm", "--quiet", "dvc.lock")
    interrupted(clone, "tokenize_sft")
    assert (clone / "data" / "task").exists()
    script = clone / "stages" / "split_preferences.py"
    script.write_text("raise SystemExit('broken')\n")
    done = dvc(clone, "repro", check=False)
    assert done.returncode != 0 and (clone / "data" / "preferences" / "pairs.parquet").exists()
    run(clone, "git", "add", "--all")
    staged = run(clone, "git", "diff", "--cached", "--name-only").stdout.split()
    assert set(staged) <= {"dvc.lock", "stages/split_preferences.py"}
