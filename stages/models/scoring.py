"""From rollouts to the replay buffer: reward model, reference and critic, one in memory at a time.

Letters: B completions, T completion tokens.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from stages.models.forward import completion_states, head_logits
from stages.models.log_probs import token_log_probs
from stages.models.scorers import state_values


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
    logits = head_logits(reference, states.hidden[states.action_mask])
    flat = token_log_probs(logits, states.ids[states.action_mask], temperature).tolist()
    return _by_row(flat, states.lengths.tolist())


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


def column_of(component: str) -> str:
    """Name of a reward component -> its column: `correctness` -> `reward_correctness`."""
    return "reward_" + component.removeprefix("reward_")


def total_reward(row: dict, weights: dict[str, float | None]) -> float | None:
    """Weighted sum of a row's components; None (unscorable) where one that counts is null."""
    total = 0.0
    for name, weight in weights.items():
        if weight is None:
            continue
        if row[column_of(name)] is None:
            return None
        total += weight * row[column_of(name)]
    return total


def _by_row(flat: list[float], lengths: list[int]) -> list[list[float]]:
    rows, start = [], 0
    for length in lengths:
        rows.append(flat[start : start + length])
        start += length
    return rows
