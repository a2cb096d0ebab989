"""What Git ignores, and what DVC makes of it: below an ignored folder it sees no .dvc file."""

import shutil
from pathlib import Path

import pytest
from dvc.scm import Git

from tests.benchmarks.idle import outputs
from tests.helpers.clone import run
from tests.helpers.tiny import ROOT, plain

STAGES = plain(ROOT / "dvc.yaml")["stages"]
ROUNDS = {"1": "models/sft", "12": "models/policy/1"}
OWN = [
    f"{place}/source/{name}"
    for place in ("data", "models")
    for name in ("x.dvc", ".gitignore", "deep/", "deep/er/", "deep/er/x.jsonl.dvc", ".gitkeep")
]


@pytest.fixture
def ignored(tmp_path):
    """Path -> whether Git ignores it, and whether DVC believes so; both must agree."""
    run(tmp_path, "git", "init", "--quiet")
    shutil.copy(ROOT / ".gitignore", tmp_path)
    scm = Git(str(tmp_path))

    def ask(path: str) -> bool:
        whole = tmp_path / path
        (whole if path.endswith("/") else whole.parent).mkdir(parents=True, exist_ok=True)
        by_git = run(tmp_path, "git", "check-ignore", "--quiet", path, check=False).returncode == 0
        assert scm.is_ignored(f"{whole}/" if path.endswith("/") else str(whole)) == by_git, path
        return by_git

    yield ask
    scm.close()


@pytest.mark.parametrize("path", ["data/", "models/", "data/source/", "models/source/", *OWN])
def test_n01_nothing_on_the_way_to_a_persons_own_files_is_ignored(path, ignored):
    assert not ignored(path)


@pytest.mark.parametrize("path", sorted({*outputs(STAGES, ROUNDS)} - {"metrics"}))
def test_every_output_and_what_it_is_written_to_first_is_ignored(path, ignored):
    assert ignored(path if Path(path).suffix else f"{path}/")
    half = Path(path).with_name(f".{Path(path).name}.partial")
    assert ignored(str(half)) or half.parent == Path(".")
