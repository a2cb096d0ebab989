"""Device, threads and processes that a stage starts with."""

import pytest
import torch

from stages.core.errors import InputError
from stages.core.models import compute


def test_the_device_and_the_threads_are_those_of_the_knobs():
    made = compute.accelerator("cpu", "float32", 1)
    assert (made.device.type, made.mixed_precision, torch.get_num_threads()) == ("cpu", "no", 1)


def test_a_device_that_is_absent_is_named():
    absent = "mps" if not torch.backends.mps.is_available() else "cuda"
    with pytest.raises(InputError, match=f"device: found '{absent}'"):
        compute.accelerator(absent, "float32", 1)


def test_several_processes_are_refused(monkeypatch):
    class Launched:
        num_processes = 2

    monkeypatch.setattr(compute, "Accelerator", lambda **_: Launched)
    with pytest.raises(InputError, match="found 2 processes, expected one"):
        compute.accelerator("cpu", "float32", 1)
