"""Layers computed anew in the backward pass: the numbers of plain rows, with less kept."""

import pytest
import torch
from transformers import GPT2LMHeadModel

from stages.base.errors import BadKnob
from stages.models.forward import completion_states, full_states
from stages.models.log_probs import head_log_probs
from stages.models.recompute import recompute_layers
from stages.models.scorers import scores
from tests.helpers.models import POLICIES, SCORERS, gpt2, llama, sliding_mistral

PROMPTS = [[5, 6, 7, 8], [5, 6, 7, 8], [1, 2], [5, 6, 7, 8, 9]]
COMPLETIONS = [[11, 12, 13, 0, 0], [21], [0, 31, 32], [41, 42]]
MODELS = POLICIES | {"sliding mistral": sliding_mistral}


def loss_and_gradients(model, states_of=completion_states, dtype=None) -> list[torch.Tensor]:
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        states = states_of(model.base_model, PROMPTS, COMPLETIONS)
        mask = states.action_mask
        loss = -head_log_probs(model, states.hidden[mask], states.ids[mask], 0.9)[0].sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_loss_and_gradients_are_those_of_plain_rows_bit_for_bit(monkeypatch, make, training):
    monkeypatch.setattr("stages.models.forward.SHARING_PAYS", 0)
    plain, model = make().train(training), make().train(training)
    recompute_layers(model)
    torch.manual_seed(1)  # GPT-2 drops out in training mode
    wanted = loss_and_gradients(plain, full_states)
    torch.manual_seed(1)
    found = loss_and_gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_under_autocast_short_rows_are_computed_anew_by_the_same_kernel():
    plain, model = llama(), llama()
    recompute_layers(model)
    wanted = loss_and_gradients(plain, full_states, torch.bfloat16)
    found = loss_and_gradients(model, dtype=torch.bfloat16)
    torch.testing.assert_close(found[0], wanted[0], rtol=0.01, atol=0.0)
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        assert (ours - theirs).norm() <= 0.03 * theirs.norm() + 1e-6


@pytest.mark.parametrize("make", SCORERS.values(), ids=SCORERS)
def test_a_scorer_is_computed_anew_too(make):
    found = []
    for model in (make(), make()):
        if found:
            recompute_layers(model)
        total = scores(model, PROMPTS, COMPLETIONS).square().sum()
        found.append([total.detach(), *torch.autograd.grad(total, list(model.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def kept_numbers(model) -> int:
    """Numbers that autograd keeps of one forward pass, weights aside."""
    weights, kept = {p.data_ptr() for p in model.parameters()}, {}

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        states = full_states(model.base_model, PROMPTS, COMPLETIONS)
    del states
    return sum(tensor.untyped_storage().nbytes() // 4 for tensor in kept.values())


def test_activations_within_layers_are_not_kept():
    plain, model = llama(), llama()
    recompute_layers(model)
    assert kept_numbers(model) < kept_numbers(plain) / 4


def test_layers_run_twice_with_a_backward_pass_and_once_without_gradients():
    model = llama()
    calls = []
    layer = model.base_model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    recompute_layers(model)
    with torch.no_grad():
        completion_states(model.base_model, PROMPTS, COMPLETIONS)
    assert len(calls) == 1
    loss_and_gradients(model)
    assert len(calls) == 3


def test_saved_weights_know_nothing_of_it(tmp_path):
    model = gpt2()
    names = list(model.state_dict())
    recompute_layers(model)
    model.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert (
        list(again.state_dict()) == names
        and "recomput" not in (tmp_path / "config.json").read_text()
    )


def test_a_model_without_such_layers_is_refused():
    model = llama()
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(BadKnob, match="gradient_checkpointing.*LlamaForCausalLM"):
        recompute_layers(model)
