"""Sampling completions: many prompts side by side, each prompt read once for its G samples.

Letters: U prompts, G samples of each, N completions under way, T the cap on their length, V
vocabulary. Log-probs are in nats, of the whole vocabulary at the sampling temperature, from the
very logits that were sampled from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stages.base.chunks import chunks
from stages.base.randomness import generator
from stages.models.forward import Ids, head_logits, route_of
from stages.models.log_probs import token_log_probs
from stages.models.scorers import reference_log_probs
from stages.rollouts.decoding import CachedRows, WholeRows, side_by_side, start_rows

# Rows that have ended are dropped from the batch once they are this share of it: dropping copies
# the cache.
DROP_SHARE = 1 / 8
# After how many tokens a device is asked which rows have ended; 8 where it is not named. Asking
# makes a GPU wait for all that it was given; on a CPU it costs nothing, and a row leaves at once.
ASKED_EVERY = {"cpu": 1}
# Numbers of logits that are held at once where log-probs come from passes over whole rows.
LOGITS = 2**27


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: top_k, top_p and min_p narrow the support, never the log-probs.

    `max_tokens` is the most that rows side by side may come to, prompts and caps; None: no limit.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    max_tokens: int | None = None

    def narrowing(self) -> LogitsProcessorList:
        warpers = LogitsProcessorList()
        if self.top_k > 0:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p > 0:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers


@dataclass(frozen=True)
class Completion:
    """Sampled ids (the stop token included), their log-probs, and whether a stop token came.

    `log_probs_sampler` are those of an engine that is not ours; None where we sampled.
    """

    ids: list[int]
    log_probs: list[float]
    finished: bool
    log_probs_sampler: list[float] | None = None


def uniforms(seed: int, stage: str, round_number: int, position: int, shape: tuple) -> Tensor:
    """(G, T) uniform draws of one prompt's own stream: its samples do not depend on batch mates."""
    return torch.rand(shape, generator=generator(seed, stage, round_number, "sample", position))


def sample(
    policy: PreTrainedModel, prompts: Sequence[Ids], draws: Tensor | None, sampling: Sampling
) -> list[Completion]:
    """(U prompts, draws (U, G, T) or None) -> U * G completions, those of one prompt together.

    `draws` are uniform in [0, 1) and pick each token by its cumulative probability; None decodes
    one greedy completion a prompt, whose log-probs are those at temperature 1. The policy must be
    in evaluation mode.

    A recurrent state that is carried on token by token is another computation than a pass over the
    row, and not always as exact: by the unpadded route the log-probs come from such a pass.
    """
    completions = draw(policy, prompts, draws, sampling)
    if route_of(policy.base_model) != "unpadded":
        return completions
    group = len(completions) // len(prompts)
    rows = [
        {"prompt_ids": prompts[place // group], "completion_ids": completion.ids}
        for place, completion in enumerate(completions)
    ]
    temperature = 1.0 if draws is None else sampling.temperature
    vocabulary = policy.get_output_embeddings().weight.shape[0]
    at_once = max(1, LOGITS // (sampling.max_new_tokens * vocabulary))
    restated = []
    for part in chunks(rows, at_once):
        restated += reference_log_probs(policy, part, temperature)
    return [replace(c, log_probs=row) for c, row in zip(completions, restated, strict=True)]


@torch.inference_mode()
def draw(
    policy: PreTrainedModel, prompts: Sequence[Ids], draws: Tensor | None, sampling: Sampling
) -> list[Completion]:
    """`sample` with the log-probs of the very states that were sampled from, on every route."""
    if policy.training:
        raise ValueError("the policy is in training mode: dropout would change its log-probs")
    group = 1 if draws is None else draws.shape[1]
    completions: list[Completion | None] = [None] * (len(prompts) * group)
    for numbers in side_by_side(policy.base_model, prompts):
        rows = start_rows(policy.base_model, [prompts[number] for number in numbers], group)
        uniform = None if draws is None else draws[numbers].flatten(0, 1).to(policy.device)
        places = [number * group + i for number in numbers for i in range(group)]
        for place, completion in zip(places, _decode(policy, rows, uniform, sampling), strict=True):
            completions[place] = completion
    return completions


def _decode(
    policy: PreTrainedModel, rows: CachedRows | WholeRows, draws: Tensor | None, sampling: Sampling
) -> list[Completion]:
    """(N rows, draws (N, T) or None) -> N completions; a row that has ended leaves the batch.

    Until it leaves it goes on, and what it says after its stop token is cut off.
    """
    count, cap, device = len(rows.hidden), sampling.max_new_tokens, policy.device
    stops = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)
    ids = torch.zeros(count, cap, dtype=torch.long, device=device)
    log_probs = torch.zeros(count, cap, device=device)
    alive = torch.arange(count, device=device)
    going = torch.ones(count, dtype=torch.bool, device=device)  # of the rows alive
    narrowing, every = sampling.narrowing(), ASKED_EVERY.get(device.type, 8)
    temperature = 1.0 if draws is None else sampling.temperature
    for t in range(cap):
        logits = head_logits(policy, rows.hidden).float()  # (N, V)
        uniform = None if draws is None else draws[alive, t]
        chosen = _choose(logits / temperature, uniform, narrowing)  # (N,)
        ids[alive, t] = chosen
        log_probs[alive, t] = token_log_probs(logits, chosen, temperature)
        going = going & ~torch.isin(chosen, stops)
        if t + 1 == cap:
            break
        if (t + 1) % every == 0:
            running = int(going.sum())
            if running == 0:
                break
            if len(alive) - running >= DROP_SHARE * len(alive):
                kept = going.nonzero()[:, 0]
                rows.keep(kept)
                alive, going, chosen = alive[kept], going[kept], chosen[kept]
        rows.read(chosen)
    return [
        _until_stop(row, logs, sampling.stop_ids)
        for row, logs in zip(ids.tolist(), log_probs.tolist(), strict=True)
    ]


def _until_stop(ids: list[int], log_probs: list[float], stops: tuple[int, ...]) -> Completion:
    """A row up to its first stop token, or whole."""
    ends = next((t + 1 for t, token in enumerate(ids) if token in stops), None)
    return Completion(ids[:ends], log_probs[:ends], ends is not None)


def _choose(scaled: Tensor, uniform: Tensor | None, narrowing: LogitsProcessorList) -> Tensor:
    """(N, V) logits over temperature, (N,) draws -> (N,) ids: the token that each draw falls on."""
    if uniform is None:
        return scaled.argmax(-1)
    wide = torch.float32 if scaled.device.type == "mps" else torch.float64
    cumulative = narrowing(None, scaled).softmax(-1).to(wide).cumsum(-1)
    target = uniform.to(wide)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=scaled.shape[-1] - 1)
