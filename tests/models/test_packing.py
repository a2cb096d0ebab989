"""Packed weights give the products of the layers that they stand for, and leave no trace."""

import pytest
import torch
from torch import nn

from stages.models import packing
from stages.models.packing import packed


@pytest.fixture
def layers(monkeypatch) -> nn.Sequential:
    monkeypatch.setattr(packing, "PACKING_PAYS", 24 * 16)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 32, bias=False), nn.Linear(32, 4))


def packed_ones(model: nn.Module) -> list[bool]:
    return ["forward" in vars(layer) for layer in model.modules()]


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3, 16, 65])
def test_the_products_are_those_of_the_plain_layers_whatever_the_number_of_rows(layers, rows):
    states = torch.randn(rows, 2, 24)
    wanted = layers(states)
    with packed(layers):
        assert packed_ones(layers) == [False, True, True, False]  # the last is too small
        found = layers(states)
    assert found.shape == wanted.shape and found.is_contiguous()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("way", ["weights in bf16", "autocast"])
def test_in_bf16_the_products_are_within_a_rounding_of_it(layers, way):
    states = torch.randn(5, 24)
    if way == "weights in bf16":
        layers, states = layers.to(torch.bfloat16), states.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        wanted = layers[1](layers[0](states))
        with packed(layers):
            found = layers[1](layers[0](states))
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7)


@torch.no_grad()
def test_after_the_block_the_layers_are_plain_also_where_it_failed(layers):
    states = torch.randn(2, 24)
    wanted = layers(states)
    with pytest.raises(KeyError), packed(layers):
        raise KeyError
    assert not any(packed_ones(layers))
    layers[0].weight.mul_(2)
    layers[0].bias.mul_(2)
    assert not torch.equal(layers(states), wanted)
    with packed(layers), packed(layers):
        pass
    assert not any(packed_ones(layers))


def test_layers_of_other_kinds_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(packing, "PACKING_PAYS", 1)

    class Own(nn.Linear):
        pass

    layers = nn.Sequential(Own(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4).double())
    with packed(layers):
        assert not any(packed_ones(layers))
