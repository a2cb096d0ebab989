"""Device, threads and processes that a stage starts with."""

from contextlib import ExitStack

import pytest
import torch

from stages.base.errors import InputError
from stages.models import compute
from stages.models.forward import completion_states
from tests.helpers.models import POLICIES


def test_the_device_and_the_threads_are_those_of_the_knobs():
    made = compute.accelerator("cpu", "float32", 1)
    assert (made.device.type, made.mixed_precision, torch.get_num_threads()) == ("cpu", "no", 1)


def test_a_device_that_is_absent_is_named():
    absent = "mps" if not torch.backends.mps.is_available() else "cuda"
    with pytest.raises(InputError, match=f"device: found '{absent}'"):
        compute.accelerator(absent, "float32", 1)


def test_processes_that_cannot_share_a_device_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(InputError, match="processes: found 3, but mps is one device"):
        compute.meet(True, "mps")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="found 3 on this machine, which has 2 GPUs"):
        compute.meet(False, "cuda")


def fused_attention_runs(keys: int) -> bool:
    with compute.attention_kernel(torch.device("cpu"), keys):
        return torch.backends.cuda.flash_sdp_enabled()


def test_plain_attention_runs_for_short_rows_of_a_bf16_backward_pass_alone():
    short, long = compute.SHORT, compute.SHORT + 1
    with torch.autocast("cpu", torch.bfloat16):
        assert not fused_attention_runs(short) and fused_attention_runs(long)
        with torch.no_grad():
            assert fused_attention_runs(short)
    assert fused_attention_runs(short)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_either_attention_gives_the_gradients_of_float32_but_for_bf16s_rounding(make, monkeypatch):
    model = make()
    prompts, completions = [[1, 2, 3], [1, 2, 3], [4, 5]], [[7, 8], [9], [10, 11, 12]]

    def gradient(*contexts) -> torch.Tensor:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            states = completion_states(model.base_model, prompts, completions)
            states.hidden[states.action_mask].float().square().sum().backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        return found

    exact = gradient()
    for short in (0, compute.SHORT):
        monkeypatch.setattr(compute, "SHORT", short)
        rounded = gradient(torch.autocast("cpu", torch.bfloat16))
        assert not torch.equal(rounded, exact)
        assert (rounded - exact).norm() < 0.03 * exact.norm()


def test_whether_all_numbers_are_finite():
    for values in ([0.0, -1.0, 3e38], [], [5.0]):
        assert compute.all_finite(torch.nn.Parameter(torch.tensor(values)))
    for odd in (torch.nan, torch.inf, -torch.inf):
        for place in range(3):
            assert not compute.all_finite(
                torch.tensor([1.0, 2.0, 3.0]).index_fill(0, torch.tensor(place), odd)
            )
