"""Loss and measures of a Bradley-Terry reward model.

Letters: B pairs. Scores are reward-model logits; P(chosen wins) = sigmoid(chosen - rejected).
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None, centering: float
) -> Tensor:
    """(B,), (B,), (B,) or None -> (B,): -log sigmoid(chosen - rejected - margin) + centring.

    Ouyang et al. 2022, eq. 1; the margin inside the sigmoid is Llama 2's (Touvron et al. 2023,
    eq. 2), None meaning 0 for every pair. Centring is `centering * (chosen + rejected)^2`
    (Eisenstein et al. 2023): scores stay near 0 without touching their difference. Margins must be
    finite and >= 0, which the reader of the pairs checks.
    """
    gap = chosen - rejected
    if margin is not None:
        gap = gap - margin
    return -logsigmoid(gap) + centering * (chosen + rejected).square()


def preference_accuracy(chosen: Tensor, rejected: Tensor) -> float:
    """(B,), (B,) -> share of pairs with chosen > rejected; a tie is a miss. 0 without pairs."""
    return (chosen > rejected).sum().item() / max(1, len(chosen))


def tie_share(chosen: Tensor, rejected: Tensor) -> float:
    """(B,), (B,) -> share of pairs scored exactly alike. 0 without pairs."""
    return (chosen == rejected).sum().item() / max(1, len(chosen))


def calibration_error(chosen: Tensor, rejected: Tensor, bins: int = 10) -> float:
    """(B,), (B,) -> expected calibration error (Naeini et al. 2015), between 0 and 1.

    The model's confidence in its own pick is sigmoid(|chosen - rejected|), cut into `bins` equal
    parts of 0.5..1; the error is the mean over pairs of |accuracy - confidence| of their bin. A tie
    is half right, being a guess at confidence 0.5. 0 without pairs.
    """
    confidence, right, bin_of_pair = _picks(chosen, rejected, bins)
    surplus = torch.zeros(bins, dtype=right.dtype, device=right.device)
    surplus.index_add_(0, bin_of_pair, right - confidence)
    return surplus.abs().sum().item() / max(1, len(chosen))


def _picks(chosen: Tensor, rejected: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B,), (B,) -> (B,) confidence in the pick, (B,) how right it is, (B,) its bin."""
    gap = chosen - rejected
    confidence = gap.abs().sigmoid()
    bin_of_pair = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    return confidence, (gap.sign() + 1) / 2, bin_of_pair


def calibration(chosen: Tensor, rejected: Tensor, bins: int = 10) -> dict[str, list]:
    """(B,), (B,) -> mean confidence, accuracy and pairs of each bin of `calibration_error`.

    Bins without a pair are left out.
    """
    confidence, right, bin_of_pair = _picks(chosen, rejected, bins)
    members = [bin_of_pair == number for number in bin_of_pair.unique()]
    return {
        "confidence": [confidence[inside].mean().item() for inside in members],
        "accuracy": [right[inside].mean().item() for inside in members],
        "pairs": [int(inside.sum()) for inside in members],
    }


def gap_histogram(chosen: Tensor, rejected: Tensor, bins: int = 20) -> dict[str, list]:
    """(B,), (B,) -> pairs by chosen - rejected, in `bins` equal parts around 0, and their edges."""
    gap = (chosen - rejected).double()
    reach = gap.abs().max().item() if len(gap) else 0.0
    counts = torch.histc(gap, bins, -reach, reach) if reach else torch.zeros(0)
    edges = [reach * (2 * i / max(1, len(counts)) - 1) for i in range(len(counts) + 1)]
    return {"edges": edges, "pairs": [int(count) for count in counts]}
