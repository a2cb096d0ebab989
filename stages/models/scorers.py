"""Scores and values: one linear head on the states of a language model's backbone.

Letters: B completions, T completion tokens. A score is in reward-model logits; it is read at the
last real token, found from lengths and never from pad ids. A critic is the same network read at
every state.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.models.forward import Ids, completion_states


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
