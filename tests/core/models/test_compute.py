"""Device, processes and memory that a stage starts with."""

import subprocess
import sys

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


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_is_taken_again_without_page_faults():
    faults_of = """
import resource, sys
import torch
from stages.core.models.compute import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    return [torch.ones(6_000_000) for _ in range(4)]
work()
before = faults()
for _ in range(10):
    work()
print(faults() - before)
"""
    kept, plain = (
        int(subprocess.check_output([sys.executable, "-c", faults_of, name]))
        for name in ("kept", "plain")
    )
    assert kept < plain / 10
