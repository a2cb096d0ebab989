"""Several gloo processes for a test, each of which runs the same function."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from stages.models.compute import accelerator


def together(count: int, work: Callable, *arguments) -> list:
    """What `work(*arguments)`, a function of a module, gives in each process, in their order."""
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_one, (count, free_port(), folder, work, arguments), count)
        files = [Path(folder) / f"{number}.pt" for number in range(count)]
        return [torch.load(file, weights_only=False) for file in files]


def _one(number: int, count: int, port: int, folder: str, work: Callable, arguments: tuple) -> None:
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    assert accelerator("cpu", "float32", 1).num_processes == count
    torch.save(work(*arguments), f"{folder}/{number}.pt")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def far_off(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Distance of two sets of named weights, relative to the length of the first."""
    assert left.keys() == right.keys()
    one, other = (torch.cat([w[k].flatten().double() for k in left]) for w in (left, right))
    return ((one - other).norm() / one.norm()).item()
