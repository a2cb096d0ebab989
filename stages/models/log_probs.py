"""Log-probabilities and entropy of a categorical over the vocabulary, in nats.

Letters: V vocabulary; `...` any leading shape, usually (B, T): B sequences, T tokens.

This is the one log-prob rule of the pipeline: old, new and reference log-probs all come from
`token_log_probs` at the temperature that the completions were sampled at, over the whole
vocabulary (top-k, top-p and min-p narrow the sampling, never the scoring).
"""

import torch
from torch import Tensor


def token_log_probs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """(..., V), (...) -> (...): log-softmax of `logits / temperature` at `ids`, at least float32.

    The chosen logit minus the logsumexp, so that no second (..., V) tensor of log-probs is kept.
    Half-precision logits are raised to float32 first (in bf16 the tail is off by up to 0.13);
    float64 stays float64. Every id must be in 0..V-1, also at padding. Raises ValueError for a
    temperature that is not above 0: greedy decoding has no log-probs to divide out.
    """
    scaled = _scale(logits, temperature)
    chosen = scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def token_entropy(logits: Tensor, temperature: float) -> Tensor:
    """(..., V) -> (...): entropy of softmax(`logits / temperature`), between 0 and log V.

    A logit of -inf (a token ruled out) adds 0. Precision and errors as in `token_log_probs`.
    """
    return torch.special.entr(_scale(logits, temperature).softmax(-1)).sum(-1)


def _scale(logits: Tensor, temperature: float) -> Tensor:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, expected a number above 0")
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
