"""Outputs are replaced whole: never written through, never half there, never lost to a failure."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest

from stages.base.errors import InputError
from stages.base.files import check_room, remove, replacing
from tests.helpers.tiny import ROOT


def partial(path):
    return path.with_name(f".{path.name}.partial")


def test_a_new_file_appears_whole_with_its_folders(tmp_path):
    path = tmp_path / "a" / "b" / "out.txt"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == path.parent and temporary.name.startswith(".")
        assert not path.exists()
    assert path.read_text() == "new"
    assert [p.name for p in path.parent.iterdir()] == ["out.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_failure_inside_leaves_the_old_file_and_no_temporary(tmp_path, error):
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_inside_leaves_the_old_folder_and_no_temporary(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "weights").write_text("old")
    with pytest.raises(ValueError), replacing(path, folder=True) as temporary:
        (temporary / "weights").write_text("half")
        raise ValueError
    assert (path / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_where_nothing_was_leaves_nothing(tmp_path):
    with pytest.raises(ValueError), replacing(tmp_path / "model", folder=True) as temporary:
        (temporary / "config.json").write_text("{}")
        raise ValueError
    assert not list(tmp_path.iterdir())


def test_a_block_that_writes_nothing_fails_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_text() == "old"


def test_a_folder_is_replaced_whole_nothing_of_the_old_one_stays(tmp_path):
    path = tmp_path / "model"
    (path / "trainer").mkdir(parents=True)
    (path / "trainer" / "old.safetensors").write_text("old")
    with replacing(path, folder=True) as temporary:
        assert not list(temporary.iterdir())
        (temporary / "config.json").write_text("{}")
    assert [p.name for p in path.rglob("*")] == ["config.json"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_read_only_old_file_is_replaced(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    path.chmod(0o444)
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_link_into_the_cache_is_replaced_and_its_target_stays_as_it_was(tmp_path, link):
    cached, path = tmp_path / "cached", tmp_path / "out.txt"
    cached.write_text("cached")
    cached.chmod(0o444)
    link(cached, path)
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert cached.read_text() == "cached"
    assert path.read_text() == "new" and not path.is_symlink()
    assert cached.stat().st_ino != path.stat().st_ino


def test_a_folder_of_hard_links_is_replaced_and_their_targets_stay(tmp_path):
    cached, path = tmp_path / "cached", tmp_path / "model"
    cached.write_text("cached")
    path.mkdir()
    os.link(cached, path / "weights")
    with replacing(path, folder=True) as temporary:
        (temporary / "weights").write_text("new")
    assert cached.read_text() == "cached"
    assert (path / "weights").read_text() == "new"


def test_a_link_to_a_folder_is_replaced_and_the_folder_behind_it_stays(tmp_path):
    cached, path = tmp_path / "cached", tmp_path / "model"
    cached.mkdir()
    (cached / "weights").write_text("cached")
    path.symlink_to(cached)
    with replacing(path, folder=True) as temporary:
        (temporary / "weights").write_text("new")
    assert (cached / "weights").read_text() == "cached"
    assert (path / "weights").read_text() == "new" and not path.is_symlink()


def test_a_dangling_link_is_replaced(tmp_path):
    path = tmp_path / "out.txt"
    path.symlink_to(tmp_path / "nowhere")
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new" and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("left", ["file", "folder", "link"])
def test_what_a_killed_run_left_is_cleared_and_never_mixed_in(tmp_path, folder, left):
    path, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    if left == "file":
        partial(path).write_text("half, and longer than what comes now")
    elif left == "folder":
        partial(path).mkdir()
        (partial(path) / "half").write_text("half")
    else:
        partial(path).symlink_to(elsewhere)
    with replacing(path, folder=folder) as temporary:
        (temporary / "new" if folder else temporary).write_text("new")
    found = [p.name for p in path.iterdir()] if folder else path.read_text()
    assert found == (["new"] if folder else "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "out"]
    assert (elsewhere / "kept").read_text() == "kept"


def test_what_a_killed_run_left_has_a_name_that_dvc_does_not_see():
    from dvc.ignore import DvcIgnoreFilter
    from dvc.repo import Repo

    with Repo(str(ROOT)) as repo:
        ignored: DvcIgnoreFilter = repo.dvcignore
        for name in (".1.json.partial", ".rounds.csv.partial"):
            assert ignored.is_ignored_file(str(ROOT / "data" / "figures" / name))
        assert ignored.is_ignored_dir(str(ROOT / "models" / "policy" / ".1.partial"))
        assert not ignored.is_ignored_file(str(ROOT / "data" / "figures" / "1.json"))


def test_removing_nothing_is_fine(tmp_path):
    remove(tmp_path / "nothing")


LIMITED = """
    import resource, sys
    from pathlib import Path
    from stages.base.files import replacing

    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
    path = Path(sys.argv[1])
    try:
        with replacing(path) as temporary, temporary.open("wb") as file:
            for _ in range(100):
                file.write(bytes(1000))
                file.flush()
    except OSError as error:
        assert error.filename == str(path), error
        print(error)
"""
MODEL = """
    import resource, sys
    from pathlib import Path
    from stages.sources import tiny
    from stages.models.checkpoints import save_model
    from stages.base.files import replacing

    tokenizer = tiny.byte_tokenizer(32)
    shape = [int(size) for size in sys.argv[2].split()]
    model = tiny.random_llama(tokenizer, *shape, 32, 0.02, 0.0)
    path = Path(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
    try:
        with replacing(path, folder=True) as folder:
            save_model(folder, model, tokenizer)
    except OSError as error:
        assert error.filename == str(path), error
        print(error)
"""


def run(code, *arguments, **options):
    command = [sys.executable, "-c", dedent(code), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def test_a_disk_that_takes_no_more_names_the_output_and_keeps_the_old_one(tmp_path):
    path = tmp_path / "out.bin"
    path.write_text("old")
    done = run(LIMITED, path)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout and str(path) in done.stdout
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "limit"), [("16 32 1 2", 8000), ("2 2 1 1", 5000)], ids=["weights", "tokenizer"]
)
def test_a_disk_that_takes_no_more_of_a_model_keeps_the_old_one(tmp_path, shape, limit):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("old")
    done = run(MODEL, path, shape, limit)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout and str(path) in done.stdout
    assert (path / "config.json").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_full_disk_keeps_the_old_output(tmp_path):
    script = f"""
        mount -t tmpfs -o size=64k tmpfs {tmp_path} || exit 77
        echo old > {tmp_path}/out.parquet
        {sys.executable} - <<'END'
    import sys
    from pathlib import Path
    from stages.base.tables import SFT, write_table
    import random

    path = Path("{tmp_path}/out.parquet")
    rows = (
        {{"input_ids": [random.randrange(2**31) for _ in range(500)], "labels": [1]}}
        for _ in range(3000)
    )
    try:
        write_table(path, SFT, rows, {{}})
    except OSError as error:
        assert error.errno == 28 and error.filename == str(path), error
        sys.exit(28)
    END
        code=$?
        cat {tmp_path}/out.parquet
        ls -A {tmp_path}
        exit $code
    """
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode in (1, 77) and "Operation not permitted" in done.stderr + done.stdout:
        pytest.skip("mounting a small file system needs root")
    assert done.returncode == 28, done.stderr
    assert done.stdout.split() == ["old", "out.parquet"]


WRITERS = {
    "table": "write_table(path, SFT, [{'input_ids': [1], 'labels': [1]}], {})",
    "figures": "write_json(path, {'a': 1})",
    "folder": "with replacing(path, folder=True) as made: (made / 'config.json').write_text('{}')",
    "curve": "with growing_curve(path) as add: add({'step': 1})",
}
SCRIPT = """
import sys
from pathlib import Path
from stages.base.files import replacing
from stages.base.metrics import growing_curve, write_json
from stages.base.tables import SFT, write_table
path = Path(sys.argv[1])
try:
    {}
except OSError as error:
    print(error.filename, error.strerror)
"""


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may write all")
@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("old", [False, True])
def test_a_folder_that_may_not_be_written_to_ends_in_the_output_s_name(tmp_path, kind, old):
    path = tmp_path / "out" / "result"
    (path if kind == "folder" and old else path.parent).mkdir(parents=True)
    if old:
        (path / "config.json" if kind == "folder" else path).write_text("old")
    for folder in {path.parent, path if path.is_dir() else path.parent}:
        folder.chmod(0o555)
    plain_user = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    command = [sys.executable, "-c", SCRIPT.format(WRITERS[kind]), str(path)]
    command = [*plain_user, *command] if os.geteuid() == 0 else command
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    for folder in (path.parent, path):
        if folder.is_dir():
            folder.chmod(0o755)
    assert (done.stdout.strip(), done.stderr) == (f"{path} Permission denied", "")
    assert [p.name for p in path.parent.iterdir()] == (["result"] if old else [])


def test_a_file_that_may_not_be_read_keeps_its_own_name(tmp_path):
    secret = tmp_path / "in" / "rows.jsonl"
    secret.parent.mkdir()
    secret.touch()
    with pytest.raises(PermissionError) as caught, replacing(tmp_path / "out" / "table"):
        raise PermissionError(errno.EACCES, "Permission denied", str(secret))
    assert caught.value.filename == str(secret)


def test_a_disk_with_too_little_room_is_told_with_both_figures(tmp_path, monkeypatch):
    path = tmp_path / "models" / "policy" / "1"
    free = shutil.disk_usage(tmp_path).free
    check_room(path, free // 2)
    with pytest.raises(InputError) as caught:
        check_room(path, 2 * free)
    assert str(caught.value).startswith(f"{path}: about {2 * free / 1e9:,.3f} GB will be written")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1500000))
    check_room(path, 1500000)
    with pytest.raises(InputError, match="0.002 GB will be written, but 0.002 GB are free"):
        check_room(path, 1500001)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError):
        check_room(Path("models/rm"), 1500001)
