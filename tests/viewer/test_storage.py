"""What outputs take, on a hand-made workspace and cache whose bytes can be counted."""

import hashlib
import json
import os

import pytest

from stages.base.errors import InputError
from stages.viewer.storage import Part, storage_of
from tests.helpers.tiny import write


def put(cache, content: bytes, suffix: str = "") -> tuple[str, object]:
    """An object of a cache: its name and its path."""
    md5 = hashlib.md5(content).hexdigest() + suffix
    path = cache / "files" / "md5" / md5[:2] / md5[2:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return md5, path


@pytest.fixture
def place(tmp_path):
    """One round by links of three kinds and copies, a model, and an object that nothing names."""
    root, cache = tmp_path / "here", tmp_path / "cache"
    contents = {
        "models/policy/2/model.safetensors": b"w" * 1000,
        "models/policy/2/tokenizer.json": b"t" * 10,
        "models/policy/2/trainer/policy.safetensors": b"m" * 2000,
        "models/policy/2/trainer/critic/model.safetensors": b"c" * 300,
        "models/sft/model.safetensors": b"s" * 1100,
        "models/sft/tokenizer.json": b"t" * 10,
        "data/buffers/round-2.parquet": b"b" * 70,
        "data/task/prompts.jsonl": b"p" * 5,
    }
    folders, lock = {}, []
    for path, content in contents.items():
        md5, cached = put(cache, content)
        here = root / path
        here.parent.mkdir(parents=True, exist_ok=True)
        if "trainer" in path:
            os.link(cached, here)
        elif path.endswith("tokenizer.json"):
            here.symlink_to(cached)
        else:
            here.write_bytes(content)
        parts = path.split("/")
        out = "/".join(parts[: 3 if parts[1] == "policy" else 2])
        if path.endswith(".parquet"):
            lock.append({"path": path, "md5": md5})
        else:
            relpath = path.removeprefix(f"{out}/")
            folders.setdefault(out, []).append({"md5": md5, "relpath": relpath})
    listings = 0
    for out, listed in folders.items():
        text = json.dumps(listed).encode()
        listings += len(text) * (out == "models/policy/2")
        lock.append({"path": out, "md5": put(cache, text, ".dir")[0]})
    (root / "metrics").mkdir()
    (root / "metrics/run.json").write_bytes(b"r" * 9)
    lock.append({"path": "metrics/run.json", "md5": "0" * 32})
    lock.append({"path": "data/source", "hash": "other"})
    write(root / "dvc.lock", {"stages": {"all": {"cmd": "x", "outs": lock}}})
    put(cache, b"o" * 12345)
    return root, cache, listings


def test_a_round_is_its_policy_and_its_tables(place):
    root, cache, listing = place
    found = storage_of(root, cache)
    assert list(found.parts) == ["models/sft", "round 2", "the rest of data"]
    # The tokenizer is one object, which models/sft names first; here: no link into the cache.
    assert found.parts["round 2"] == Part(
        weights=1310, moments=2000, tables=70, here=1070, cached=1000 + 2000 + 300 + 70 + listing
    )
    assert found.parts["models/sft"].weights == 1110 and found.parts["models/sft"].here == 1100
    assert found.parts["the rest of data"].here == 5 + 9
    assert found.unnamed == 12345
    assert found.copies == 1070 + 1100 + 5  # metrics are in Git, and not in the cache


def test_what_is_in_the_cache_counts_once(place):
    root, cache, _ = place
    found = storage_of(root, cache)
    size = sum(p.stat().st_size for p in cache.rglob("*") if p.is_file())
    assert sum(part.cached for part in found.parts.values()) + found.unnamed == size


def test_a_folder_without_dvc_lock_is_refused(tmp_path):
    with pytest.raises(InputError, match="dvc.lock: missing"):
        storage_of(tmp_path, tmp_path)
