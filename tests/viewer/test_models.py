"""Model folders without reading a weight."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.base.errors import InputError
from stages.viewer.models import describe, lineage, parameters


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "models" / "policy" / "2"
    (made / "trainer").mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 40}
    (made / "config.json").write_text(json.dumps(config))
    save_file({"a": np.zeros((40, 8), "f4"), "b": np.zeros(3, "f2")}, made / "model.safetensors")
    state = {"step": 24, "prompt_cursor": 8, "rounds": [1, 2]}
    (made / "trainer" / "state.json").write_text(json.dumps(state))
    return made


LOCK = """
stages:
  prepare_model:
    cmd: python -m stages.prepare_model --out models/base
    params: {params.yaml: {model.source: tiny}}
    outs: [{path: models/base}]
  train_sft:
    cmd: python -m stages.train_sft --base models/base --out models/sft
    outs: [{path: models/sft}]
  optimize@2:
    cmd: python -m stages.optimize --round 2 --policy
      models/sft --out models/policy/2
    outs: [{path: models/policy/2}, {path: data/updates/round-2.parquet}]
"""


def test_a_folder_is_described_by_its_headers(folder):
    assert parameters(folder) == {"F32": 320, "F16": 3}
    assert describe(folder) == {
        "architecture": "LlamaForCausalLM",
        "shape": "hidden_size 8",
        "parameters": "320 F32 + 3 F16",
        "vocabulary": "40",
        "trained": "rounds 1, 2; 24 optimizer steps; without a critic",
        "origin": "no dvc.lock above names this folder",
    }


def test_the_lock_file_tells_where_a_model_came_from(folder, tmp_path):
    (tmp_path / "dvc.lock").write_text(LOCK)
    assert lineage(folder) == ["models/policy/2", "models/sft", "models/base", "tiny"]
    assert lineage(tmp_path / "models" / "other") == []


def test_rounds_that_a_lock_file_names_as_each_others_start_end_the_story(folder, tmp_path):
    loop = LOCK.replace("--base models/base", "--base models/policy/2")
    (tmp_path / "dvc.lock").write_text(loop)
    assert lineage(folder) == ["models/policy/2", "models/sft", "models/policy/2"]


def test_broken_weights_are_named(folder):
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match="model.safetensors: not readable"):
        describe(folder)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", "{", r"config.json: not JSON .*; expected a model's configuration"),
        ("config.json", "[]", "config.json: holds a list; expected a model's configuration"),
        ("trainer/state.json", "", r"state.json: not JSON .*; expected what `optimize` keeps"),
    ],
)
def test_a_broken_description_is_named_with_what_it_should_hold(folder, file, content, said):
    (folder / file).write_text(content)
    with pytest.raises(InputError, match=said):
        describe(folder)
