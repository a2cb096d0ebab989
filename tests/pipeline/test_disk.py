"""What a run takes on disk, through DVC: links, what can go, and what goes."""

import json
import re
import textwrap

import pytest

from tests.helpers.clone import commit, copy_of_working_tree, run
from tests.helpers.tiny import ROOT, small_params, write
from tests.pipeline.running import content, dvc, executed, lock_of

pytestmark = pytest.mark.slow


def size(folder, *names):
    return sum(p.stat().st_size for n in names for p in (folder / n).rglob("*") if p.is_file())


def unlinked(folder):
    """Outputs that are there twice: in the workspace and in the cache."""
    files = [p for name in ("data", "models") for p in (folder / name).rglob("*") if p.is_file()]
    outputs = [p for p in files if p.stat().st_size and p.name != "README.md"]
    assert len(outputs) > 60
    return [p for p in outputs if p.stat().st_nlink == 1 and not p.is_symlink()]


def test_what_a_run_writes_is_there_once(first):
    """By the settings of the repository; DVC copies what was in its cache before (tokenizers)."""
    folder, _ = first
    assert [p for p in unlinked(folder) if p.suffix in (".safetensors", ".parquet")] == []


def test_copies_are_linked_by_the_command_that_is_told(copy):
    assert len(unlinked(copy)) > 60 and "dvc checkout --relink" in told(copy)
    dvc(copy, "checkout", "--relink", "--quiet")
    assert unlinked(copy) == [] and "dvc checkout --relink" not in told(copy)


def told(folder) -> str:
    return run(folder, "python", "-m", "stages.disk").stdout


def test_moments_of_older_rounds_go_and_nothing_runs_again(copy):
    trainers = [copy / f"models/policy/{k}/trainer" for k in (1, 2)]
    moments = (trainers[0] / "policy.safetensors").stat().st_size
    kept = content(trainers[1]), content(copy / "models/policy/1/model.safetensors")
    assert "python -m stages.drop_moments --keep 1" in told(copy)
    said = run(copy, "python", "-m", "stages.drop_moments", "--keep", "1").stdout
    assert re.search(r"models/policy/1: .* of moments dropped", said)
    assert [p.name for p in trainers[0].iterdir()] == ["state.json"]
    assert (content(trainers[1]), content(copy / "models/policy/1/model.safetensors")) == kept
    assert "up to date" in dvc(copy, "status").stdout
    assert executed(dvc(copy, "repro").stdout) == set()
    commit(copy, "moments of round 1 dropped")
    assert "drop_moments" not in told(copy)
    again = run(copy, "python", "-m", "stages.drop_moments", "--keep", "1").stdout
    assert "nothing to drop" in again

    before = size(copy, ".dvc/cache/files")
    dvc(copy, "gc", "--workspace", "--force")
    assert before - size(copy, ".dvc/cache/files") > moments
    assert "of nothing here" not in told(copy)
    output = dvc(copy, "exp", "run", "-S", "+rounds.3=models/policy/1").stdout
    assert executed(output) == {"rollout@3", "score@3", "optimize@3", "evaluate@3", "report"}
    assert "models/policy/1: no moments were kept; this round starts with fresh ones" in output
    state = json.loads((copy / "models/policy/3/trainer/state.json").read_text())
    assert state["rounds"] == [1, 3]


def test_round_by_round_a_small_disk_holds_one_rounds_moments(first, tmp_path):
    """The loop of docs/disk.md ends at the models of an undisturbed run."""
    page = (ROOT / "docs/disk.md").read_text(encoding="utf-8")
    loop = textwrap.dedent(page[page.index("    for k in") : page.index("## What does DVC keep?")])
    (tmp_path / "small").mkdir()
    folder = copy_of_working_tree(tmp_path / "small")
    write(folder / "params.yaml", small_params())
    commit(folder, "tiny params")
    run(folder, "bash", "-ec", loop.replace("1 2 3 4 5 6", "1 2"))
    kept = content(folder / "models"), content(first[0] / "models")
    less = "policy/1/trainer/policy.safetensors", "policy/1/trainer/state.json"
    ours, theirs = ({n: b for n, b in files.items() if n not in less} for files in kept)
    assert ours == theirs and less[0] not in kept[0]
    moments = content(first[0] / "models/policy/1/trainer")["policy.safetensors"]
    cached = [p for p in (folder / ".dvc/cache/files").rglob("*") if p.is_file()]
    assert moments not in [p.read_bytes() for p in cached]
    assert "up to date" in dvc(folder, "status").stdout


def test_moments_are_not_dropped_where_dvc_lock_would_take_in_more(copy):
    lock, models = lock_of(copy), content(copy / "models")
    table = copy / "data/rollouts/round-2.parquet"
    table.unlink()
    table.write_bytes(b"other")
    done = run(copy, "python", "-m", "stages.drop_moments", "--keep", "1", check=False)
    assert done.returncode == 1 and "expected all of them to be up to date" in done.stdout
    assert lock_of(copy) == lock and content(copy / "models") == models


def test_gc_keeps_the_last_commit_and_the_experiments_that_are_left(copy):
    for name, steps in (("kept", 2), ("gone", 3)):
        dvc(copy, "exp", "run", "--name", name, "-S", f"ppo_epochs={steps}",
            "-S", "allow_off_policy=true")  # fmt: skip
    run(copy, "git", "checkout", "--quiet", ".")
    dvc(copy, "checkout", "--quiet")
    full = size(copy, ".dvc/cache/files")
    dvc(copy, "exp", "remove", "gone")
    dvc(copy, "gc", "--workspace", "--rev", "HEAD", "--all-experiments", "--force")
    assert size(copy, ".dvc/cache/files") < full
    assert executed(dvc(copy, "repro").stdout) == set()
    dvc(copy, "exp", "apply", "kept")
    assert "up to date" in dvc(copy, "status").stdout
    assert (copy / "models/policy/2/model.safetensors").is_file()
