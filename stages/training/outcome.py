"""Loss and measures of an outcome reward model: it tells right completions from wrong ones.

Letters: B completions, T completion tokens. Logits are reward-model logits; P(right) is their
sigmoid, and the logit that has read the last token is the score.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

EVERY_TOKEN, LAST_TOKEN = "every_token", "last_token"


def judged(mask: Tensor, target: str) -> Tensor:
    """(B, T) bool -> (B, T) bool: the tokens at which a logit is held against the outcome.

    every_token  each completion token (Lightman et al. 2023), so that the model says early on
                 where a completion is going
    last_token   the last one alone, where a score is read
    """
    if target == EVERY_TOKEN:
        return mask
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = torch.where(mask, positions, 0).amax(1, keepdim=True)  # 0: no token at all
    return mask & (positions == last)


def outcome_losses(logits: Tensor, mask: Tensor, labels: Tensor, target: str) -> Tensor:
    """(B, T), (B, T) bool, (B,) of 0 and 1 -> (B, T): binary cross-entropy where judged, else 0.

    A step divides their sum by the number of judged tokens, once: one mean over all tokens.
    """
    where = judged(mask, target)
    wanted = labels.to(logits.dtype)[:, None].expand_as(logits)
    losses = binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    return torch.where(where, losses, 0.0)


def auc(scores: Tensor, labels: Tensor) -> float | None:
    """(B,), (B,) of 0 and 1 -> how often a right completion outscores a wrong one; a tie is half.

    The area under the ROC curve. None unless there are both.
    """
    in_order, pairs = _in_order(scores.double(), labels)
    return in_order / pairs if pairs else None


def ranking(
    scores: Tensor, labels: Tensor, prompts: Sequence[Hashable]
) -> tuple[float, float | None]:
    """(B,), (B,) of 0 and 1, B names of prompts -> two shares, both prompt by prompt.

    Of the prompts whose best score is of a right completion (completions that tie share it); of the
    pairs of a right and a wrong completion of one prompt that are in order (a tie is half), None
    where no prompt has both.
    """
    members: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(row)
    best = ordered = total = 0.0
    for rows in members.values():
        own, right = scores[rows].double(), labels[rows].double()
        best += right[own == own.max()].mean().item()
        in_order, pairs = _in_order(own, right)
        ordered, total = ordered + in_order, total + pairs
    return best / len(members), ordered / total if total else None


def _in_order(scores: Tensor, labels: Tensor) -> tuple[float, int]:
    """Pairs of a right and a wrong row in which the right one scores higher, and all such pairs."""
    right, wrong = scores[labels == 1], scores[labels == 0].sort().values
    lower = torch.searchsorted(wrong, right) + torch.searchsorted(wrong, right, right=True)
    return lower.sum().item() / 2, len(right) * len(wrong)
