"""Device, precision and threads, in one place: every stage that runs a model starts here."""

import ctypes
import sys

import torch
from accelerate import Accelerator

from stages.core.errors import InputError


def accelerator(device: str, precision: str, threads: int) -> Accelerator:
    """(device, precision, threads) knobs -> an Accelerator; `InputError` if the device is absent.

    Also under a launcher of several processes: a stage does not share its rows among them yet.

    Float32 matrix products stay float32 (no TF32), so that log-probs of two passes agree.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(device, True):
        raise InputError(f"params.yaml: device: found {device!r}, but this machine has none")
    keep_freed_memory()
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    mixed = "bf16" if precision == "bf16" else "no"
    if device == "mps" and present["cuda"]:
        raise InputError("params.yaml: device: found 'mps' on a machine with CUDA")
    made = Accelerator(cpu=device == "cpu", mixed_precision=mixed)
    if made.num_processes > 1:
        raise InputError(
            f"found {made.num_processes} processes, expected one: run stages by `dvc repro`,"
            " without a launcher"
        )
    return made


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
