"""Layers that keep no activations: the backward pass computes each one anew from what it was given.

Memory falls to one layer's activations and one state a token and layer, for one more forward pass.
"""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.base.errors import BadKnob

MARK = "layers_are_recomputed"
PLAIN_ROWS = "takes_plain_rows"  # the mark of a backbone that must be given no cache to fill


def recompute_layers(model: PreTrainedModel) -> None:
    """Let every layer of a model's backbone be computed anew, in training or evaluation mode.

    transformers' own switch works in training mode alone, which `optimize` is not in, and there it
    drops the cache of a pass that was given one. BadKnob for a model without such layers.
    """
    backbone = model.base_model
    layers = [m for m in backbone.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        found = f"found true, but {type(model).__name__} has no layer that transformers checkpoints"
        raise BadKnob("gradient_checkpointing", found)
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    setattr(backbone, MARK, True)
    setattr(backbone, PLAIN_ROWS, True)


def recomputes(backbone: nn.Module) -> bool:
    """Whether `recompute_layers` was called."""
    return getattr(backbone, MARK, False)


def takes_plain_rows(backbone: nn.Module) -> bool:
    """Whether layers run more often than their pass, or are gathered for it: no cache, then."""
    return getattr(backbone, PLAIN_ROWS, False)
