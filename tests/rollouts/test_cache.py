"""A cache that grows in place holds what transformers' does, and is copied only where it must."""

import pytest
import torch
from transformers import DynamicCache

from stages.models.forward import prefill, step
from stages.rollouts.cache import GrowingBuffer, GrowingLayer, preallocate
from tests.helpers.models import POLICIES, gpt2, llama, sliding_mistral

PROMPTS = [[5, 6, 7, 8], [5, 6, 7], [5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
@torch.inference_mode()
def test_the_same_states_bit_for_bit_also_once_rows_have_left(make):
    model = make()
    found = []
    for grows in (False, True):
        read = prefill(model.base_model, PROMPTS)
        cache, mask, states = read.cache, read.mask, []
        if grows:
            preallocate(cache)
            assert all(type(layer) is GrowingLayer for layer in cache.layers)
        for t in range(9):
            if t == 4:
                kept = torch.tensor([0, 2])
                cache.batch_select_indices(kept)
                mask = mask[kept]
            ids = torch.arange(len(mask))[:, None] + t
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            states.append(step(model.base_model, ids, mask, cache))
        assert cache.get_seq_length() == mask.shape[1]
        found.append(states)
    assert all(torch.equal(plain, grows) for plain, grows in zip(*found, strict=True))


@torch.inference_mode()
def test_under_autocast_keys_are_held_in_bf16_and_the_states_are_the_same_bits():
    model, found = llama(), []
    with torch.autocast("cpu", torch.bfloat16):
        for grows in (False, True):
            read = prefill(model.base_model, PROMPTS)
            cache, mask, states = read.cache, read.mask, []
            assert cache.layers[0].keys.dtype == torch.float32
            if grows:
                preallocate(cache)
            for t in range(5):
                mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
                states.append(step(model.base_model, torch.full((3, 1), t), mask, cache))
            found.append(states)
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    assert {layer.values.dtype for layer in cache.layers} == {torch.bfloat16}
    assert all(torch.equal(plain, grows) for plain, grows in zip(*found, strict=True))


def test_what_is_held_is_copied_only_where_no_space_is_left():
    buffer, held = GrowingBuffer(), torch.arange(24.0).reshape(1, 1, 12, 2)
    places, whole = set(), held
    for t in range(6):
        more = torch.full((1, 1, 1, 2), float(t))
        held, whole = buffer.grown(held, more), torch.cat([whole, more], -2)
        assert torch.equal(held, whole)
        places.add(held.data_ptr())
    assert len(places) == 2  # 12 rows and one more leave space for three; then once again
    other = torch.zeros(1, 1, 3, 2)
    assert torch.equal(buffer.grown(other, other), torch.zeros(1, 1, 6, 2))
    assert torch.equal(held, whole)


def test_layers_of_other_kinds_and_empty_ones_stay_as_they_are():
    model = sliding_mistral()
    cache = DynamicCache(config=model.config)
    kinds = [type(layer) for layer in cache.layers]
    model(torch.tensor([[1, 2, 3]]), cache=cache, use_cache=True)
    preallocate(cache)
    assert [type(layer) for layer in cache.layers] == kinds
    empty = DynamicCache(config=gpt2().config)
    preallocate(empty)
    assert not any(isinstance(layer, GrowingLayer) for layer in empty.layers)
