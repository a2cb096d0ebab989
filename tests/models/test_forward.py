import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
)

from stages.models.forward import (
    can_share,
    check_head,
    completion_states,
    full_states,
    head_logits,
    left_pad,
    prefill,
    right_pad,
)
from stages.models.log_probs import token_log_probs
from tests.helpers.architectures import seeded
from tests.helpers.models import POLICIES, gpt2, llama, llama_config, plain_logits, sliding_mistral

PROMPTS = {
    "one row": [[5, 6, 7, 8]],
    "one prompt for all": [[5, 6, 7, 8]] * 4,
    "two prompts, interleaved": [[1, 2, 3], [4, 5], [1, 2, 3], [4, 5]],
    "nothing in common": [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [9], [3, 3]],
    "one opening in common": [[1, 2, 3, 4], [1, 2, 3, 9, 9], [1, 2, 3, 7], [1, 2, 3, 4]],
    "one token each": [[4], [4], [7], [0]],
    "one a prefix of the next": [[1, 2], [1, 2, 3], [1, 2, 3, 4, 5], [1]],
    "the id 0 on both sides": [[0, 0, 5], [0, 5], [0, 0], [5, 0]],
}
COMPLETIONS = [[11, 12, 13, 0, 0], [21], [0, 31, 32], [41, 42, 43, 44, 45, 46, 47]]

each_model = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
each_layout = pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
each_way = pytest.mark.parametrize("states_of", [completion_states, full_states])


@pytest.fixture(autouse=True, params=["shares", "joins", "tree"])
def route(request, monkeypatch):
    """Every test all ways: each prompt on its own, only the opening shared, one row of segments."""
    pays = 0 if request.param == "shares" else float("inf")
    monkeypatch.setattr("stages.models.forward.SHARING_PAYS", pays)
    costs = -float("inf") if request.param == "tree" else float("inf")
    monkeypatch.setattr("stages.models.prefix_tree.SEGMENT_COSTS", costs)
    return request.param


def state_of(model, ids: list[int]) -> torch.Tensor:
    """(D,): the last state of one unpadded row on its own."""
    return model.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]


def gradients(model) -> torch.Tensor:
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


@torch.no_grad()
@each_way
@each_layout
@each_model
def test_each_state_is_that_of_the_row_alone_up_to_there(make, prompts, states_of):
    model, completions = make(), COMPLETIONS[: len(prompts)]
    states = states_of(model.base_model, prompts, completions, read_last=True)
    assert states.hidden.shape == (len(prompts), max(map(len, completions)) + 1, 32)
    for b, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for t in range(len(completion) + 1):
            wanted = state_of(model, prompt + completion[:t])
            torch.testing.assert_close(states.hidden[b, t], wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@each_way
@each_layout
def test_without_read_last_the_states_that_act_are_the_same(prompts, states_of):
    model, completions = gpt2(), COMPLETIONS[: len(prompts)]
    states = states_of(model.base_model, prompts, completions)
    assert states.hidden.shape[1] == max(map(len, completions))
    for b, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for t in range(len(completion)):
            wanted = state_of(model, prompt + completion[:t])
            torch.testing.assert_close(states.hidden[b, t], wanted, rtol=1e-4, atol=1e-5)


@each_layout
@each_model
def test_log_probs_and_gradients_are_those_of_plain_passes_over_single_rows(make, prompts):
    model, completions = make(), COMPLETIONS[: len(prompts)]
    weight = torch.randn(len(prompts), 7, generator=torch.Generator().manual_seed(1))

    states = completion_states(model.base_model, prompts, completions)
    mask = states.action_mask
    logits = head_logits(model, states.hidden[mask])
    log_probs = token_log_probs(logits, states.ids[mask], 0.7)
    (log_probs * weight[:, : mask.shape[1]][mask]).sum().backward()
    got = gradients(model)

    wanted = []
    for b, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        scaled = plain_logits(model, prompt, completion) / 0.7
        for t, token in enumerate(completion):
            wanted.append(torch.log_softmax(scaled[t], -1)[token])
            (wanted[-1] * weight[b, t]).backward(retain_graph=True)
    torch.testing.assert_close(log_probs, torch.stack(wanted), rtol=1e-5, atol=1e-5)
    expected = gradients(model)
    assert (got - expected).norm() <= 1e-4 * expected.norm()


@torch.no_grad()
@each_model
def test_the_result_of_a_row_does_not_depend_on_its_batch_mates(make):
    model = make()
    row, mates = ([3, 9, 27], [5, 0, 7]), [([1] * 20, [2] * 15), ([3, 9], [4])]
    alone = completion_states(model.base_model, [row[0]], [row[1]]).hidden[0, :3]
    for others in (mates, [row, *mates], [mates[1]], [row] * 5):
        batch = [*others, row]
        together = completion_states(
            model.base_model, [prompt for prompt, _ in batch], [answer for _, answer in batch]
        )
        torch.testing.assert_close(together.hidden[-1, :3], alone, rtol=1e-4, atol=1e-5)


def test_padding_whose_embedding_is_zero_leaks_no_nan():
    """Gemma 3n takes the root of a hidden state's mean square, also where a row is padded."""
    model = seeded("Gemma3nText", 48)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    model.get_input_embeddings().padding_idx = None  # as stages load it: every token learns
    full_states(model.base_model, [[3, 9], [5]], [[7, 2, 8], [4]]).hidden[1, 0].sum().backward()
    assert gradients(model).isfinite().all()


def test_action_masks_come_from_lengths_and_not_from_ids():
    states = completion_states(llama().base_model, [[0], [0], [0]], [[0, 0, 0], [7], [0, 7]])
    assert states.lengths.tolist() == [3, 1, 2]
    assert states.ids.tolist() == [[0, 0, 0], [7, 0, 0], [0, 7, 0]]
    assert states.action_mask.tolist() == [
        [True, True, True],
        [True, False, False],
        [True, True, False],
    ]


def test_padding_on_either_side_is_marked_by_lengths():
    ids, lengths = right_pad([[5, 0], [6, 7, 8]])
    assert ids.tolist() == [[5, 0, 0], [6, 7, 8]] and lengths.tolist() == [2, 3]
    ids, mask = left_pad([[0, 5], [6, 7, 8]])
    assert ids.tolist() == [[0, 0, 5], [6, 7, 8]]
    assert mask.tolist() == [[False, True, True], [True, True, True]]


def test_an_opening_is_read_once_each_prompt_once_and_no_last_token_needlessly(route):
    model, fed = llama(), []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    prompts = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 9, 9], [1, 2, 3, 9, 9]]
    completion_states(model.base_model, prompts, [[5, 6, 7]] * 4)
    # The opening, then the rests of two prompts and all but the last token; or those in one pass;
    # or all of it in one row.
    shapes = {
        "shares": [(1, 3), (2, 2), (4, 2)],
        "joins": [(1, 3), (4, 4)],
        "tree": [(1, 3 + 1 + 2 + 4 * 2)],
    }
    assert fed == shapes[route]


@torch.no_grad()
def test_a_prefill_ends_in_the_last_state_of_each_prompt():
    model, prompts = gpt2(), [[1, 2, 3, 4, 5], [1, 2, 9], [1, 2]]
    read = prefill(model.base_model, prompts)
    for last, prompt in zip(read.last, prompts, strict=True):
        torch.testing.assert_close(last, state_of(model, prompt), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@each_layout
def test_a_sliding_window_is_computed_by_the_plain_pass_and_right(prompts):
    model, completions = sliding_mistral(), COMPLETIONS[: len(prompts)]
    assert not can_share(model.base_model)
    shapes = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    states = completion_states(model.base_model, prompts, completions, read_last=True)
    assert shapes == [len(prompts)]
    for b, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for t in range(len(completion) + 1):
            wanted = model.base_model(
                input_ids=torch.tensor([prompt + completion[:t]]), use_cache=False
            ).last_hidden_state[0, -1]
            torch.testing.assert_close(states.hidden[b, t], wanted, rtol=1e-4, atol=1e-5)


SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
SCALED_HEADS = {
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0)
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("make", SCALED_HEADS.values(), ids=SCALED_HEADS)
def test_heads_that_scale_or_cap_their_logits_are_followed(make):
    torch.manual_seed(0)
    model, ids = make().eval(), torch.tensor([[1, 7, 40]])
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = model(input_ids=ids, use_cache=False).logits
    assert (model.get_output_embeddings()(hidden) - wanted).abs().max() > 0.1
    torch.testing.assert_close(head_logits(model, hidden), wanted)
    check_head(model)


@each_model
def test_a_plain_head_passes_the_check(make):
    check_head(make())


def test_a_model_that_does_more_after_its_backbone_is_refused():
    class Halved(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits / 2
            return output

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="Halved"):
        check_head(Halved(llama_config()).eval())
