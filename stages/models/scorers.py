"""What frozen models say of completions: scores, values and reference log-probs.

Scores and values come from one linear head on the states of a language model's backbone.

Letters: B completions, T completion tokens. A score is in reward-model logits; it is read at the
last real token, found from lengths and never from pad ids. A critic is the same network read at
every state.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.base.chunks import within
from stages.models.forward import Ids, completion_states
from stages.models.log_probs import head_log_probs


def state_values(
    scorer: PreTrainedModel, prompts: Sequence[Ids], completions: Sequence[Ids]
) -> tuple[Tensor, Tensor]:
    """(B prompts, B completions) -> values (B, T+1) float32, lengths (B,).

    values[b, t] judges the prompt and t completion tokens; at t = length it is the score of the
    whole. Places beyond a row's length hold junk.
    """
    states = completion_states(scorer.base_model, prompts, completions, read_last=True)
    return scorer.score(states.hidden)[..., 0].float(), states.lengths


def action_values(
    scorer: PreTrainedModel, prompts: Sequence[Ids], completions: Sequence[Ids]
) -> tuple[Tensor, Tensor]:
    """(B prompts, B completions) -> values (B, T) before each token, action mask (B, T)."""
    states = completion_states(scorer.base_model, prompts, completions)
    return scorer.score(states.hidden)[..., 0].float(), states.action_mask


def scores(scorer: PreTrainedModel, prompts: Sequence[Ids], completions: Sequence[Ids]) -> Tensor:
    """(B prompts, B completions) -> (B,): the score of each completion."""
    states = completion_states(scorer.base_model, prompts, completions, read_last=True)
    last = states.hidden[torch.arange(len(prompts), device=states.hidden.device), states.lengths]
    return scorer.score(last)[:, 0].float()


@torch.no_grad()
def reference_log_probs(
    reference: PreTrainedModel, rows: Sequence[dict], temperature: float
) -> list[list[float]]:
    """(B rows) -> B lists: reference log-probs of the sampled tokens, by the one log-prob rule."""
    states = completion_states(
        reference.base_model,
        [row["prompt_ids"] for row in rows],
        [row["completion_ids"] for row in rows],
    )
    mask = states.action_mask
    flat, _ = head_log_probs(reference, states.hidden[mask], states.ids[mask], temperature)
    return _by_row(flat.tolist(), states.lengths.tolist())


@torch.no_grad()
def scores_and_values(
    scorer: PreTrainedModel, rows: Sequence[dict]
) -> tuple[list[float], list[list[float]]]:
    """(B rows) -> B scores of the whole completions, B lists of values before each token."""
    values, lengths = state_values(
        scorer, [row["prompt_ids"] for row in rows], [row["completion_ids"] for row in rows]
    )
    scores = values.gather(1, lengths[:, None])[:, 0].tolist()
    kept = zip(values.tolist(), lengths.tolist(), strict=True)
    return scores, [row[:length] for row, length in kept]


def by_parts(
    measure: Callable[[Sequence[dict]], Sequence[list]], rows: Sequence[dict], limit: int | None
) -> list[list]:
    """(B rows) -> the columns that `measure` gives, in passes of at most `limit` padded tokens."""
    lengths = ([len(row["prompt_ids"]) + len(row["completion_ids"])] for row in rows)
    found = [measure([rows[place] for place in part]) for part in within(lengths, limit)]
    return [[value for part in column for value in part] for column in zip(*found, strict=True)]


def _by_row(flat: list[float], lengths: list[int]) -> list[list[float]]:
    rows, start = [], 0
    for length in lengths:
        rows.append(flat[start : start + length])
        start += length
    return rows
