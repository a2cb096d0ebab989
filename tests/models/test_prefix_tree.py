import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

from stages.models import prefix_tree
from stages.models.forward import completion_states, full_states, tree_states
from stages.models.prefix_tree import Segment, attend, packable, plant, tree_pays
from tests.helpers.models import POLICIES, gpt2, llama, llama_config

PROMPTS = [[1, 2, 3], [1, 2, 9, 9], [1, 2, 3], [1, 2, 7]]
COMPLETIONS = [[11, 12, 13], [21, 22], [31], [41]]


def segments(read_last: bool) -> tuple[list[Segment], list[list[int]]]:
    planted = plant(PROMPTS, COMPLETIONS, read_last)
    return planted.tree.segments, planted.places


def test_each_prefix_is_a_segment_and_a_prompt_with_one_completion_is_one_with_it():
    found, places = segments(False)
    assert found == [
        Segment((1, 2)),
        Segment((3,), (0,)),
        Segment((11, 12), (0, 1)),
        Segment((9, 9, 21), (0,)),
        Segment((7,), (0,)),
    ]
    assert places == [[2, 3, 4], [6, 7], [2], [8]]


def test_with_the_last_tokens_read_each_row_has_one_state_more():
    found, places = segments(True)
    assert [segment.ids for segment in found] == [
        (1, 2),
        (3,),
        (11, 12, 13),
        (31,),
        (9, 9, 21, 22),
        (7, 41),
    ]
    assert places == [[2, 3, 4, 5], [8, 9, 10], [2, 6], [11, 12]]


def test_rows_that_open_differently_and_a_single_row_have_no_opening():
    assert plant([[1, 2], [3]], [[4], [5]], True).tree.segments[0] == Segment((1, 2, 4))
    assert plant([[1, 2]], [[4, 5]], False).tree.segments == [Segment((1, 2, 4))]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_is_that_of_the_layers_alone(dropout):
    model = LlamaForCausalLM(llama_config(dropout=dropout)).train()
    torch.manual_seed(0)
    first = tree_states(model.base_model, PROMPTS, COMPLETIONS).hidden
    second = tree_states(model.base_model, PROMPTS, COMPLETIONS).hidden
    assert torch.equal(first, second) == (dropout == 0)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_bf16_is_off_by_its_rounding_alone(make):
    model = make()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = tree_states(model.base_model, PROMPTS, COMPLETIONS)
    wanted = full_states(model.base_model, PROMPTS, COMPLETIONS).hidden
    mask = found.action_mask
    assert (found.hidden[mask].float() - wanted[mask]).norm() < 0.03 * wanted[mask].norm()


def test_other_attention_than_torchs_own_is_left_as_it_is():
    model = llama()
    assert packable(model.base_model)
    model.set_attn_implementation("eager")
    assert not packable(model.base_model)


def test_a_layer_that_changes_its_scores_is_refused_by_name():
    one = torch.ones(1, 1, 1, 1)
    with pytest.raises(ValueError, match="softcap"):
        attend(None, one, one, one, None, softcap=30.0)
    with pytest.raises(ValueError, match="s_aux"):
        attend(None, one, one, one, None, s_aux=torch.zeros(1))


def test_the_models_own_attention_is_back_after_the_pass_and_after_an_error():
    model = gpt2()
    wanted = full_states(model.base_model, PROMPTS, COMPLETIONS).hidden
    tree_states(model.base_model, PROMPTS, COMPLETIONS)
    with pytest.raises(IndexError):
        tree_states(model.base_model, [[10**6]], [[1, 2]])
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(full_states(model.base_model, PROMPTS, COMPLETIONS).hidden, wanted)


def test_a_tree_is_taken_where_it_saves_more_arithmetic_than_its_segments_cost(monkeypatch):
    model = llama().base_model
    tree = plant(PROMPTS, COMPLETIONS, False).tree
    per_token = model.num_parameters()
    monkeypatch.setattr(prefix_tree, "SEGMENT_COSTS", per_token)
    cost = len(tree.segments) * model.config.num_hidden_layers  # in tokens
    assert not tree_pays(model, tree, tree.size + cost)
    assert tree_pays(model, tree, tree.size + cost + 1)


def test_long_and_short_rows_side_by_side_cost_the_arithmetic_of_their_own_tokens(monkeypatch):
    model = llama()
    prompts, completions = [[1, 2, 3]] * 3, [[5] * 40, [6] * 2, [7] * 3]

    def arithmetic(cost: float) -> int:
        monkeypatch.setattr(prefix_tree, "SEGMENT_COSTS", cost)
        with FlopCounterMode(display=False) as counter:
            completion_states(model.base_model, prompts, completions)
        return counter.get_total_flops()

    assert arithmetic(0) < 0.5 * arithmetic(float("inf"))
