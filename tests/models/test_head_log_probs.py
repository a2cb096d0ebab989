"""Log-probs of a head by pieces: the numbers and gradients of whole logits, without the logits."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stages.models import log_probs
from stages.models.forward import head_logits
from stages.models.log_probs import head_log_probs, token_entropy, token_log_probs
from tests.helpers.models import VOCABULARY, gpt2, llama

TOKENS = 23
CHANGES = {
    "plain": {},
    "soft cap": {"final_logit_softcapping": 3.0},
    "scaled": {"logits_scaling": 4.0, "logit_scale": 0.7},
    "all": {"final_logit_softcapping": 2.0, "logits_scaling": 0.5, "logit_scale": 1.3},
}


@pytest.fixture
def by_pieces(monkeypatch):
    """Pieces of 5 tokens, the last one of 3."""
    monkeypatch.setattr(log_probs, "PIECE", 5 * VOCABULARY)


def states_and_ids(width: int, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, width, generator=generator, dtype=dtype)
    return hidden.requires_grad_(), torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def model_of(make, changes: dict, dtype=torch.float32):
    model = make().to(dtype)
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def gradients(model, hidden, found) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 2, TOKENS, dtype=found.dtype)
    parameters = [hidden, *(p for p in model.get_output_embeddings().parameters())]
    return torch.autograd.grad((found * weights).sum(), parameters)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_pieces_give_the_log_probs_entropies_and_gradients_of_whole_logits(
    by_pieces, make, changes
):
    model = model_of(make, changes, torch.float64)
    hidden, ids = states_and_ids(model.config.hidden_size, torch.float64)
    found, entropy = head_log_probs(model, hidden, ids, 0.7, entropy=True)
    logits = head_logits(model, hidden)
    wanted = (logits / 0.7).log_softmax(-1)[torch.arange(TOKENS), ids]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, token_entropy(logits, 0.7).detach())
    assert not entropy.requires_grad
    for ours, theirs in zip(
        gradients(model, hidden, found), gradients(model, hidden, wanted), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=5e-7, atol=1e-10)


def test_gradcheck_in_float64(monkeypatch):
    config = llama().config
    config.final_logit_softcapping, config.logit_scale = 2.0, 1.5
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((7, 3), (11, 3), (11,))
    )
    ids = torch.tensor([0, 10, 3, 3, 7, 1, 9])
    monkeypatch.setattr(log_probs, "PIECE", 2 * 11)
    run = log_probs._HeadLogProbs.apply
    assert torch.autograd.gradcheck(
        lambda h, w, b: run(h, ids, w, b, config, 0.8, False)[0], (hidden, weight, bias)
    )


class Largest(TorchDispatchMode):
    """Notes the most rows of any tensor made whose last dimension is the vocabulary.

    The head itself is (V, D), its transpose (D, V).
    """

    def __init__(self, width: int):
        super().__init__()
        self.rows, self.width = 0, width

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            shaped = isinstance(tensor, torch.Tensor) and tensor.ndim == 2
            if shaped and tensor.shape[-1] == VOCABULARY and len(tensor) != self.width:
                self.rows = max(self.rows, len(tensor))
        return found


@pytest.mark.parametrize("pieces", [True, False])
def test_no_more_than_a_piece_of_the_logits_is_ever_made(monkeypatch, pieces):
    if pieces:
        monkeypatch.setattr(log_probs, "PIECE", 5 * VOCABULARY)
    model = llama()
    assert model.config.hidden_size != TOKENS
    hidden, ids = states_and_ids(model.config.hidden_size)
    with Largest(model.config.hidden_size) as largest:
        found, _ = head_log_probs(model, hidden, ids, 1.0, entropy=True)
        found.sum().backward()
    assert largest.rows == (5 if pieces else TOKENS)


def test_a_tied_head_adds_its_gradient_to_the_embeddings(by_pieces):
    model = llama(tied=True)
    hidden, ids = states_and_ids(model.config.hidden_size)
    total = (
        model.get_input_embeddings()(ids).sum() + head_log_probs(model, hidden, ids, 1.0)[0].sum()
    )
    total.backward()
    found = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    logits = head_logits(model, hidden)
    (model.get_input_embeddings()(ids).sum() + token_log_probs(logits, ids, 1.0).sum()).backward()
    torch.testing.assert_close(found, model.get_input_embeddings().weight.grad)


def test_a_frozen_head_gets_no_gradient_and_costs_none(by_pieces):
    model = llama(tied=False)
    model.get_output_embeddings().weight.requires_grad_(False)
    hidden, ids = states_and_ids(model.config.hidden_size)
    head_log_probs(model, hidden, ids, 1.0)[0].sum().backward()
    assert model.get_output_embeddings().weight.grad is None
    (wanted,) = torch.autograd.grad(
        token_log_probs(head_logits(model, hidden), ids, 1.0).sum(), hidden
    )
    torch.testing.assert_close(hidden.grad, wanted)


def test_under_autocast_products_are_bf16_and_the_softmax_float32(by_pieces, monkeypatch):
    model = llama(tied=False)
    hidden, ids = states_and_ids(model.config.hidden_size)
    head = model.get_output_embeddings().weight

    def both() -> tuple:
        with torch.autocast("cpu", torch.bfloat16):
            found, _ = head_log_probs(model, hidden, ids, 1.0)
        return found, *torch.autograd.grad(found.sum(), (hidden, head))

    ours = both()
    monkeypatch.setattr(log_probs, "PIECE", 1 << 24)
    whole = both()
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours[0], whole[0], rtol=0, atol=1e-6)
    for piece, plain in zip(ours[1:], whole[1:], strict=True):
        torch.testing.assert_close(piece, plain, rtol=0.02, atol=0.02)


class OddHead(nn.Linear):
    """A head with code of its own."""

    def forward(self, hidden):
        return super().forward(hidden).sin()


def test_a_head_with_code_of_its_own_goes_through_it_piece_by_piece(by_pieces):
    model = llama(tied=False)
    odd = OddHead(model.config.hidden_size, VOCABULARY)
    model.set_output_embeddings(odd)
    hidden, ids = states_and_ids(model.config.hidden_size)
    found, entropy = head_log_probs(model, hidden, ids, 0.9, entropy=True)
    logits = head_logits(model, hidden)
    wanted = token_log_probs(logits, ids, 0.9)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(entropy, token_entropy(logits, 0.9).detach())
    for ours, theirs in zip(
        gradients(model, hidden, found), gradients(model, hidden, wanted), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_temperature_of_0_is_refused(by_pieces):
    model = llama()
    hidden, ids = states_and_ids(model.config.hidden_size)
    with pytest.raises(ValueError, match="temperature is 0"):
        head_log_probs(model, hidden, ids, 0.0)
