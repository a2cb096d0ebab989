"""Device, precision and threads, in one place: every stage that runs a model starts here."""

import torch
from accelerate import Accelerator

from stages.core.errors import InputError


def accelerator(device: str, precision: str, threads: int) -> Accelerator:
    """(device, precision, threads) knobs -> an Accelerator; `InputError` if the device is absent.

    Float32 matrix products stay float32 (no TF32), so that log-probs of two passes agree.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(device, True):
        raise InputError(f"params.yaml: device: found {device!r}, but this machine has none")
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    mixed = "bf16" if precision == "bf16" else "no"
    if device == "mps" and present["cuda"]:
        raise InputError("params.yaml: device: found 'mps' on a machine with CUDA")
    return Accelerator(cpu=device == "cpu", mixed_precision=mixed)
