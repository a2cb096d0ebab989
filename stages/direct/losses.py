"""Direct alignment: what `direct.loss` in params.yaml means. Start at `LOSSES`, at the end.

Letters: B pairs. Per pair, as in the papers: c and r are the policy's log-probs of the chosen and
the rejected answer, summed over their tokens (the stop token included, no prompt); c0 and r0 those
of the reference; nc and nr the numbers of tokens. lc = c - c0 and lr = r - r0 are log-ratios. All
in nats, at temperature 1. Every loss is one number a pair; a training step takes their mean over
all pairs of the step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu


@dataclass(frozen=True)
class PairLogProbs:
    """(B,) each: summed log-probs of both sides and their numbers of tokens, at least 1.

    The reference's are None where none was run; `margin` is that of the pairs, 0 where they bring
    none.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_ref: Tensor | None
    rejected_ref: Tensor | None
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    margin: Tensor

    @property
    def chosen_ratio(self) -> Tensor:
        """(B,): lc, log of policy over reference on the chosen answer."""
        return self.chosen - self.chosen_ref

    @property
    def rejected_ratio(self) -> Tensor:
        """(B,): lr, log of policy over reference on the rejected answer."""
        return self.rejected - self.rejected_ref


@dataclass(frozen=True)
class LossKnobs:
    """Plain values; the names are those of params.yaml, section `direct`."""

    beta: float
    label_smoothing: float
    label_noise: str
    margin_weight: float
    dpop_weight: float
    gamma: float


def _preferred(z: Tensor, knobs: LossKnobs) -> Tensor:
    """(B,) logits of "chosen wins" -> (B,): -log sigmoid(z), labels wrong at `label_smoothing`.

    conservative  (1-e) * -log sigmoid(z) + e * -log sigmoid(-z)  (cDPO, Mitchell 2023)
    robust        the same with -e, over 1 - 2e: unbiased under flipped labels (Chowdhury et al.
                  2024); it can be negative
    """
    e = knobs.label_smoothing
    if knobs.label_noise == "robust":
        return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)
    return -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)


def dpo(pairs: PairLogProbs, knobs: LossKnobs) -> Tensor:
    """(B pairs) -> (B,): -log sigmoid(beta * (lc - lr)) (Rafailov et al. 2023, eq. 7).

    `margin_weight` takes that much of the pair's margin off inside the sigmoid (Llama 2's margin,
    on implicit rewards). `dpop_weight` takes off beta * weight * max(0, -lc): DPOP (Pal et al.
    2024, eq. 3), which punishes a chosen answer that gets less likely than under the reference.
    """
    gap = pairs.chosen_ratio - pairs.rejected_ratio
    gap = gap - knobs.dpop_weight * relu(-pairs.chosen_ratio)
    return _preferred(knobs.beta * gap - knobs.margin_weight * pairs.margin, knobs)


def dpo_norm(pairs: PairLogProbs, knobs: LossKnobs) -> Tensor:
    """(B pairs) -> (B,): DPO on means over tokens, lc/nc - lr/nr (Lambert et al. 2024, Tulu 3)."""
    gap = pairs.chosen_ratio / pairs.chosen_tokens - pairs.rejected_ratio / pairs.rejected_tokens
    return _preferred(knobs.beta * gap - knobs.margin_weight * pairs.margin, knobs)


def ipo(pairs: PairLogProbs, knobs: LossKnobs) -> Tensor:
    """(B pairs) -> (B,): (lc/nc - lr/nr - 1/(2 beta))^2 (Azar et al. 2023).

    Means over tokens: what the authors ran (they confirmed it to TRL, #1265). `ipo_sum` is
    equation 17 as it is printed. beta must be above 0.
    """
    gap = pairs.chosen_ratio / pairs.chosen_tokens - pairs.rejected_ratio / pairs.rejected_tokens
    return (gap - 1 / (2 * knobs.beta)).square()


def ipo_sum(pairs: PairLogProbs, knobs: LossKnobs) -> Tensor:
    """(B pairs) -> (B,): (lc - lr - 1/(2 beta))^2, sums over tokens (Azar et al. 2023, eq. 17)."""
    return (pairs.chosen_ratio - pairs.rejected_ratio - 1 / (2 * knobs.beta)).square()


def hinge(pairs: PairLogProbs, knobs: LossKnobs) -> Tensor:
    """(B pairs) -> (B,): max(0, 1 - beta * (lc - lr)) (Liu et al. 2023, RSO's hinge-norm)."""
    return relu(1 - knobs.beta * (pairs.chosen_ratio - pairs.rejected_ratio))


def apo_zero(pairs: PairLogProbs, knobs: LossKnobs) -> Tensor:
    """(B pairs) -> (B,): -sigmoid(beta lc) + sigmoid(beta lr) (D'Oosterlinck et al. 2024, eq. 7).

    Raises chosen and lowers rejected answers, each against the reference. TRL adds 1.
    """
    return torch.sigmoid(knobs.beta * pairs.rejected_ratio) - torch.sigmoid(
        knobs.beta * pairs.chosen_ratio
    )


def apo_down(pairs: PairLogProbs, knobs: LossKnobs) -> Tensor:
    """(B pairs) -> (B,): sigmoid(beta lc) - sigmoid(beta (lc - lr)) (the same, eq. 8).

    For pairs whose chosen answers are worse than the policy: both sides get less likely.
    """
    gap = pairs.chosen_ratio - pairs.rejected_ratio
    return torch.sigmoid(knobs.beta * pairs.chosen_ratio) - torch.sigmoid(knobs.beta * gap)


def simpo(pairs: PairLogProbs, knobs: LossKnobs) -> Tensor:
    """(B pairs) -> (B,): -log sigmoid(beta (c/nc - r/nr) - gamma) (Meng et al. 2024, eq. 6).

    No reference. gamma is the margin itself, as in the paper; code that takes gamma / beta
    (rlhf-book, open-instruct, the authors' later code) means gamma = beta * ratio here.
    """
    gap = pairs.chosen / pairs.chosen_tokens - pairs.rejected / pairs.rejected_tokens
    return -logsigmoid(knobs.beta * gap - knobs.gamma)


def orpo(pairs: PairLogProbs, knobs: LossKnobs) -> Tensor:
    """(B pairs) -> (B,): -c/nc - beta log sigmoid(log odds ratio) (Hong et al. 2024, eq. 6, 7).

    odds = p / (1 - p) of p = exp(mean log-prob). No reference; the fine-tuning term is part of the
    loss and counts answer tokens alone. beta is the paper's lambda. The log of 1 - p is taken as
    log(-expm1(x)): exact where p is near 1, where the plain form is NaN.
    """
    x, y = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    odds = (x - _log1mexp(x)) - (y - _log1mexp(y))
    return -x - knobs.beta * logsigmoid(odds)


def sft(pairs: PairLogProbs, knobs: LossKnobs) -> Tensor:
    """(B pairs) -> (B,): -c/nc, fine-tuning on the chosen answer: the control beside the others.

    What a loss over pairs gives beyond it comes of the rejected answers. No reference.
    """
    return negative_log_likelihood(pairs)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0; a probability of 1 counts as the next smaller one."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    # Mächler 2012: each form where it is exact. `where` needs both finite, gradients too.
    near = x > -0.6931471805599453
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -0.5))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )


@dataclass(frozen=True)
class PairLoss:
    """A loss and what it needs.

    reference  whether it looks at the reference's log-probs
    means      implicit rewards are of means over tokens, not of sums
    reads      which knobs beside beta it reads; another one that is not 0 is refused
    """

    per_pair: Callable[[PairLogProbs, LossKnobs], Tensor]
    reference: bool = True
    means: bool = False
    reads: tuple[str, ...] = ()


LOSSES = {
    "dpo": PairLoss(dpo, reads=("label_smoothing", "margin_weight", "dpop_weight")),
    "dpo_norm": PairLoss(dpo_norm, means=True, reads=("label_smoothing", "margin_weight")),
    "ipo": PairLoss(ipo),
    "ipo_sum": PairLoss(ipo_sum),
    "hinge": PairLoss(hinge),
    "apo_zero": PairLoss(apo_zero),
    "apo_down": PairLoss(apo_down),
    "simpo": PairLoss(simpo, reference=False, means=True, reads=("gamma",)),
    "orpo": PairLoss(orpo, reference=False, means=True),
    "sft": PairLoss(sft, reference=False, means=True),
}


def negative_log_likelihood(pairs: PairLogProbs) -> Tensor:
    """(B pairs) -> (B,): -c/nc, the fine-tuning term that `nll_weight` adds to any loss.

    The mean over the answer's own tokens (Pang et al. 2024, RPO); TRL takes one mean over the
    tokens of the batch, in which long answers weigh more.
    """
    return -pairs.chosen / pairs.chosen_tokens


def implicit_rewards(pairs: PairLogProbs, loss: PairLoss, beta: float) -> tuple[Tensor, Tensor]:
    """(B pairs) -> (B,), (B,): beta times the log-ratio of the chosen, and the rejected, answer.

    Of means over tokens where the loss takes means; of the log-prob alone where it has no
    reference. The optimum of DPO has the reward of which it is the policy (Rafailov et al. 2023,
    eq. 5), up to a term of the prompt.
    """
    chosen, rejected = pairs.chosen, pairs.rejected
    if loss.reference:
        chosen, rejected = pairs.chosen_ratio, pairs.rejected_ratio
    if loss.means:
        chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    return beta * chosen, beta * rejected
