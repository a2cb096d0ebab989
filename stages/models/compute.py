"""Device, precision and threads, in one place: every stage that runs a model starts here."""

import atexit
import ctypes
import math
import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor
from torch import distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from stages.base.environment import local_world_size, world_size
from stages.base.errors import BadKnob

SHORT = 160  # keys, from where on the fused kernel is the faster one


def accelerator(device: str, precision: str, threads: int) -> Accelerator:
    """(device, precision, threads) knobs -> an Accelerator; `InputError` if the device is absent.

    Where a launcher started several processes they meet here; each has its own GPU, or all run on
    the CPU. Float32 matrix products stay float32 (no TF32), so that log-probs of two passes agree.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(device, True):
        raise BadKnob("device", f"found {device!r}, but this machine has none")
    keep_freed_memory()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    mixed = "bf16" if precision == "bf16" else "no"
    if device == "mps" and present["cuda"]:
        raise BadKnob("device", "found 'mps' on a machine with CUDA")
    cpu = device == "cpu"
    if (world_size() or 1) > 1:
        cpu = meet(cpu or not present["cuda"], device)
    made = Accelerator(cpu=cpu, mixed_precision=mixed)
    torch.set_num_threads(threads)  # Accelerate sets them too, where several processes run
    return made


def meet(cpu: bool, device: str) -> bool:
    """Wait for the other processes; returns `cpu`. BadKnob where they cannot share the device."""
    if device == "mps":
        raise BadKnob("processes", f"found {world_size()}, but mps is one device; expected 1")
    here = local_world_size()
    if not cpu and here > (devices := torch.cuda.device_count()):
        raise BadKnob(
            "processes",
            f"found {here} on this machine, which has {devices} GPUs; expected at most one a GPU",
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo" if cpu else "cpu:gloo,cuda:nccl")
        atexit.register(dist.destroy_process_group)
    return cpu


def attention_kernel(device: torch.device, keys: int) -> AbstractContextManager:
    """What a forward pass, in which a token attends to so many keys, runs under.

    For rows this short torch's fused attention is slow on a CPU in bf16, backwards above all; plain
    matrix products take a third of its time (docs/performance.md).
    """
    slow = device.type == "cpu" and torch.is_autocast_enabled("cpu")
    if slow and torch.is_grad_enabled() and keys <= SHORT:
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many ids a model can read: its input embedding has so many rows."""
    return model.get_input_embeddings().weight.shape[0]


def all_finite(weight: Tensor) -> bool:
    """Whether no number of a tensor is NaN or infinite.

    Its extremes tell: a NaN among the numbers makes both NaN. `isfinite` makes a second tensor, and
    takes several times as long.
    """
    return not weight.numel() or all(map(math.isfinite, weight.detach().aminmax()))


def keep_freed_memory() -> None:
    """Let the C library keep freed blocks of up to 32 MiB for the next tensor.

    glibc hands such blocks back to the kernel, and every page taken anew costs a fault: a quarter
    of the time of rollout and score for a small model, at the same peak (docs/performance.md). Its
    numbers are from malloc.h. Other C libraries have no such setting.
    """
    trim_threshold, mmap_threshold = -1, -3
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, 1 << 30)
