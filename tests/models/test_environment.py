"""Nothing of how, where and under which variables a model was loaded stands in what is saved."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.helpers.models import llama, saved
from tests.helpers.tiny import ROOT

SAVE = """
    import os, sys, torch
    from pathlib import Path
    from stages.base.files import replacing
    from stages.base.tokenizers import load_tokenizer
    from stages.models.checkpoints import load_policy, new_scorer, save_model
    from stages.models.trainer_state import TrainerState, save_policy
    from stages.sources.published import load_foreign
    from stages.training.steps import adamw

    os.umask(int(sys.argv[1], 8))
    device = torch.device("cpu")
    with replacing(Path("base"), folder=True) as folder:
        save_model(folder, *load_foreign("source", None, False))
    policy, tokenizer = load_policy(Path("base"), "sdpa", device), load_tokenizer(Path("base"))
    with replacing(Path("sft"), folder=True) as folder:
        save_model(folder, policy, tokenizer)
    critic = new_scorer(Path("sft"), "sdpa", device, zero_head=True)
    pairs = {"policy": (adamw(policy, 1e-3, 0.0), policy)}
    save_policy(Path("1"), policy, load_tokenizer(Path("sft")), TrainerState(), pairs, critic)
"""
HERE = {"HF_HUB_OFFLINE": "0", "TZ": "UTC", "LANG": "C", "PYTHONHASHSEED": "1", "USER": "ann"}
THERE = {
    **{"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TZ": "Asia/Tokyo", "LANG": "tr_TR"},
    **{"PYTHONHASHSEED": "2", "USER": "bob", "LOGNAME": "bob"},
}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> list[Path]:
    """Two folders in which SAVE ran, each under its own variables and umask."""
    root = tmp_path_factory.mktemp("places")
    folders = [root / "a", root / "another place"]
    for folder, mask, variables in zip(folders, ("022", "077"), (HERE, THERE), strict=True):
        folder.mkdir()
        saved(folder / "source", llama(vocabulary=262))
        more = {"HF_HOME": str(folder / "cache"), "HOME": str(folder), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", dedent(SAVE), mask]
        environment = os.environ | more | variables
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=300)
    return folders


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Path below a folder and bytes of each file that SAVE wrote."""
    files = [path for name in ("base", "sft", "1") for path in (folder / name).rglob("*.*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


def test_n27_two_environments_write_the_same_bytes(places):
    first, second = map(bytes_of, places)
    assert "1/trainer/critic/model.safetensors" in first
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_what_a_base_model_consists_of_is_saved_again_byte_for_byte(places):
    files = bytes_of(places[0])
    for name in ("config", "generation_config", "tokenizer_config", "tokenizer"):
        assert files[f"base/{name}.json"] == files[f"sft/{name}.json"] == files[f"1/{name}.json"]


def test_weights_are_readable_to_whoever_may_read_their_config(places):
    for folder, mode in zip(places, (0o644, 0o600), strict=True):
        for name in ("base/config.json", "base/model.safetensors", "1/trainer/policy.safetensors"):
            assert (folder / name).stat().st_mode & 0o777 == mode
