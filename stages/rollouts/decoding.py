"""Rows under way in a rollout: the state that predicts each row's next token.

Letters: U prompts, G samples of each, N = U * G rows under way, P prompt tokens, D hidden size. The
model's `Route` (models/forward.py) says what is cached and what is padded.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stages.models.compute import attention_kernel
from stages.models.forward import Ids, Route, advance, prefill, right_pad, route_of
from stages.rollouts.cache import preallocate


class CachedRows:
    """Rows whose keys, values and recurrent states are kept: a token costs one token's pass.

    Where no prompt was padded the model is told no mask: it would ask the device whether the mask
    hides anything, at every token, and fused attention on a GPU takes none.
    """

    def __init__(self, backbone: nn.Module, prompts: Sequence[Ids], group: int, route: Route):
        even = route == "shared" and len(set(map(len, prompts))) == 1
        self.backbone, self.padded = backbone, route != "unpadded" and not even
        read = prefill(backbone, prompts, route)
        if group > 1:
            rows = torch.arange(len(prompts) * group, device=backbone.device) // group
            read = read.select(rows)
        self.hidden, self.mask, self.cache = read.last, read.mask, read.cache  # (N, D), (N, P)
        self.positions = self.mask.sum(1, keepdim=True)  # (N, 1): that of the next token
        preallocate(self.cache)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone; the others have ended."""
        self.cache.reorder_cache(rows)
        self.mask, self.positions = self.mask[rows], self.positions[rows]

    def read(self, ids: Tensor) -> None:
        """(N,): the token that each row goes on with."""
        if self.padded:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], 1)  # (N, P + t)
        told = self.mask if self.padded else None
        hidden = advance(self.backbone, ids[:, None], told, self.positions, self.cache)
        self.positions = self.positions + 1
        self.hidden = hidden[:, -1]  # (N, D)


class WholeRows:
    """Rows that are read from their first token each time, for models without a cache to trust."""

    def __init__(self, backbone: nn.Module, prompts: Sequence[Ids], group: int):
        self.backbone = backbone
        self.rows = [list(prompt) for prompt in prompts for _ in range(group)]
        self._read_all()

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.rows = [self.rows[row] for row in rows.tolist()]

    def read(self, ids: Tensor) -> None:
        """(N,): the token that each row goes on with."""
        for row, token in zip(self.rows, ids.tolist(), strict=True):
            row.append(token)
        self._read_all()

    def _read_all(self) -> None:
        ids, lengths = right_pad(self.rows, self.backbone.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        with attention_kernel(mask.device, mask.shape[1]):
            output = self.backbone(input_ids=ids, attention_mask=mask.long(), use_cache=False)
        rows = torch.arange(len(ids), device=ids.device)
        self.hidden = output.last_hidden_state[rows, lengths - 1]  # (N, D)


def start_rows(backbone: nn.Module, prompts: Sequence[Ids], group: int) -> CachedRows | WholeRows:
    """(U prompts, G) -> N rows that have read their prompts, those of one prompt together."""
    route = route_of(backbone)
    if route == "uncached":
        return WholeRows(backbone, prompts, group)
    return CachedRows(backbone, prompts, group, route)


def side_by_side(backbone: nn.Module, prompts: Sequence[Ids]) -> list[list[int]]:
    """Which of the U prompts may be sampled from in one batch: all, or those of one length.

    Padding before a prompt would enter a recurrent state.
    """
    if route_of(backbone) != "unpadded":
        return [list(range(len(prompts)))]
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    return list(by_length.values())
