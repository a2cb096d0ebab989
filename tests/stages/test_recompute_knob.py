"""The knob gradient_checkpointing in `optimize`; the trainings on rows are in test_resume.py."""

from pathlib import Path

import pytest
import torch

from stages import optimize
from stages.base import params
from stages.knobs.optimize import Knobs
from stages.models.checkpoints import save_model
from stages.models.recompute import recomputes
from tests.helpers.models import byte_tokenizer, llama
from tests.helpers.tiny import small_params, write


@pytest.mark.parametrize("asked", [False, True])
def test_optimize_recomputes_the_layers_of_policy_and_critic(tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    Path("base").mkdir()
    save_model(Path("base"), llama(vocabulary=len(tokenizer)), tokenizer)
    changes = {"loss": "ppo", "critic": "policy", "gradient_checkpointing": asked}
    write(tmp_path / "params.yaml", small_params(**changes))
    knobs = params.load(Knobs)
    learner, _ = optimize.load_learner(Path("base"), Path("none"), knobs, torch.device("cpu"))
    for model in (learner.policy, learner.critic):
        assert recomputes(model.base_model) is asked
