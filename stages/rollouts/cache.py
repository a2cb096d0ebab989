"""Keys and values that grow by a token without being copied each time."""

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class GrowingBuffer:
    """A tensor (N, H, L, D) at the front of a longer one, so that more can be written behind it."""

    def __init__(self):
        self.whole: Tensor | None = None

    def grown(self, held: Tensor, more: Tensor) -> Tensor:
        """(N, H, L, D), (N, H, S, D) -> (N, H, L+S, D), a view.

        `held` is copied if it is not what the last call returned, or where no space is left.
        """
        before, after = held.shape[-2], held.shape[-2] + more.shape[-2]
        whole = self.whole
        if whole is None or held.data_ptr() != whole.data_ptr() or whole.shape[-2] < after:
            shape = (*held.shape[:-2], after + after // 4, held.shape[-1])
            self.whole = whole = held.new_empty(shape)
            whole[..., :before, :] = held
        whole[..., before:after, :] = more
        return whole[..., :after, :]


class GrowingLayer(DynamicLayer):
    """A layer of the cache whose keys and values have free space behind them.

    `DynamicLayer` copies all that it holds for each token: a quarter of a small model's rollout.
    Under autocast both are held in its type. Rotated keys come in float32, and attention would cast
    all of them at every token anew, to the same numbers.
    """

    def __init__(self, layer: DynamicLayer):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        device = layer.keys.device.type
        on = torch.is_autocast_enabled(device)
        self.kind = torch.get_autocast_dtype(device) if on else layer.keys.dtype
        self.keys, self.values = layer.keys.to(self.kind), layer.values.to(self.kind)
        self.buffers = (GrowingBuffer(), GrowingBuffer())

    def update(self, key_states: Tensor, value_states: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        self.keys = self.buffers[0].grown(self.keys, key_states.to(self.kind))
        self.values = self.buffers[1].grown(self.values, value_states.to(self.kind))
        return self.keys, self.values


def preallocate(cache: DynamicCache) -> None:
    """Give every plain layer of a filled cache space to grow; layers of other kinds stay."""
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.get_seq_length():
            cache.layers[place] = GrowingLayer(layer)
