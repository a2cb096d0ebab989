"""Our maths against the peers' numbers in shared/vectors, a folder beside the checkout.

Each case either runs below, in float64 and in float32 to the tolerance it states, or stands in
LEFT_OUT with the reason why the project lacks its convention.
"""

import json
import math

import pytest
import torch

from stages.models.log_probs import token_entropy, token_log_probs
from stages.reward.bradley_terry import bradley_terry_loss, preference_accuracy
from stages.rl.advantages import (
    gae,
    group_advantages,
    shape_sequence_rewards,
    shape_token_rewards,
    whiten,
)
from stages.rl.kl import kl_estimate, kl_penalty
from stages.rl.objectives import OBJECTIVES, Clip, ratio_diagnostics, token_weights, value_loss
from stages.rollouts.rewards import overlong_penalty
from tests.helpers.shared import SHARED

VECTORS = SHARED / "vectors/public.json"
CASES = json.loads(VECTORS.read_text()) if VECTORS.exists() else []

INVERTED = "rlhf-book inverts the ratio: its k1 has the wrong sign, its k3 the other direction"
# Case id without its last part (.a, .b) -> why the project lacks that convention.
LEFT_OUT = {
    "kl.inverted": INVERTED,
    "kl.clamp10": "k3 is not clamped, as in the paper",
    "adv.grpo.rb": "one eps, 1e-4; 1e-8 turns rounding into advantages",
    "adv.grpo.verl": "one eps, 1e-4 (TRL), not verl's 1e-6",
    "adv.grpo.pop": "one deviation, the sample's (n - 1)",
    "shape.seqmean.k1": "the sequence penalty is the sum over tokens, as in the RLOO paper",
    "shape.seqmean.k2": "the sequence penalty is the sum over tokens, as in the RLOO paper",
    "shape.seqmean.k3": "the sequence penalty is the sum over tokens, as in the RLOO paper",
    "shape.seqmean.k1inv": INVERTED,
    "shape.seqmean.k3inv": INVERTED,
    "shape.token.trl": "the score is on the last action token, not one after it",
    "gae.trl": "the score is on the last action token, not one after it",
    "rloo.trl": "RLOO is REINFORCE on the sequence sum, as in the paper, not a clipped ratio",
    "ppo.trlvaluemask": "the value loss covers action tokens only",
    "ppo.dual": "no dual clip: it is not in the PPO paper",
    "grpo.k3inv": INVERTED,
    "gspo.k3inv": INVERTED,
    "cispo.rb.k3inv": INVERTED,
    "sapo.k3inv": INVERTED,
    "drgrpo.verl": "the constant divisor counts the rows too, as in the authors' code",
}
# Diagnostics that the project does not compute.
KEYS_LEFT_OUT = {"value_clip_fraction", "clip_fraction_outside", "clip_fraction_high_positive"}
# Kind of policy loss -> the objective of ours that it checks.
OBJECTIVE_OF_KIND = {
    "policy_loss.reinforce": "reinforce",
    "policy_loss.rloo": "rloo",
    "policy_loss.ppo": "ppo",
    "policy_loss.grpo": "grpo",
    "policy_loss.dapo": "dapo",
    "policy_loss.dr_grpo": "drgrpo",
    "policy_loss.gspo": "gspo",
    "policy_loss.cispo": "cispo",
    "policy_loss.sapo": "sapo",
    "grad_accumulation": "grpo",
}


def stem(case_id):
    return case_id.rsplit(".", 1)[0]


CLAIMED = set()


def claimed(*kinds):
    cases = [c for c in CASES if c["kind"] in kinds and stem(c["id"]) not in LEFT_OUT]
    CLAIMED.update(case["id"] for case in cases)
    return [pytest.param(case, id=case["id"]) for case in cases]


needs_vectors = pytest.mark.skipif(not CASES, reason=f"no peers' vectors at {VECTORS}")
in_both_precisions = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def tensor(values, dtype):
    return torch.tensor(values, dtype=dtype)


def check(case, found, dtype):
    """Every expected number of the case that the project computes, to the case's tolerance."""
    tolerance = case["tolerance"]["float64" if dtype == torch.float64 else "float32"]
    for key in case["expected"]:
        if key not in found:
            assert key in KEYS_LEFT_OUT, f"not computed: {key}"
            continue
        wanted, got = leaves(case["expected"][key]), leaves(found[key])
        for g, w in zip(got, wanted, strict=True):
            if w is not None:
                assert abs(g - w) <= tolerance["atol"] + tolerance["rtol"] * abs(w), (key, g, w)


def leaves(value):
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


@needs_vectors
def test_every_case_is_checked_or_left_out_with_a_reason():
    left_out = {case["id"] for case in CASES if stem(case["id"]) in LEFT_OUT}
    assert CLAIMED | left_out == {case["id"] for case in CASES}
    assert set(LEFT_OUT) == {stem(case_id) for case_id in left_out}


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", claimed("token_logprob"))
def test_token_log_probs(case, dtype):
    i = case["inputs"]
    logits, mask = tensor(i["logits"], dtype), tensor(i["mask"], torch.bool)
    log_probs = token_log_probs(logits, tensor(i["tokens"], torch.int64), i["temperature"])
    entropy = token_entropy(logits, i["temperature"])
    found = {
        "logprob": log_probs,
        "entropy": entropy,
        "entropy_mean": entropy[mask].mean(),
        "sequence_logprob": torch.where(mask, log_probs, 0.0).sum(1),
    }
    check(case, found, dtype)


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", claimed("kl"))
def test_kl(case, dtype):
    i = case["inputs"]
    mask = tensor(i["mask"], torch.bool)
    found = {}
    for estimator in ("k1", "k2", "k3"):
        kl = kl_penalty(tensor(i["logp"], dtype), tensor(i["ref_logp"], dtype), mask, estimator)
        found[estimator] = kl
        found[f"{estimator}_token_mean"] = kl.sum() / mask.sum()
        found[f"{estimator}_row_mean"] = kl.sum(1) / mask.sum(1)
    check(case, found, dtype)


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", claimed("group_advantage"))
def test_group_advantages(case, dtype):
    convention = knobs(case)
    rewards, groups = flat_groups(case["inputs"]["rewards"], dtype)
    found = group_advantages(
        rewards,
        groups,
        baseline={"mean": "mean", "loo": "leave-one-out"}[convention["baseline"]],
        scale={"sample-std": "std", "none": "none", "mean": "mean"}[convention["scale"]],
    )
    check(case, {"advantages": found}, dtype)
    if case["id"].startswith("adv.equal"):
        wanted = tensor(leaves(case["expected"]["advantages"]), dtype)
        assert found[wanted == 0].eq(0).all()


def flat_groups(rewards, dtype):
    groups = [group for group, row in enumerate(rewards) for _ in row]
    return tensor(leaves(rewards), dtype), torch.tensor(groups)


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", claimed("reward_shaping"))
def test_reward_shaping(case, dtype):
    i = case["inputs"]
    scores, mask = tensor(i["scores"], dtype), tensor(i["mask"], torch.bool)
    kl = kl_estimate(tensor(i["logp"], dtype), tensor(i["ref_logp"], dtype), "k1")
    if case["id"].startswith("shape.seqsum"):
        shaped = shape_sequence_rewards(scores, kl, mask, i["beta"])
        found = {"kl_per_sequence": torch.where(mask, kl, 0.0).sum(1), "shaped_rewards": shaped}
    else:
        rewards = shape_token_rewards(scores, kl, mask, i["beta"])
        found = {"token_rewards": rewards, "row_sum": rewards.sum(1)}
    check(case, found, dtype)


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", claimed("gae"))
def test_gae(case, dtype):
    i = case["inputs"]
    mask = tensor(i["mask"], torch.bool)
    rewards, values = tensor(i["token_rewards"], dtype), tensor(i["values"], dtype)
    advantages, returns = gae(rewards, values, mask, i["gamma"], i["lam"])
    found = {
        "advantages": advantages,
        "returns": returns,
        "advantages_whitened": whiten(advantages, mask),
    }
    check(case, found, dtype)


def knobs(case):
    return dict(part.split("=") for part in case["convention"]["name"].split(";"))


def loss_of_rows(case, rows, dtype):
    """What some rows of a case add to its loss, by weights taken over all of its rows.

    Returns the share, all rows' log-probs to differentiate it by, `clipped` and the weights.
    """
    i, convention = case["inputs"], knobs(case)
    objective = OBJECTIVES[OBJECTIVE_OF_KIND[case["kind"]]]
    mask = tensor(i["mask"], torch.bool)
    log_probs = tensor(i["logp"], dtype).requires_grad_()
    log_probs_old = tensor(i.get("old_logp", i["logp"]), dtype)
    if "advantages" in i:
        advantages = tensor(i["advantages"], dtype)
    else:
        advantages = objective.estimator(*flat_groups(i["rewards"], dtype))
    advantages = advantages.reshape(len(mask), -1)
    clip = Clip(
        # CISPO "as run" has no lower bound, which is what clip_eps_lo >= 1 means.
        clip_eps_lo=1.0 if convention.get("bounds") == "upper" else i.get("clip_low", math.nan),
        clip_eps_hi=i.get("clip_high", math.nan),
        tau_pos=i.get("tau_pos", math.nan),
        tau_neg=i.get("tau_neg", math.nan),
    )
    aggregation = convention.get("agg", objective.aggregation).removesuffix("-nonempty")
    used = torch.ones(len(mask), dtype=torch.bool)
    if convention.get("empty-row") == "dropped":
        used = mask.any(1)
    weights = token_weights(
        mask.sum(1),
        used,
        "constant" if aggregation == "constant-divisor" else aggregation,
        i.get("max_length", 0),
        dtype,
    )
    loss, clipped = objective.loss(
        log_probs[rows], log_probs_old[rows], advantages[rows], mask[rows], clip
    )
    if "beta" in i:
        ref = tensor(i["ref_logp"], dtype)[rows]
        loss = loss + i["beta"] * kl_penalty(log_probs[rows], ref, mask[rows], "k3")
    return (loss * weights[rows, None]).sum(), log_probs, clipped, weights


ALL = slice(None)


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", claimed(*set(OBJECTIVE_OF_KIND) - {"grad_accumulation"}))
def test_policy_losses(case, dtype):
    i, name = case["inputs"], OBJECTIVE_OF_KIND[case["kind"]]
    mask = tensor(i["mask"], torch.bool)
    loss, log_probs, clipped, weights = loss_of_rows(case, ALL, dtype)
    found = {"loss": loss, "grad_logp": torch.autograd.grad(loss, log_probs)[0]}
    if name == "ppo":
        found |= loss_with_values(i, loss.detach(), mask, weights, dtype)
    if name == "rloo":
        found["advantages"] = OBJECTIVES[name].estimator(*flat_groups(i["rewards"], dtype))
    if "beta" in i:
        kl = kl_penalty(log_probs.detach(), tensor(i["ref_logp"], dtype), mask, "k3")
        found["kl_mean"] = kl.sum() / mask.sum()
    if "old_logp" in i:
        found |= diagnostics(i, log_probs.detach(), clipped, mask, dtype)
    if name == "gspo":
        found |= sequence_diagnostics(i, log_probs.detach(), clipped, mask, dtype)
    if name == "cispo":
        found["clip_fraction_outside"] = found["clip_fraction"]
    check(case, found, dtype)


def loss_with_values(i, policy_loss, mask, weights, dtype):
    values = tensor(i["values"], dtype).requires_grad_()
    per_token = value_loss(
        values, tensor(i["old_values"], dtype), tensor(i["returns"], dtype), mask, i["vf_clip"]
    )
    values_loss = (per_token * weights[:, None]).sum()
    loss = policy_loss + i["vf_coef"] * values_loss
    return {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": values_loss,
        "grad_values": torch.autograd.grad(loss, values)[0],
    }


def diagnostics(i, log_probs, clipped, mask, dtype):
    log_probs_old = tensor(i["old_logp"], dtype)
    rows = ratio_diagnostics(log_probs, log_probs_old, clipped, mask)
    share = mask.sum(1) / mask.sum()
    return {
        "mean_ratio": (rows.ratio_mean * share).sum(),
        "clip_fraction": (rows.clipped_fraction * share).sum(),
        "approx_kl_k1": kl_penalty(log_probs_old, log_probs, mask, "k1").sum() / mask.sum(),
        "approx_kl_k2": kl_penalty(log_probs_old, log_probs, mask, "k2").sum() / mask.sum(),
        "approx_kl_k3": (rows.kl * share).sum(),
    }


def sequence_diagnostics(i, log_probs, clipped, mask, dtype):
    # Unclipped and with an advantage of -1, the loss is the ratio.
    unclipped = Clip(math.inf, math.inf, math.nan, math.nan)
    minus_one = -torch.ones(len(mask), 1, dtype=dtype)
    ratio, _ = OBJECTIVES["gspo"].loss(
        log_probs, tensor(i["old_logp"], dtype), minus_one, mask, unclipped
    )
    return {
        "sequence_ratio": ratio[:, 0],
        "mean_sequence_ratio": ratio[:, 0].mean(),
        "clip_fraction_sequences": clipped.any(1).to(dtype).mean(),
        "clip_fraction_tokens": clipped.sum() / mask.sum(),
    }


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", claimed("grad_accumulation"))
def test_shares_of_micro_batches(case, dtype):
    expected = case["expected"]
    for split, wanted in expected["splits"].items():
        shares, grad, start = [], 0, 0
        for size in map(int, split.split("+")):
            share, log_probs, _, _ = loss_of_rows(case, slice(start, start + size), dtype)
            grad = grad + torch.autograd.grad(share, log_probs)[0]
            shares.append(share)
            start += size
        found = {"loss": sum(shares), "grad_logp": grad, "splits": torch.stack(shares)}
        check({**case, "expected": {**expected, "splits": wanted["micro_share"]}}, found, dtype)


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", claimed("bradley_terry"))
def test_bradley_terry(case, dtype):
    i = case["inputs"]
    chosen = tensor(i["chosen"], dtype).requires_grad_()
    rejected = tensor(i["rejected"], dtype).requires_grad_()
    margin = None if i["margin"] is None else tensor(i["margin"], dtype)
    loss = bradley_terry_loss(chosen, rejected, margin, i["center_coef"] or 0.0).mean()
    grad_chosen, grad_rejected = torch.autograd.grad(loss, [chosen, rejected])
    found = {
        "loss": loss,
        "grad_chosen": grad_chosen,
        "grad_rejected": grad_rejected,
        "accuracy": preference_accuracy(chosen, rejected),
        "mean_score_gap": (chosen - rejected).mean(),
    }
    check(case, found, dtype)


@needs_vectors
@pytest.mark.parametrize("case", claimed("overlong_penalty"))
def test_overlong_penalty(case):
    i = case["inputs"]
    found = [overlong_penalty(n, i["max_length"], i["cache_length"]) for n in i["lengths"]]
    check(case, {"penalties": found}, torch.float64)


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", claimed("sft_cross_entropy"))
def test_sft_cross_entropy(case, dtype):
    i, expected = case["inputs"], case["expected"]
    labels = tensor(i["labels"], torch.int64)[:, 1:]
    mask = labels != -100
    weights = token_weights(mask.sum(1), mask.any(1), "token-mean", 0, dtype)
    logits = tensor(i["logits"], dtype).requires_grad_()
    log_probs = token_log_probs(logits[:, :-1], labels.clamp(min=0), 1.0)
    per_row = -torch.where(mask, log_probs, 0.0).sum(1) * weights
    found = {
        "loss": per_row.sum(),
        "num_tokens": mask.sum(),
        "grad_logits": torch.autograd.grad(per_row.sum(), logits)[0],
    }
    for split, wanted in expected["splits"].items():
        sizes = [int(size) for size in split.split("+")]
        found["splits"] = torch.stack([rows.sum() for rows in per_row.split(sizes)])
        check({**case, "expected": {**expected, "splits": wanted["micro_share"]}}, found, dtype)


@needs_vectors
@pytest.mark.parametrize("case", claimed("lr_schedule"))
def test_learning_rate(case):
    from stages.training.steps import learning_rate

    i = case["inputs"]
    total = i["total_steps"]
    found = [
        learning_rate(step, i["base_lr"], i["warmup_steps"], total) for step in range(total + 1)
    ]
    check(case, {"lr": found}, torch.float64)


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", claimed("grad_clip"))
def test_gradient_clipping(case, dtype):
    i = case["inputs"]
    weights = [torch.zeros(len(grad), dtype=dtype, requires_grad=True) for grad in i["grads"]]
    for weight, grad in zip(weights, i["grads"], strict=True):
        weight.grad = tensor(grad, dtype)
    norm = torch.nn.utils.clip_grad_norm_(weights, i["max_norm"])
    check(case, {"norm": norm, "clipped": [w.grad.tolist() for w in weights]}, dtype)
