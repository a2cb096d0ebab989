"""Trackers see every row of a training, and change nothing."""

import os

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stages.base.environment import TRACK
from stages.base.errors import InputError
from stages.training import tracking as module
from stages.training.tracking import TRACKERS, chosen, tracking


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TRACK, raising=False)
    return tmp_path


def test_nothing_is_tracked_unless_the_environment_says_so(inside):
    with tracking("train_sft", {"seed": 1}, inside / "sft.csv") as log:
        log({"step": 1, "loss": 0.5})
    assert os.listdir(inside) == ["sft.csv"]


def test_tensorboard_gets_every_figure_of_every_step(inside, monkeypatch):
    monkeypatch.setenv(TRACK, "tensorboard")
    knobs = {"seed": 1, "sft": {"lr": 0.1, "name": None}}
    with tracking("optimize-1", knobs, inside / "curve.csv") as log:
        for step in (1, 2, 3):
            log({"step": step, "loss": 0.5 * step, "value_loss": None})
    (run,) = (inside / "runs").iterdir()
    assert run.name.startswith("optimize-1-")
    events = EventAccumulator(str(run / "rlhf-dvc")).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    drawn = (inside / "curve.csv").read_text()
    assert drawn == "step,loss,value_loss\n1,0.5,\n2,1.0,\n3,1.5,\n"


def test_names_are_separated_by_commas_or_blanks_and_counted_once(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setenv(TRACK, "wandb, mlflow wandb")
    assert chosen() == ("wandb", "mlflow")


def test_a_name_that_no_one_knows_stops_with_those_that_are_known(monkeypatch):
    monkeypatch.setenv(TRACK, "tensorbord")
    with pytest.raises(InputError, match=f"found 'tensorbord', expected .*{', '.join(TRACKERS)}"):
        chosen()


def test_a_tracker_that_is_not_installed_stops_with_how_to_install_it(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setenv(TRACK, "trackio")
    with pytest.raises(InputError, match="trackio is not installed: pip install trackio"):
        chosen()
