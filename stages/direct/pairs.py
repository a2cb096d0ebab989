"""Log-probs of pairs under a policy, the loss of a micro-batch, and what a training came to.

Letters: B pairs, T completion tokens, M tokens of all answers, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.direct.losses import (
    LossKnobs,
    PairLogProbs,
    PairLoss,
    implicit_rewards,
    negative_log_likelihood,
)
from stages.models.forward import States, completion_states, head_logits
from stages.models.log_probs import head_log_probs, pieces


def answer_states(policy: PreTrainedModel, rows: Sequence[dict]) -> States:
    """(B pairs) -> states of 2B answers, the chosen ones first; a prompt is read once."""
    answers = [row[side] for side in ("chosen_ids", "rejected_ids") for row in rows]
    return completion_states(policy.base_model, [row["prompt_ids"] for row in rows] * 2, answers)


def pair_log_probs(
    policy: PreTrainedModel, rows: Sequence[dict], reference: bool = True
) -> PairLogProbs:
    """(B scored pairs) -> summed log-probs of both sides, at temperature 1.

    With `reference` False the reference's columns are not read.
    """
    states = answer_states(policy, rows)
    mask = states.action_mask
    flat, _ = head_log_probs(policy, states.hidden[mask], states.ids[mask], 1.0)  # (M,)
    answer = mask.nonzero()[:, 0]
    sums = flat.new_zeros(len(states.lengths)).index_add(0, answer, flat)  # (2B,)
    chosen, rejected = sums.chunk(2)
    chosen_tokens, rejected_tokens = states.lengths.chunk(2)

    def known(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=sums.dtype, device=sums.device)

    return PairLogProbs(
        chosen,
        rejected,
        known([sum(row["log_probs_ref_chosen"]) for row in rows]) if reference else None,
        known([sum(row["log_probs_ref_rejected"]) for row in rows]) if reference else None,
        chosen_tokens,
        rejected_tokens,
        known([row["margin"] for row in rows]),
    )


def losses(pairs: PairLogProbs, loss: PairLoss, knobs: LossKnobs, nll_weight: float) -> Tensor:
    """(B pairs) -> (B,): the loss of each pair, its fine-tuning term included."""
    found = loss.per_pair(pairs, knobs)
    return found + nll_weight * negative_log_likelihood(pairs) if nll_weight else found


def sums_of(pairs: PairLogProbs, loss: PairLoss, beta: float) -> dict[str, float]:
    """(B pairs) -> sums over them of the figures that training and validation show.

    A tie of implicit rewards counts as a miss.
    """
    chosen_reward, rejected_reward = implicit_rewards(pairs, loss, beta)
    columns = {
        "chosen_log_prob": pairs.chosen,
        "rejected_log_prob": pairs.rejected,
        "chosen_reward": chosen_reward,
        "rejected_reward": rejected_reward,
        "accuracy": chosen_reward > rejected_reward,
    }
    return {name: column.detach().double().sum().item() for name, column in columns.items()}


@torch.no_grad()
def chosen_kl(policy: PreTrainedModel, reference: PreTrainedModel, rows: Sequence[dict]) -> float:
    """(B pairs) -> sum over the tokens of the chosen answers of KL(policy || reference), in nats.

    Exact: over the whole vocabulary at every token, of the states that the answer itself visits.
    """
    prompts = [row["prompt_ids"] for row in rows]
    answers = [row["chosen_ids"] for row in rows]
    both = []
    for model in (policy, reference):
        states = completion_states(model.base_model, prompts, answers)
        both.append(states.hidden[states.action_mask])  # (M, D)
    total, vocabulary = 0.0, policy.config.get_text_config().vocab_size
    for part in pieces(len(both[0]), vocabulary):
        ours, theirs = (
            head_logits(model, hidden[part]).float().log_softmax(-1)  # (N, V)
            for model, hidden in zip((policy, reference), both, strict=True)
        )
        total += (ours.exp() * (ours - theirs)).sum().item()
    return total
