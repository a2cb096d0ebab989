import math

import pytest
import torch

from stages.models.log_probs import token_entropy, token_log_probs

LOGITS = torch.tensor([2.0, 1.0, 0.0])
FIRST = torch.tensor(0)


@pytest.mark.parametrize("temperature, wanted", [(0.5, -0.142932), (1.0, -0.407606)])
def test_logits_are_divided_by_the_temperature_before_the_softmax(temperature, wanted):
    assert token_log_probs(LOGITS, FIRST, temperature).item() == pytest.approx(wanted, abs=1e-6)


def test_log_probs_are_torchs_log_softmax_at_the_ids():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 6, 3], [2, 2, 5]])
    wanted = torch.log_softmax(logits / 0.7, -1)
    for b in range(2):
        for t in range(3):
            got = token_log_probs(logits, ids, 0.7)[b, t].item()
            assert got == pytest.approx(wanted[b, t, ids[b, t]].item(), abs=1e-6)


def test_probabilities_of_the_whole_vocabulary_add_up_to_one():
    logits = torch.tensor([[40.0, -3.0, 0.5, 39.0]])
    log_probs = token_log_probs(logits.expand(4, 4), torch.arange(4), 1.0)
    assert log_probs.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    assert (log_probs <= 0).all()


def test_half_precision_logits_are_raised_to_float32_before_the_softmax():
    logits = torch.randn(4000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16) * 4
    ids = torch.arange(4000)
    log_probs = token_log_probs(logits.expand(4000, 4000), ids, 0.6)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, torch.log_softmax(logits.float() / 0.6, -1))
    assert token_entropy(logits, 0.6).dtype == torch.float32


def test_entropy_of_a_uniform_and_of_a_certain_token():
    assert token_entropy(torch.zeros(2, 8), 1.0).tolist() == pytest.approx([math.log(8)] * 2)
    assert token_entropy(torch.tensor([0.0, -math.inf, -math.inf]), 1.0).item() == 0.0
    assert token_entropy(torch.tensor([200.0, 0.0]), 1.0).item() == 0.0


def test_entropy_grows_with_the_temperature():
    p = math.exp(2) / (1 + math.exp(2))
    wanted = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert token_entropy(torch.tensor([1.0, 0.0]), 0.5).item() == pytest.approx(wanted)
    assert token_entropy(LOGITS, 2.0) > token_entropy(LOGITS, 1.0)


@pytest.mark.parametrize("temperature", [0.0, -0.5, math.nan])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        token_log_probs(LOGITS, FIRST, temperature)
    with pytest.raises(ValueError, match="temperature"):
        token_entropy(LOGITS, temperature)


def test_gradients_in_float64():
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, ids, 0.7), logits)
    assert torch.autograd.gradcheck(lambda x: token_entropy(x, 0.7), logits)
