"""Outcome reward models: loss and measures against peers' numbers and slow loops."""

import json
import math
import random

import pytest
import torch

from stages.reward.outcome import auc, judged, outcome_losses, ranking
from tests.helpers.shared import SHARED, needs

VECTORS = SHARED / "vectors" / "direct.json"
TARGETS = {"target=every-token": "every_token", "target=last-token": "last_token"}


def cases(kind: str) -> list:
    found = json.loads(VECTORS.read_text()) if VECTORS.is_file() else []
    return [pytest.param(case, id=case["id"]) for case in found if case["kind"] == kind]


@needs(VECTORS)
def test_all_cases_are_there():
    assert len(cases("orm")) == 4 and len(cases("orm_ranking")) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", cases("orm"))
def test_losses_gradients_and_scores_are_the_peers(case, dtype):
    inputs, expected = case["inputs"], case["expected"]
    tolerance = case["tolerance"][str(dtype).removeprefix("torch.")]
    logits = torch.tensor(inputs["logits"], dtype=dtype, requires_grad=True)
    mask = torch.tensor(inputs["mask"], dtype=torch.bool)
    labels = torch.tensor(inputs["labels"])
    target = TARGETS[case["convention"]["name"]]
    loss = outcome_losses(logits, mask, labels, target).sum() / judged(mask, target).sum()
    loss.backward()
    scores = torch.where(judged(mask, "last_token"), logits, 0.0).sum(1).sigmoid()
    found = {"loss": loss.detach(), "grad_logits": logits.grad, "scores": scores.detach()}
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], torch.tensor(wanted, dtype=dtype), **tolerance)


@pytest.mark.parametrize("case", cases("orm_ranking"))
def test_rankings_are_the_peers(case):
    inputs = case["inputs"]
    labels = torch.tensor(inputs["labels"])
    best, pairs = ranking(torch.tensor(inputs["scores"]), labels, inputs["prompt"])
    assert best == pytest.approx(case["expected"]["top1_accuracy"])
    assert pairs == pytest.approx(case["expected"]["pairwise_accuracy"])


def test_the_losses_of_both_targets_by_hand():
    """A right completion of two tokens, a wrong one of three: -log of what its label is given."""

    def softplus(x: float) -> float:
        return math.log(1 + math.exp(x))

    logits = torch.tensor([[1.0, -2.0, 50.0], [0.5, 0.0, -1.0]], dtype=torch.float64)
    mask, labels = torch.tensor([[True, True, False], [True] * 3]), torch.tensor([1, 0])
    for target, expected in {
        "every_token": [[softplus(-1), softplus(2), 0], [softplus(0.5), math.log(2), softplus(-1)]],
        "last_token": [[0, softplus(2), 0], [0, 0, softplus(-1)]],
    }.items():
        wanted = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(outcome_losses(logits, mask, labels, target), wanted)


def test_a_completion_without_tokens_is_judged_nowhere():
    mask = torch.tensor([[False, False], [True, False]])
    for target in TARGETS.values():
        assert judged(mask, target).tolist() == [[False, False], [True, False]]


def test_the_area_is_that_of_a_double_loop():
    numbers = random.Random(1)
    scores = [numbers.choice([-1.0, 0.0, 0.5, 2.0]) for _ in range(40)]
    labels = [int(numbers.random() < 0.3) for _ in range(40)]
    wins = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, right in zip(scores, labels, strict=True)
        for b, other in zip(scores, labels, strict=True)
        if right and not other
    ]
    found = auc(torch.tensor(scores), torch.tensor(labels))
    assert found == pytest.approx(sum(wins) / len(wins), abs=1e-12)


def test_without_right_and_wrong_ones_there_is_no_area_and_no_pair():
    scores = torch.tensor([0.1, 0.2])
    assert auc(scores, torch.tensor([1, 1])) is None
    assert ranking(scores, torch.tensor([1, 1]), ["a", "a"]) == (1.0, None)
    # Right and wrong, but of two prompts.
    assert ranking(scores, torch.tensor([1, 0]), ["a", "b"]) == (0.5, None)
