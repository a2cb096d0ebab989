import pytest
import torch

from stages.models.scorers import (
    action_values,
    reference_log_probs,
    scores,
    scores_and_values,
    state_values,
)
from stages.score import column_of, total_reward
from tests.helpers.models import POLICIES, SCORERS, plain_log_probs

each_scorer = pytest.mark.parametrize("make", SCORERS.values(), ids=SCORERS)
PAD_IDS = {"no pad id": None, "pad is EOS": 2, "pad is another id": 5}
each_pad = pytest.mark.parametrize("pad", PAD_IDS.values(), ids=PAD_IDS)

# Some end in 2 (EOS), some in 5; both stand inside as well.
PROMPTS = [[3, 9, 27], [7], [3, 9, 27], [3, 9, 2, 5, 40, 2]]
COMPLETIONS = [[11, 2], [12, 13, 14, 5, 5, 5], [2], [5, 2, 2]]
ROWS = [
    {"prompt_ids": prompt, "completion_ids": completion}
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
]


@torch.no_grad()
def plain_score(scorer, ids: list[int]) -> float:
    """The score of one row on its own by transformers' classifier, whose pad id is not set."""
    pad, scorer.config.pad_token_id = scorer.config.pad_token_id, None
    score = scorer(input_ids=torch.tensor([ids]), use_cache=False).logits.item()
    scorer.config.pad_token_id = pad
    return score


@torch.no_grad()
@each_pad
@each_scorer
def test_w01_the_score_is_read_at_the_last_real_token_whatever_the_pad_id_and_the_mates(make, pad):
    scorer = make(pad_token_id=pad, eos_token_id=2)
    wanted = [plain_score(scorer, p + c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert max(wanted) - min(wanted) > 0.01
    assert scores(scorer, PROMPTS, COMPLETIONS).tolist() == pytest.approx(wanted, abs=1e-5)
    for i in range(4):
        alone = scores(scorer, PROMPTS[i : i + 1], COMPLETIONS[i : i + 1]).item()
        assert alone == pytest.approx(wanted[i], abs=1e-5)
    back = scores(scorer, PROMPTS[::-1], COMPLETIONS[::-1]).tolist()
    assert back[::-1] == pytest.approx(wanted, abs=1e-5)


@torch.no_grad()
@each_pad
@each_scorer
def test_each_value_is_the_score_of_what_stands_there(make, pad):
    scorer = make(pad_token_id=pad)
    values, lengths = state_values(scorer, PROMPTS, COMPLETIONS)
    assert lengths.tolist() == [2, 6, 1, 3] and values.shape == (4, 7)
    for b, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        wanted = [plain_score(scorer, prompt + completion[:t]) for t in range(len(completion) + 1)]
        assert values[b, : len(wanted)].tolist() == pytest.approx(wanted, abs=1e-5)


@torch.no_grad()
@each_scorer
def test_the_value_at_the_last_state_is_the_score(make):
    scorer = make()
    values, lengths = state_values(scorer, PROMPTS, COMPLETIONS)
    last = [values[b, length].item() for b, length in enumerate(lengths.tolist())]
    assert last == pytest.approx(scores(scorer, PROMPTS, COMPLETIONS).tolist(), abs=1e-6)


@torch.no_grad()
@each_scorer
def test_action_values_stand_before_each_token(make):
    scorer = make()
    values, mask = action_values(scorer, PROMPTS, COMPLETIONS)
    assert mask.sum(1).tolist() == [2, 6, 1, 3]
    for b, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        wanted = [plain_score(scorer, prompt + completion[:t]) for t in range(len(completion))]
        assert values[b][mask[b]].tolist() == pytest.approx(wanted, abs=1e-5)


@each_scorer
def test_scores_have_the_gradient_of_the_plain_passes(make):
    scorer = make()
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0])
    (scores(scorer, PROMPTS, COMPLETIONS) * weight).sum().backward()
    got = [p.grad.clone() for p in scorer.parameters()]
    scorer.zero_grad()
    for w, prompt, completion in zip(weight, PROMPTS, COMPLETIONS, strict=True):
        ids = torch.tensor([prompt + completion])
        (w * scorer(input_ids=ids, use_cache=False).logits.sum()).backward()
    for gradient, parameter in zip(got, scorer.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


@each_scorer
def test_the_buffer_gets_the_score_and_the_values_before_each_token(make):
    scorer = make(pad_token_id=2, eos_token_id=2)
    found, values = scores_and_values(scorer, ROWS)
    for b, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        assert found[b] == pytest.approx(plain_score(scorer, prompt + completion), abs=1e-5)
        wanted = [plain_score(scorer, prompt + completion[:t]) for t in range(len(completion))]
        assert values[b] == pytest.approx(wanted, abs=1e-5)
    assert scores_and_values(scorer, ROWS) == (found, values)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_reference_log_probs_are_those_of_plain_passes_at_the_temperature(make):
    reference = make()
    found = reference_log_probs(reference, ROWS, 0.6)
    assert [len(row) for row in found] == [2, 6, 1, 3]
    for prompt, completion, row in zip(PROMPTS, COMPLETIONS, found, strict=True):
        wanted = plain_log_probs(reference, prompt, completion, 0.6)
        torch.testing.assert_close(torch.tensor(row), wanted, rtol=0, atol=1e-5)


def test_the_reward_is_the_weighted_sum_of_its_components():
    row = {"reward_correctness": 1.0, "reward_model": -2.0, "reward_format": None}
    weights = {"correctness": 1.0, "reward_model": 0.25, "format": None}
    assert total_reward(row, weights) == 0.5
    assert total_reward(row, weights | {"reward_model": 0.0}) == 1.0
    assert [column_of(name) for name in weights] == [
        "reward_correctness",
        "reward_model",
        "reward_format",
    ]


def test_a_row_that_lacks_a_component_that_counts_is_unscorable_and_not_zero():
    row = {"reward_correctness": None, "reward_model": -2.0}
    assert total_reward(row, {"correctness": 1.0, "reward_model": 1.0}) is None
    assert total_reward(row, {"correctness": None, "reward_model": 1.0}) == -2.0
