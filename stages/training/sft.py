"""Supervised fine-tuning: the mean negative log-prob of the labelled tokens.

Letters: B rows, M labelled tokens that are predicted. A label at position 0 is predicted by nothing
and does not count.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.base.tables import IGNORED
from stages.models.forward import completion_states, right_pad
from stages.models.log_probs import head_log_probs


def predicted(labels: Sequence[int]) -> int:
    """Number of labels that count: not -100, and not at position 0."""
    return sum(label != IGNORED for label in labels[1:])


def micro_batch_loss(policy: PreTrainedModel, rows: Sequence[dict], divisor: int) -> Tensor:
    """(B rows of `input_ids`, `labels`) -> scalar: summed loss / divisor, in nats.

    `divisor` is the number of predicted labels of the whole optimizer step, so that micro-batches
    add up to its token mean. What comes before a row's first label is only read; the head runs
    where a label is.
    """
    starts = [first_label(row["labels"]) for row in rows]
    pairs = list(zip(rows, starts, strict=True))
    states = completion_states(
        policy.base_model,
        [row["input_ids"][:start] for row, start in pairs],
        [row["input_ids"][start:] for row, start in pairs],
    )
    labelled, _ = right_pad([[x != IGNORED for x in row["labels"][start:]] for row, start in pairs])
    mask = labelled.bool().to(states.ids.device)
    log_probs, _ = head_log_probs(policy, states.hidden[mask], states.ids[mask], 1.0)
    return -log_probs.sum() / divisor


def first_label(labels: Sequence[int]) -> int:
    """Position of the first predicted label; ValueError if the row has none."""
    for position in range(1, len(labels)):
        if labels[position] != IGNORED:
            return position
    raise ValueError("a row without a label that is predicted")


@torch.no_grad()
def mean_loss(policy: PreTrainedModel, batches: Sequence[Sequence[dict]]) -> float:
    """Token-mean loss over micro-batches of rows."""
    count = sum(predicted(row["labels"]) for batch in batches for row in batch)
    return sum(micro_batch_loss(policy, batch, count).item() for batch in batches)
