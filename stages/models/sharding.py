"""Models of which each process keeps its part alone: weights, gradients and moments (FSDP2).

Torch's `fully_shard` gathers the weights of a layer where it runs, forwards and backwards, and
drops them behind it; gradients are summed over the processes and parted as they come. A pass is
therefore one of all processes: each runs as many as the others, between `run` and its end.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.models import processes
from stages.models.recompute import PLAIN_ROWS

Result = TypeVar("Result")
PASS = "sharded_pass"  # a method of a sharded model, which FSDP2 takes for a forward pass


def start_device(device: torch.device, sharded: bool) -> torch.device:
    """Where a model is loaded: one that is to be sharded never stands whole on a GPU."""
    return torch.device("cpu") if sharded else device


def shard(model: PreTrainedModel, device: torch.device) -> None:
    """Leave this process its part of every weight, on `device`; optimizers are made afterwards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (processes.count(),))
    layers = [m for m in model.base_model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # sums: losses are divided by the whole step's count
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)  # an expert may have tokens in one process alone
    setattr(model, PASS, lambda work: work())
    register_fsdp_forward_method(model, PASS)
    setattr(model.base_model, PLAIN_ROWS, True)


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` was called."""
    return hasattr(model, PASS)


def run(model: nn.Module, work: Callable[[], Result]) -> Result:
    """`work()`, whose forward pass reads the weights of a model, be it sharded or not."""
    if not is_sharded(model):
        return work()
    with processes.together():
        return getattr(model, PASS)(work)


def idle_pass(model: PreTrainedModel) -> Tensor:
    """A loss of 0 by a pass of a sharded model, for a process without a row: the others wait."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with processes.together():
        return model(input_ids=ids, use_cache=False).logits.sum() * 0


def whole(tensor: Tensor) -> Tensor:
    """All processes' parts of a tensor, in each; one that has no parts as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def own_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor; one that has no parts as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def parted_as(value: Tensor, weight: Tensor) -> Tensor:
    """A copy of a whole tensor, known to every process, with a weight's device and parts."""
    if not hasattr(weight, "full_tensor"):
        return value.to(weight.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    place = (weight.device_mesh, weight.placements)
    return distribute_tensor(value.to(weight.device), *place, src_data_rank=None).clone()


@torch.no_grad()
def gather(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Make a sharded model, and AdamW's state, whole in the first process's memory, to be saved.

    All processes come here; in the others nothing is left of them. What is not sharded stays.
    """
    if not is_sharded(model):
        return
    found: dict[nn.Parameter, nn.Parameter] = {}

    def kept(tensor: Tensor) -> Tensor:
        value = whole(tensor.detach())
        return value.new_empty(0) if processes.number() else value.cpu()

    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight not in found:
                found[weight] = nn.Parameter(kept(weight), weight.requires_grad)
            if weight is not None:
                module._parameters[name] = found[weight]
        if type(module).__name__.startswith("FSDP"):
            module.__class__ = type(module).__bases__[1]  # (FSDPModule, its own class)
    delattr(model, PASS)
    if optimizer is not None:
        states = {weight: optimizer.state.pop(weight, None) for weight in found}
        for weight, state in states.items():
            if state is not None:
                entries = {entry: kept(value) for entry, value in state.items()}
                optimizer.state[found[weight]] = entries
