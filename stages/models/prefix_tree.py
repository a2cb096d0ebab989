"""Every token once: rows that open alike are a tree, and the tree is one row of a forward pass.

A segment is a run of tokens that follows its parent: what all prompts open with, a prompt, a
completion. Side by side the segments are one row of N tokens, without padding and without a cache,
so that a pass over the layers reads each weight once, and its backward pass adds to each gradient
once. A token attends to the segments above its own and to the tokens before it in its own.

The pass is the model's own. Only its attention function is another one, which transformers looks up
by name (`AttentionInterface`) in every layer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from os.path import commonprefix

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from stages.models.compute import attention_kernel

Ids = Sequence[int]
NAME = "prefix_tree"
# A segment's attention costs each layer so much arithmetic, in parameters times tokens: where
# padding and prompts read again cost less, plain passes are the faster ones (two CPU cores).
SEGMENT_COSTS = 3e6


@dataclass(frozen=True)
class Segment:
    """Tokens that follow those of `above`, the segments from the root down, by number."""

    ids: tuple[int, ...]
    above: tuple[int, ...] = ()


class Tree:
    """Segments in the order of the row, parents before children; `size` N is their tokens."""

    def __init__(self):
        self.segments: list[Segment] = []
        self.size = 0

    def add(self, ids: tuple[int, ...], above: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Append a segment; returns what its children stand under. No ids: no segment."""
        if not ids:
            return above
        self.segments.append(Segment(ids, above))
        self.size += len(ids)
        return (*above, len(self.segments) - 1)

    def before(self, segment: Segment) -> int:
        """How many tokens stand above a segment."""
        return sum(len(self.segments[number].ids) for number in segment.above)


def opening_of(prompts: Sequence[Ids]) -> Ids:
    """What all prompts open with, one token short of the shortest; empty for a single prompt."""
    shared = commonprefix([tuple(prompt) for prompt in prompts])
    return shared[: min(map(len, prompts)) - 1] if len(prompts) > 1 else ()


@dataclass(frozen=True)
class Planted:
    """The tree of B rows, and of each row the places, among its N tokens, of the states that act.

    The first is the prompt's last token. The states that have read the last token are among them
    where it is read.
    """

    tree: Tree
    places: list[list[int]]


def plant(prompts: Sequence[Ids], completions: Sequence[Ids], read_last: bool) -> Planted:
    """(B prompts, B completions) -> their tree; completions without their last token or with it.

    A prompt with a single completion is one segment with it.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(tuple(prompt), []).append(row)
    fed = [tuple(row) if read_last else tuple(row[:-1]) for row in completions]
    tree, places = Tree(), [[] for _ in fed]
    opening = opening_of(list(rows_of))
    root = tree.add(opening)
    for prompt, rows in rows_of.items():
        rest = prompt[len(opening) :]
        end = tree.size + len(rest) - 1
        alone = len(rows) == 1
        above = tree.add(rest + fed[rows[0]] if alone else rest, root)
        for row in rows:
            start = end + 1 if alone else tree.size
            if not alone:
                tree.add(fed[row], above)
            places[row] = [end, *range(start, start + len(fed[row]))]
    return Planted(tree, places)


@dataclass(frozen=True)
class Layout:
    """What the attention of every layer asks of a tree: lengths, and of each segment its mask.

    A mask (S, A+S) is added to the products of a segment of S tokens with the A above it and its
    own; None where none is above, so that is_causal says it all, and for a single token: it sees
    all.
    """

    lengths: list[int]
    above: list[tuple[int, ...]]
    masks: list[Tensor | None]


_layout: ContextVar[Layout] = ContextVar("layout")


def packable(backbone: nn.Module) -> bool:
    """Whether a backbone looks its attention up by name, and torch's own is what it is told to."""
    return backbone._supports_attention_backend and backbone.config._attn_implementation == "sdpa"


def tree_pays(backbone: nn.Module, tree: Tree, tokens: int) -> bool:
    """Whether a tree's pass is faster than passes over so many tokens, padding among them.

    On a CPU: a GPU has another optimum, and kernels of its own for rows without padding.
    """
    saved = (tokens - tree.size) * backbone.num_parameters()
    cost = SEGMENT_COSTS * len(tree.segments) * backbone.config.num_hidden_layers
    return saved > cost and backbone.device.type == "cpu" and packable(backbone)


def tree_hidden(backbone: nn.Module, tree: Tree) -> Tensor:
    """(tree of N tokens) -> hidden (N, D), in the order of its segments."""
    device = backbone.device
    ids, positions = [], []
    for segment in tree.segments:
        ids += segment.ids
        start = tree.before(segment)
        positions += range(start, start + len(segment.ids))
    with _attention_of(backbone, tree):
        output = backbone(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
        )
    return output.last_hidden_state[0]


@contextmanager
def _attention_of(backbone: nn.Module, tree: Tree) -> Iterator[None]:
    config, device = backbone.config, backbone.device
    on = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if on else backbone.dtype
    sizes = [(tree.before(segment), len(segment.ids)) for segment in tree.segments]
    masks = [_mask(*size, dtype, device) for size in sizes]
    lengths = [len(segment.ids) for segment in tree.segments]
    layout = Layout(lengths, [segment.above for segment in tree.segments], masks)
    token, before = _layout.set(layout), config._attn_implementation
    config._attn_implementation = NAME
    try:
        with attention_kernel(device, max(map(sum, sizes))):
            yield
    finally:
        config._attn_implementation = before
        _layout.reset(token)


def _mask(above: int, own: int, dtype: torch.dtype, device) -> Tensor | None:
    if not above or own == 1:
        return None
    causal = torch.full((own, own), -torch.inf, dtype=dtype, device=device).triu(1)
    return torch.cat([causal.new_zeros(own, above), causal], 1)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others,
) -> tuple[Tensor, None]:
    """Queries (1, H, N, d), keys and values (1, G, N, d) of a tree's row -> (1, N, H, d).

    Raises ValueError for what a layer would have its scores changed by, which is not done here.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise ValueError(f"attention with {name} is not that of a prefix tree")
    layout = _layout.get()
    # By split: its backward pass is one concatenation; that of slices adds up whole tensors.
    queries, keys, values = (x.split(layout.lengths, 2) for x in (query, key, value))
    found = []
    for number, (above, mask) in enumerate(zip(layout.above, layout.masks, strict=True)):
        seen = (*above, number)
        found.append(
            functional.scaled_dot_product_attention(
                queries[number],
                torch.cat([keys[i] for i in seen], 2) if above else keys[number],
                torch.cat([values[i] for i in seen], 2) if above else values[number],
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=not above and layout.lengths[number] > 1,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(found, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
