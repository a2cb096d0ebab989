"""Log-probs of pairs, micro-batches, and the exact KL, against plain forward passes."""

import pytest
import torch

from stages.direct.losses import LOSSES, LossKnobs
from stages.direct.pairs import chosen_kl, losses, pair_log_probs, sums_of
from tests.helpers.models import gpt2, llama, plain_log_probs, random_ids

KNOBS = LossKnobs(0.3, 0.1, "conservative", 0.7, 0.4, 0.2)


def scored_pairs(count: int = 5) -> list[dict]:
    """Pairs of unlike lengths, with made-up log-probs of a reference."""
    rows = []
    for i in range(count):
        prompt, chosen, rejected = random_ids(i, 2 + i % 4, 1 + i % 3, 2 + i % 2)
        rows.append(
            {
                "prompt_ids": prompt,
                "chosen_ids": chosen,
                "rejected_ids": rejected,
                "margin": 0.25 * i,
                "log_probs_ref_chosen": [-1.0 - 0.1 * t for t in range(len(chosen))],
                "log_probs_ref_rejected": [-2.0 + 0.1 * t for t in range(len(rejected))],
            }
        )
    return rows


def plain_log_prob(policy, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-prob of an answer by one forward pass over that row alone."""
    return plain_log_probs(policy, prompt, answer).sum()


@pytest.mark.parametrize("make", [llama, gpt2])
def test_both_sides_are_summed_over_their_own_tokens(make):
    policy, rows = make(), scored_pairs()
    with torch.no_grad():
        found = pair_log_probs(policy, rows)
        for side, sums in (("chosen", found.chosen), ("rejected", found.rejected)):
            wanted = [plain_log_prob(policy, r["prompt_ids"], r[f"{side}_ids"]) for r in rows]
            torch.testing.assert_close(sums, torch.stack(wanted), rtol=1e-5, atol=1e-5)
    assert found.chosen_tokens.tolist() == [len(row["chosen_ids"]) for row in rows]
    assert found.rejected_tokens.tolist() == [len(row["rejected_ids"]) for row in rows]
    assert found.rejected_ref[1].item() == pytest.approx(-2.0 - 1.9 - 1.8)
    assert found.margin.tolist() == [0.25 * i for i in range(5)]


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_change_no_gradient(name):
    rows = scored_pairs()

    def gradients(batches: list[list[dict]]) -> list[torch.Tensor]:
        policy = llama()
        for batch in batches:
            pairs = pair_log_probs(policy, batch, LOSSES[name].reference)
            (losses(pairs, LOSSES[name], KNOBS, 0.6).sum() / len(rows)).backward()
        return [parameter.grad for parameter in policy.parameters()]

    for whole, parts in zip(
        gradients([rows]), gradients([rows[:1], rows[1:4], rows[4:]]), strict=True
    ):
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


def test_the_fine_tuning_term_is_the_mean_over_the_chosen_tokens():
    policy, rows = llama(), scored_pairs()
    with torch.no_grad():
        pairs = pair_log_probs(policy, rows)
        added = losses(pairs, LOSSES["ipo"], KNOBS, 2.0) - losses(pairs, LOSSES["ipo"], KNOBS, 0.0)
    wanted = [
        -2.0 * plain_log_prob(policy, r["prompt_ids"], r["chosen_ids"]) / len(r["chosen_ids"])
        for r in rows
    ]
    torch.testing.assert_close(added, torch.stack(wanted).detach(), rtol=1e-4, atol=1e-4)


def test_a_tie_of_implicit_rewards_is_a_miss():
    row = scored_pairs(1)[0]
    row |= {
        "rejected_ids": row["chosen_ids"],
        "log_probs_ref_rejected": row["log_probs_ref_chosen"],
    }
    with torch.no_grad():
        sums = sums_of(pair_log_probs(llama(), [row]), LOSSES["dpo"], 0.3)
    assert sums["accuracy"] == 0
    assert sums["chosen_reward"] == sums["rejected_reward"] != 0


def test_the_kl_is_exact_over_the_vocabulary_and_zero_to_itself():
    policy, reference, rows = llama(seed=1), llama(seed=2), scored_pairs(3)
    wanted = 0.0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([[*row["prompt_ids"], *row["chosen_ids"]]])
            ours, theirs = (m(ids).logits[0].log_softmax(-1) for m in (policy, reference))
            for t in range(len(row["prompt_ids"]) - 1, ids.shape[1] - 1):
                wanted += (ours[t].exp() * (ours[t] - theirs[t])).sum().item()
    assert chosen_kl(policy, reference, rows) == pytest.approx(wanted, rel=1e-4)
    assert chosen_kl(policy, policy, rows) == 0
