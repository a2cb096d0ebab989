"""Weights laid out once for the products of a few rows: what decoding on a CPU spends its time on.

A product of N rows and a weight (out, in) reads the weight once. For a few rows BLAS spends longer
on rearranging it than on the product, at every token anew; oneDNN's layout is made once. The
products differ from `nn.Linear`'s in rounding alone. Where the processor has no bf16 arithmetic,
bf16 weights are multiplied in float32, and the product is rounded to bf16.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Numbers of a weight from where on packing it pays. Smaller ones stay in the processor's cache.
PACKING_PAYS = 100_000


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Within this block a model's linear layers on a CPU run on packed copies of their weights.

    The copies take the memory of these weights once more. Nothing inside may ask for gradients, and
    the weights must not change. Under autocast the products are of its type, as ever.
    """
    layers = [layer for layer in model.modules() if _pays(layer)] if _available() else []
    try:
        for layer in layers:
            layer.forward = _packed_forward(layer)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _pays(layer: nn.Module) -> bool:
    """Whether a layer is a plain linear one on a CPU, in float32 or bf16, and large enough."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    weight = layer.weight
    kinds = (torch.float32, torch.bfloat16)
    return weight.is_cpu and weight.dtype in kinds and weight.numel() >= PACKING_PAYS


@torch.no_grad()
def _packed_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """What takes the place of a layer's forward: (..., in) -> (..., out)."""
    kind = layer.weight.dtype
    if torch.is_autocast_enabled("cpu"):
        kind = torch.get_autocast_dtype("cpu")
    native = kind == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    inner = kind if native else torch.float32
    weight = layer.weight.to(kind).to(inner)
    weight = torch.ops.mkldnn._reorder_linear_weight(weight)
    bias = None if layer.bias is None else layer.bias.to(kind).to(inner)

    def forward(states: Tensor) -> Tensor:
        states = states.to(kind).to(inner)
        return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "").to(kind)

    return forward
