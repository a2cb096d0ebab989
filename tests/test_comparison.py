"""The rows of docs/comparison.json are settings that the pipeline takes."""

import json
import shutil

import pytest
from dvc.utils.hydra import apply_overrides

from stages.base import params
from stages.knobs.optimize import Knobs
from stages.knobs.report import Knobs as Report
from stages.knobs.train_direct import Knobs as Direct
from tests.helpers.tiny import ROOT
from tools.docs_numbers import ran

ROWS = {row["name"]: row for row in json.loads((ROOT / "docs/comparison.json").read_text())["rows"]}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_can_be_run(name, tmp_path):
    row, path = ROWS[name], tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    apply_overrides(path, [f"{key}={value}" for key, value in row["settings"].items()])
    made = {f"models/policy/{key}" for key in params.load(Report, path).rounds}
    made |= {f"models/direct/{key}" for key in params.load(Report, path).branches}
    assert row["policy"] in made
    assert (row["name"] == "grpo") == (not row["settings"])
    names = {"raft_right": "raft"} | {name: name for name in ("ppo", "raft", "online_dpo")}
    assert params.load(Knobs, path).loss == names.get(name, "grpo")
    losses = {"sft_chosen": "sft", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo"}
    assert params.load(Direct, path).direct.loss == losses.get(name, "dpo")


def test_what_ran_is_counted_by_stage_and_what_was_kept_by_number():
    found = {"ran": ["optimize@1", "optimize@2", "rollout@2"], "stages": 10}
    assert ran(found) == "optimize x 2, rollout (kept: 7)"
    assert ran({}) == "" and ran(found | {"stages": 3}) == "all: the default run"
