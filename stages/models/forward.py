"""Hidden states of completions, with every distinct prompt computed once.

Letters: B completions, U distinct prompts, P prompt tokens, T completion tokens, D hidden size, V
vocabulary. Completions of one prompt share its keys and values, and prompts that open alike (system
turn, instruction) share that opening: the opening runs once, its cache is expanded to the U
prompts, theirs to the B completions. The result is that of B full rows to rounding, gradients too;
`full_states` is that plain version.

Which models take which way is their `Route`: `prepare_model` measures it and writes it into
config.json, from where every later folder inherits it.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache as remember
from operator import add
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from stages.models.compute import attention_kernel
from stages.models.prefix_tree import opening_of, plant, tree_hidden, tree_pays
from stages.models.recompute import recomputes, takes_plain_rows

Ids = Sequence[int]

# shared     openings and prompts run once; what follows reads their cache
# padded     plain rows; sampling reads whole prompts, padded on the left, into a cache
# unpadded   plain rows; sampling takes prompts of one length at a time, so that nothing is padded
# uncached   plain rows; sampling reads every row anew for each token
Route = Literal["shared", "padded", "unpadded", "uncached"]
ROUTE = "rlhf_route"  # the field of config.json

# Sharing prompts costs one more pass over the layers. Where it saves less arithmetic than this, in
# parameters times prompt tokens, the pass itself costs more (measured on two CPU cores).
SHARING_PAYS = 5e8


@dataclass(frozen=True)
class States:
    """`hidden (B, T+1, D)`: at [b, t] the state that has read the prompt and t completion tokens.

    It predicts token t, and `lengths[b]` is the number of tokens of row b: states [b, :lengths[b]]
    act, the state [b, lengths[b]] has read the whole row. `ids (B, T)` are right-padded with 0.
    With `read_last` False the states that have read the last column are not computed, and `hidden`
    is (B, T, D).
    """

    hidden: Tensor
    ids: Tensor
    lengths: Tensor

    @property
    def action_mask(self) -> Tensor:
        """(B, T) bool: True on tokens that the policy sampled."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]


def right_pad(rows: Sequence[Ids], device=None, fill: int = 0) -> tuple[Tensor, Tensor]:
    """(B lists) -> ids (B, T) padded with `fill` on the right, lengths (B,)."""
    lengths = torch.tensor([len(row) for row in rows], device=device)
    padded = [list(row) + [fill] * (max(map(len, rows)) - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.long, device=device), lengths


def left_pad(rows: Sequence[Ids], device=None) -> tuple[Tensor, Tensor]:
    """(U lists) -> ids (U, P) padded with 0 on the left, bool attention mask (U, P)."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + list(row) for row in rows]
    mask = [[False] * (width - len(row)) + [True] * len(row) for row in rows]
    return (
        torch.tensor(ids, dtype=torch.long, device=device).reshape(len(rows), width),
        torch.tensor(mask, dtype=torch.bool, device=device).reshape(len(rows), width),
    )


def route_of(backbone: nn.Module) -> Route:
    """What `prepare_model` found; for a model that it never saw, what is safe by its cache."""
    return getattr(backbone.config, ROUTE, None) or (
        "shared" if can_share(backbone) else "unpadded"
    )


def can_share(backbone: nn.Module) -> bool:
    """Whether positions are told, and every layer keeps plain keys and values.

    A sliding window or a recurrent state counts slots of the cache, padding among them.
    """
    layers = DynamicCache(config=backbone.config).layers
    plain = all(type(layer) is DynamicLayer for layer in layers)
    return plain and takes(type(backbone), "position_ids")


def find_backbone(model: PreTrainedModel) -> None:
    """Mend the name of a model's backbone where its class names a part that it does not have."""
    if model.base_model is model and isinstance(getattr(model, "model", None), nn.Module):
        model.base_model_prefix = "model"  # Llama 4's text model


@remember
def takes(kind: type[nn.Module], argument: str) -> bool:
    """Whether the forward pass of a class has an argument of that name."""
    return argument in inspect.signature(kind.forward).parameters


@dataclass
class Prefilled:
    """Prompts that were read: cache of U rows, attention mask (U, P), last states (U, D)."""

    cache: DynamicCache
    mask: Tensor
    last: Tensor

    def select(self, rows: Tensor) -> "Prefilled":
        """Rows (N,) of the U -> a prefill of N rows, e.g. each prompt once per completion."""
        # By index_select: its backward adds rows up; that of advanced indexing scatters single
        # numbers, 20 times slower.
        self.cache.reorder_cache(rows)
        return Prefilled(self.cache, self.mask[rows], self.last[rows])


def step(
    backbone: nn.Module, ids: Tensor, mask: Tensor, cache: DynamicCache, padded: bool = True
) -> Tensor:
    """(ids (N, S), mask (N, P+S) over cache and ids, cache of P) -> hidden (N, S, D).

    The cache grows by S. Position ids count the visible tokens, so that padding never shifts a row.
    Without padding no mask is told: Mamba would take one over the cache for one over the ids.
    """
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with attention_kernel(mask.device, mask.shape[1]):
        return advance(backbone, ids, mask if padded else None, positions, cache)


def advance(
    backbone: nn.Module, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache
) -> Tensor:
    """`step` with the positions (N, S) of the ids told; no mask: nothing is hidden."""
    told = {"position_ids": positions} if takes(type(backbone), "position_ids") else {}
    output = backbone(
        input_ids=ids,
        attention_mask=None if mask is None else mask.long(),
        cache=cache,
        use_cache=True,
        **told,
    )
    return output.last_hidden_state


def prefill(backbone: nn.Module, prompts: Sequence[Ids], route: Route = "shared") -> Prefilled:
    """(U non-empty prompts) -> `Prefilled`; by the shared route what they all open with runs once.

    Padding then stands behind the opening, inside the cached rows; by others before all of them.
    By the unpadded route the prompts are of one length.
    """
    if route == "shared":
        opened, cache = read_opening(backbone, prompts)
    else:
        cache = DynamicCache(config=backbone.config)
        opened = torch.ones(len(prompts), 0, dtype=torch.bool, device=backbone.device)
    ids, rest = left_pad([prompt[opened.shape[1] :] for prompt in prompts], backbone.device)
    mask = torch.cat([opened, rest], 1)  # (U, O + P - O)
    hidden = step(backbone, ids, mask, cache, route != "unpadded")
    return Prefilled(cache, mask, hidden[:, -1])


def read_opening(backbone: nn.Module, prompts: Sequence[Ids]) -> tuple[Tensor, DynamicCache]:
    """(N prompts) -> mask (N, O) and cache of what they all open with, which ran once.

    O is 0 where they open differently. Each prompt keeps at least its last token to itself.
    """
    device, cache = backbone.device, DynamicCache(config=backbone.config)
    opening = list(opening_of(prompts))
    if opening:
        mask = torch.ones(1, len(opening), dtype=torch.bool, device=device)
        step(backbone, torch.tensor([opening], device=device), mask, cache)
        cache.batch_repeat_interleave(len(prompts))
    return torch.ones(len(prompts), len(opening), dtype=torch.bool, device=device), cache


def completion_states(
    backbone: nn.Module,
    prompts: Sequence[Ids],
    completions: Sequence[Ids],
    read_last: bool = False,
) -> States:
    """(B prompts, B non-empty completions) -> `States`, by the model's route.

    Layers that are computed anew take plain rows: a second pass would fill the cache once more. So
    do sharded ones, whose weights are gathered once a pass.
    """
    if route_of(backbone) != "shared" or takes_plain_rows(backbone):
        return full_states(backbone, prompts, completions, read_last)
    distinct = list(dict.fromkeys(map(tuple, prompts)))
    opening = len(opening_of(distinct))
    saved = sum(map(len, prompts)) - sum(map(len, distinct))
    saved -= (len(prompts) - len(distinct)) * opening
    rests = [len(prompt) - opening for prompt in prompts]
    fed = [len(completion) - 1 + read_last for completion in completions]
    if saved * backbone.num_parameters() >= SHARING_PAYS:
        states_of = shared_states
        tokens = opening + len(distinct) * max(rests) + len(fed) * max(fed)
    else:
        states_of = joined_states
        tokens = opening + len(fed) * max(map(add, rests, fed))
    if tree_pays(backbone, plant(prompts, completions, read_last).tree, tokens):
        states_of = tree_states
    return states_of(backbone, prompts, completions, read_last)


def shared_states(
    backbone: nn.Module,
    prompts: Sequence[Ids],
    completions: Sequence[Ids],
    read_last: bool = False,
) -> States:
    """`completion_states` with every distinct prompt computed once."""
    distinct = {tuple(prompt): i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    read = prefill(backbone, list(distinct))
    if len(distinct) < len(prompts):
        rows = [distinct[tuple(prompt)] for prompt in prompts]
        read = read.select(torch.tensor(rows, device=backbone.device))
    ids, lengths = right_pad(completions, backbone.device)
    fed = ids if read_last else ids[:, :-1]
    hidden = read.last[:, None]  # (B, 1, D)
    if fed.shape[1]:
        seen = torch.arange(fed.shape[1], device=ids.device) < lengths[:, None]
        after = step(backbone, fed, torch.cat([read.mask, seen], 1), read.cache)
        hidden = torch.cat([hidden, after], 1)  # (B, T, D), or T + 1 with the last
    return States(hidden, ids, lengths)


def joined_states(
    backbone: nn.Module,
    prompts: Sequence[Ids],
    completions: Sequence[Ids],
    read_last: bool = False,
) -> States:
    """`completion_states` with only the opening shared: one pass fewer, where that is cheaper."""
    device = backbone.device
    opened, cache = read_opening(backbone, prompts)
    rests = [prompt[opened.shape[1] :] for prompt in prompts]
    fed = [c if read_last else c[:-1] for c in completions]
    rows, row_lengths = right_pad(
        [[*rest, *part] for rest, part in zip(rests, fed, strict=True)], device
    )
    seen = torch.arange(rows.shape[1], device=device) < row_lengths[:, None]  # (B, S)
    hidden = step(backbone, rows, torch.cat([opened, seen], 1), cache)  # (B, S, D)
    return _cut_out(hidden, [len(rest) - 1 for rest in rests], completions, read_last)


def tree_states(
    backbone: nn.Module,
    prompts: Sequence[Ids],
    completions: Sequence[Ids],
    read_last: bool = False,
) -> States:
    """`completion_states` by one pass over a prefix tree: nothing is padded, nothing read twice."""
    planted = plant(prompts, completions, read_last)
    hidden = tree_hidden(backbone, planted.tree)  # (N, D)
    ids, lengths = right_pad(completions, backbone.device)
    places, _ = right_pad(planted.places, backbone.device)  # (B, T), or T + 1 with the last
    # By index_select, as in `Prefilled.select`.
    found = hidden.index_select(0, places.flatten()).view(*places.shape, -1)
    return States(found, ids, lengths)


def full_states(
    backbone: nn.Module,
    prompts: Sequence[Ids],
    completions: Sequence[Ids],
    read_last: bool = False,
) -> States:
    """`completion_states` as one plain right-padded forward pass over prompt + completion."""
    device = backbone.device
    pairs = list(zip(prompts, completions, strict=True))
    rows = [[*prompt, *completion] for prompt, completion in pairs]
    # Padded with a token of the text: the embedding of the id 0 may be zeros, of which Gemma 3n
    # takes a root, and the gradient of that is NaN even where nothing asks for it.
    rows, row_lengths = right_pad(rows, device, fill=rows[0][0])
    mask = torch.arange(rows.shape[1], device=device) < row_lengths[:, None]
    # What is computed anew, in the backward pass, stands outside of this block.
    with nullcontext() if recomputes(backbone) else attention_kernel(mask.device, mask.shape[1]):
        output = backbone(input_ids=rows, attention_mask=mask.long(), use_cache=False)
    hidden = output.last_hidden_state
    return _cut_out(hidden, [len(prompt) - 1 for prompt in prompts], completions, read_last)


def _cut_out(
    hidden: Tensor, starts: list[int], completions: Sequence[Ids], read_last: bool
) -> States:
    """Hidden states (B, S, D) of whole rows -> those from each row's start on, as `States`."""
    device = hidden.device
    ids, lengths = right_pad(completions, device)
    columns = torch.arange(ids.shape[1] + read_last, device=device)
    columns = torch.tensor(starts, device=device)[:, None] + columns
    columns = columns.clamp(max=hidden.shape[1] - 1)[..., None]  # (B, T, 1), or T + 1
    return States(hidden.gather(1, columns.expand(-1, -1, hidden.shape[-1])), ids, lengths)


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """(..., D) -> (..., V): the language model's head on chosen states, as its own forward does."""
    return finished(model.config, model.get_output_embeddings()(hidden))


def finished(config, logits: Tensor) -> Tensor:
    """(..., V) -> (..., V): what a model does to the product of states and head, by its config."""
    if scaling := getattr(config, "logits_scaling", None):
        logits = logits / scaling
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise ValueError unless backbone and `head_logits` give what the model's own forward does."""
    ids = torch.tensor([[0, 1]], device=model.device)
    whole = model(input_ids=ids, use_cache=False).logits
    output = model.base_model(input_ids=ids, use_cache=False)
    if getattr(output, "last_hidden_state", None) is None:
        raise ValueError(f"{type(model).__name__} has no backbone that gives its last states")
    parts = head_logits(model, output.last_hidden_state)
    if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-4):
        raise ValueError(f"{type(model).__name__} does more after its backbone than its head")
