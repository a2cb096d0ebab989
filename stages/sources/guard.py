"""Which route a model takes: measured against plain forward passes over single rows.

Letters: B rows of a prompt and a completion. The rows differ in length, open alike, and reach
beyond the model's window where it has one. A route that raises is no route, whatever it raises:
nobody has thought of every architecture.
"""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from stages.base.positions import positions_of
from stages.models.forward import (
    ROUTE,
    Ids,
    Route,
    States,
    can_share,
    check_head,
    full_states,
    head_logits,
    joined_states,
    shared_states,
    tree_states,
)
from stages.models.log_probs import token_log_probs
from stages.models.prefix_tree import packable
from stages.rollouts.sampling import Sampling, draw

# In nats. A few rows do not show the worst: so that all are within 1e-4, these are within half.
TOLERANCE = 5e-5
# What rounding alone may do to a log-prob, when rows are computed side by side.
ROUNDING = 1e-3
NEW = 8
SHORT = (9, 5, 14, 9)  # tokens of the prompts
OPENING = 4
# Rows beyond the window are tried up to so many parameters times tokens: about a minute.
AFFORDABLE = 2e12
# Fields of a config that count tokens, beyond which a layer reads otherwise.
REACH = re.compile(r"window|chunk|local|block_size|index_topk")

Rows = list[tuple[list[int], list[int]]]


def find_route(policy: PreTrainedModel) -> Route:
    """The fastest route whose log-probs are those of plain passes; ValueError if there is none.

    The policy is in evaluation mode and not used any more: weights that are all alike, the zeros
    and ones of a fresh model, are disturbed, since they hide what padding does.
    """
    _disturb(policy)
    _check_large_logits(policy)
    versions = [parameter._version for parameter in policy.parameters()]
    reach, affordable = _reach(policy), True
    rows = _rows(policy, SHORT)
    if reach:
        far = _rows(policy, (reach + 6, reach - 3, OPENING + 2))
        count = policy.num_parameters() * sum(len(prompt) for prompt, _ in far)
        affordable = count <= AFFORDABLE
        rows += far if affordable else []
    wanted = [_plain(policy, *row) for row in rows]
    limit = _limit(policy, rows)
    _check_causal(policy, rows[0], wanted[0])
    if [parameter._version for parameter in policy.parameters()] != versions:
        raise ValueError("a forward pass changes its weights")
    if error := _unlike(lambda: _log_probs(policy, full_states, rows), wanted, limit):
        raise ValueError(f"rows side by side, padded on the right: {error}")
    reasons = []
    for route in _candidates(policy, affordable):
        error = _states_error(policy, route, rows, wanted, limit)
        # By the unpadded route log-probs come from plain passes; only the draws must not be off.
        coarse = ROUNDING if route == "unpadded" else limit
        error = error or _sampling_error(policy, route, rows, coarse)
        if not error:
            return route
        reasons.append(f"{route}: {error}")
    raise ValueError("sampling differs from plain forward passes (" + "; ".join(reasons) + ")")


@torch.no_grad()
def _disturb(policy: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(2)
    for weight in policy.parameters():
        if not weight.any() or weight.numel() > 1 and weight.min() == weight.max():
            weight += 0.1 * torch.randn(weight.shape, generator=generator).to(weight.device)


def _candidates(policy: PreTrainedModel, affordable: bool) -> list[Route]:
    """Routes from fast to slow; without a look beyond the window only those that pad nothing.

    Nor may padding enter a recurrent state, even where the weights of today hide it.
    """
    layers = DynamicCache(config=policy.base_model.config).layers
    recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    if recurrent or not affordable:
        return ["unpadded", "uncached"]
    shared: list[Route] = ["shared"] if can_share(policy.base_model) else []
    return [*shared, "padded", "unpadded", "uncached"]


def _reach(policy: PreTrainedModel) -> int:
    """The longest window of the config that rows can pass, in tokens; 0 where there is none."""
    config = policy.config.get_text_config(decoder=True)
    room = (positions_of(policy.config) or 10**9) - NEW - 6
    found = [
        value
        for name, value in config.to_dict().items()
        if type(value) is int and REACH.search(name) and max(SHORT) < value <= room
    ]
    return max(found, default=0)


def _rows(policy: PreTrainedModel, lengths: Sequence[int]) -> Rows:
    """Prompts of these lengths, which open alike, with completions of 1 to NEW tokens."""
    generator = torch.Generator().manual_seed(0)
    size = policy.get_input_embeddings().num_embeddings
    most = max(OPENING + 1, (positions_of(policy.config) or 10**9) - NEW)

    def ids(count: int) -> list[int]:
        return torch.randint(size, (count,), generator=generator).tolist()

    opening, rows = ids(OPENING), []
    for number, length in enumerate(min(length, most) for length in lengths):
        rows.append((opening + ids(length - OPENING), ids(NEW - 3 * number % NEW)))
    return rows


@torch.no_grad()
def _plain(policy: PreTrainedModel, prompt: Ids, completion: Ids) -> Tensor:
    """(T,): log-probs of a completion by the model's own forward pass over the row alone."""
    row = torch.tensor([[*prompt, *completion]], device=policy.device)
    logits = policy(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return token_log_probs(logits, row[0, len(prompt) :], 1.0)


def _limit(policy: PreTrainedModel, rows: Rows) -> float:
    """The largest difference that counts as none: TOLERANCE, or more where rounding is coarser.

    Rounding is what a row differs by beside copies of itself, which need no padding; ValueError
    where that is no rounding.
    """
    rounding = 0.0
    for row in rows[:2]:
        alone, *copies = (_log_probs(policy, full_states, [row] * count) for count in (1, 3))
        for copy in copies[0]:
            rounding = max(rounding, (copy - alone[0]).abs().max().item())
    if not rounding <= ROUNDING:
        raise ValueError(f"a row beside copies of itself: log-probs {rounding:.2g} off")
    return max(TOLERANCE, 4 * rounding)


def _check_causal(policy: PreTrainedModel, row: tuple[Ids, Ids], wanted: Tensor) -> None:
    """Raise ValueError where a token changes the log-probs of those before it."""
    prompt, completion = row
    ahead = (_plain(policy, prompt, completion[:2]) - wanted[:2]).abs().max().item()
    if not ahead <= ROUNDING:
        raise ValueError(f"a token changes the log-probs before it by {ahead:.2g}: not causal")


@torch.no_grad()
def _check_large_logits(policy: PreTrainedModel) -> None:
    """Raise ValueError where the head does more to large logits than `head_logits` does.

    A cap shows nowhere else in a fresh model.
    """
    head = policy.get_output_embeddings().weight
    head *= 10
    check_head(policy)
    head /= 10


@torch.no_grad()
def _log_probs(
    policy: PreTrainedModel, states_of: Callable[..., States], rows: Rows
) -> list[Tensor]:
    """Log-probs of the completions, (T,) each, from states computed side by side."""
    prompts, completions = zip(*rows, strict=True)
    states = states_of(policy.base_model, prompts, completions)
    found = token_log_probs(head_logits(policy, states.hidden), states.ids, 1.0)
    return [row[:length] for row, length in zip(found, states.lengths.tolist(), strict=True)]


def _states_error(policy, route: Route, rows: Rows, wanted, limit: float) -> str:
    """Why the states of a route are wrong; empty where they are right."""
    if route != "shared":
        return ""
    twice, both = [row for row in rows for _ in range(2)], [x for x in wanted for _ in range(2)]
    trees = [tree_states] if packable(policy.base_model) else []
    for states_of in (shared_states, joined_states, *trees):
        if error := _unlike(lambda way=states_of: _log_probs(policy, way, twice), both, limit):
            return error
    return ""


def _sampling_error(policy: PreTrainedModel, route: Route, rows: Rows, limit: float) -> str:
    """Why what the sampler draws from by a route is wrong; empty where it is right.

    Two samples a prompt, of which some end early, so that rows leave the batch.
    """
    prompts = [prompt for prompt, _ in rows]
    size = policy.get_input_embeddings().num_embeddings
    draws = torch.rand(len(prompts), 2, NEW, generator=torch.Generator().manual_seed(1))
    stops = tuple(range(0, size, 8))
    config = policy.base_model.config
    setattr(config, ROUTE, route)
    try:
        found = draw(policy, prompts, draws, Sampling(1.0, 1.0, 0, 0.0, NEW, stops))
    except Exception as error:
        return _words(error)
    finally:
        delattr(config, ROUTE)
    wanted = [_plain(policy, prompts[i // 2], row.ids) for i, row in enumerate(found)]
    noted = [torch.tensor(row.log_probs, device=policy.device) for row in found]
    return _difference(noted, wanted, limit)


def _unlike(log_probs: Callable[[], list[Tensor]], wanted: Sequence[Tensor], limit: float) -> str:
    try:
        return _difference(log_probs(), wanted, limit)
    except Exception as error:
        return _words(error)


def _difference(found: Sequence[Tensor], wanted: Sequence[Tensor], limit: float) -> str:
    """In words, by how much log-probs differ; empty where by no more than the limit."""
    worst = max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))
    return "" if worst <= limit else f"log-probs {worst:.2g} off"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
