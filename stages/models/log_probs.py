"""Log-probabilities and entropy of a categorical over the vocabulary, in nats.

Letters: V vocabulary; `...` any leading shape, usually (B, T): B sequences, T tokens.

This is the one log-prob rule of the pipeline: old, new and reference log-probs all come from
`token_log_probs` at the temperature that the completions were sampled at, over the whole
vocabulary (top-k, top-p and min-p narrow the sampling, never the scoring).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from stages.models.forward import finished, head_logits

# Logits that may stand in memory at once: 64 MiB of float32. Part of the result to the last bit, as
# `threads` is: a product's rounding, and the order of a sum, depend on how it is cut.
PIECE = 1 << 24


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
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1 else logits / temperature


def head_log_probs(
    model: PreTrainedModel,
    hidden: Tensor,
    ids: Tensor,
    temperature: float,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(M, D), (M,) -> (M,) log-probs of `ids`, (M,) entropies without gradient, or None.

    `token_log_probs` and `token_entropy` of the head's logits, of which no more than `PIECE` stand
    in memory at once, forwards and backwards: the backward pass makes each piece anew. So the cost
    in memory is that of the states, not of tokens times vocabulary. A head that is no plain linear
    layer goes through its own code piece by piece.
    """
    head = model.get_output_embeddings()
    if len(ids) * model.config.get_text_config().vocab_size <= PIECE:
        logits = head_logits(model, hidden)
        return token_log_probs(logits, ids, temperature), _entropy(logits, temperature, entropy)
    if type(head) is nn.Linear:
        options = (model.config, temperature, entropy)
        return _HeadLogProbs.apply(hidden, ids, head.weight, head.bias, *options)

    def piece(states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = head_logits(model, states)
        return token_log_probs(logits, tokens, temperature), _entropy(logits, temperature, entropy)

    found = [
        checkpoint(piece, hidden[part], ids[part], use_reentrant=False)
        for part in pieces(len(ids), model.config.get_text_config().vocab_size)
    ]
    log_probs, entropies = zip(*found, strict=True)
    return torch.cat(log_probs), torch.cat(entropies) if entropy else None


def pieces(count: int, vocabulary: int) -> Iterator[slice]:
    """Parts of `count` tokens, the logits of each within `PIECE`."""
    size = max(1, PIECE // vocabulary)
    return (slice(start, start + size) for start in range(0, count, size))


@torch.no_grad()
def _entropy(logits: Tensor, temperature: float, wanted: bool) -> Tensor | None:
    return token_entropy(logits, temperature) if wanted else None


class _HeadLogProbs(torch.autograd.Function):
    """Log-probs of a linear head by pieces: keeps the logsumexp of each token, and no logits.

    With p the softmax of z, the logits over the temperature, the gradient by z of log p[id] is
    onehot(id) - p. All pieces take the same room, in place: what a piece needs is one (N, V), and a
    second one for the entropy.
    """

    @staticmethod
    def forward(ctx, hidden, ids, weight, bias, config, temperature, entropy):
        cast = _autocast_dtype(hidden)
        states, rows, shift = _cast(cast, hidden, weight, bias)
        log_probs, sums, entropies, room = [], [], [], _Room(rows, shift)
        for part in pieces(len(ids), len(weight)):
            scaled = _scale(finished(config, room.logits(states[part])), temperature)  # (N, V)
            top = scaled.amax(-1, keepdim=True)
            below = scaled.sub_(top)  # at most 0, so that no exponential overflows
            chosen = below.gather(-1, ids[part, None])[:, 0]
            if entropy:
                below.clamp_(
                    min=torch.finfo(below.dtype).min
                )  # -inf times its mass, 0, is no number
                mass = room.exponentials(below)
            else:
                mass = below.exp_()
            total = mass.sum(-1)
            log_probs.append(chosen - total.log())
            sums.append(top[:, 0] + total.log())
            if entropy:
                entropies.append(total.log() - torch.linalg.vecdot(mass, below) / total)
        ctx.save_for_backward(hidden, ids, weight, bias, torch.cat(sums))
        ctx.config, ctx.temperature, ctx.cast = config, temperature, cast
        found = torch.cat(entropies) if entropy else None
        if entropy:
            ctx.mark_non_differentiable(found)
        return torch.cat(log_probs), found

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, _):
        hidden, ids, weight, bias, sums = ctx.saved_tensors
        states, rows, shift = _cast(ctx.cast, hidden, weight, bias)
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(tensor) if tensor is not None and needed else None
            for tensor, needed in zip(
                (hidden, weight, bias), [ctx.needs_input_grad[i] for i in (0, 2, 3)], strict=True
            )
        )
        room = _Room(rows, shift)
        for part in pieces(len(ids), len(weight)):
            product = room.logits(states[part])  # (N, V)
            with torch.enable_grad():
                leaf = product.detach().requires_grad_()
                scaled = _scale(finished(ctx.config, leaf), ctx.temperature)
            values = product if scaled is leaf else scaled.detach().clone()
            by_scaled = values.sub_(sums[part, None]).exp_().mul_(-gradient[part, None])
            by_scaled.scatter_add_(1, ids[part, None], gradient[part, None])
            by_product = by_scaled
            if scaled is not leaf:
                (by_product,) = torch.autograd.grad(scaled, leaf, by_scaled)
            if of_hidden is not None:
                of_hidden[part] = by_product @ rows
            if of_weight is not None and of_weight.dtype == by_product.dtype:
                of_weight.addmm_(by_product.t(), states[part])  # in place: no second (V, D)
            elif of_weight is not None:
                of_weight += by_product.t() @ states[part]
            if of_bias is not None:
                of_bias += by_product.sum(0)
        return of_hidden, None, of_weight, of_bias, None, None, None


class _Room:
    """Memory for the logits of one piece and their exponentials, which every piece takes anew.

    The C library hands a block of this size back to the kernel, and each page of a new one costs a
    fault.
    """

    def __init__(self, rows: Tensor, shift: Tensor | None):
        self.rows, self.shift = rows, shift
        self.of_logits = self.of_exponentials = None

    def logits(self, states: Tensor) -> Tensor:
        """(N, D) -> (N, V): a view that the next call overwrites."""
        if self.of_logits is None:
            self.of_logits = states.new_empty(len(states), len(self.rows))
        out = self.of_logits[: len(states)]
        if self.shift is None:
            return torch.mm(states, self.rows.t(), out=out)
        return torch.addmm(self.shift, states, self.rows.t(), out=out)

    def exponentials(self, values: Tensor) -> Tensor:
        """(N, V) -> (N, V), likewise."""
        if self.of_exponentials is None:
            self.of_exponentials = torch.empty_like(values)
        return torch.exp(values, out=self.of_exponentials[: len(values)])


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast computes products in, where it is on: the backward pass does not see it."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _cast(dtype: torch.dtype | None, *tensors: Tensor | None) -> list[Tensor | None]:
    return [t if t is None or dtype is None else t.to(dtype) for t in tensors]
