"""Functions of the training scripts by themselves; knobs that differ from their neighbours."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from stages import optimize, train_rm, train_sft
from stages.knobs.optimize import Knobs
from stages.knobs.train_rm import Rm
from stages.rl.objectives import OBJECTIVES, Clip
from stages.rl.stats import CompletionStats
from stages.rl.targets import Targets
from stages.training.batching import pair_lengths
from tests.helpers.models import llama_scorer, random_ids
from tests.helpers.tiny import small_params

DISTINCT = {
    "loss_aggregation": "constant",
    "ppo_epochs": 3,
    "target_kl": 0.07,
    "max_new_tokens": 9,
    "temperature": 0.85,
    "train_batch_size": 5,
    "batch_acc": 6,
    "lr": 1e-3,
    "lr_critic": 2e-3,
    "warmup_steps": 4,
    "decay_steps": 50,
    "max_norm": 0.6,
    "clip_eps_lo": 0.11,
    "clip_eps_hi": 0.22,
    "tau_pos": 1.3,
    "tau_neg": 1.4,
    "clip_eps_val": 0.33,
    "gamma": 0.97,
    "lam": 0.91,
    "beta": 0.02,
    "kl_placement": "loss",
    "kl_estimator": "k2",
    "sampler_correction": "sequence",
    "sampler_correction_cap": 1.7,
    "nonfinite": "skip",
    "seed": 17,
}


def knobs(**changes) -> Knobs:
    values = small_params() | changes
    chosen = {key: value for key, value in values.items() if key in Knobs.model_fields}
    return Knobs(**chosen | {"model": {"trust_remote_code": False}})


def test_every_setting_of_a_round_is_the_knob_of_its_name():
    made = optimize.make_settings(knobs(**DISTINCT, loss="ppo"), 8)
    assert made.objective is OBJECTIVES["ppo"] and made.round_number == 8
    assert made.aggregation == "constant"
    wanted = {"clip_eps_lo": 0.11, "clip_eps_hi": 0.22, "tau_pos": 1.3, "tau_neg": 1.4}
    assert made.clip == Clip(**wanted, beta=DISTINCT["beta"])
    parts = ("clip_eps_lo", "clip_eps_hi", "tau_pos", "tau_neg", "loss_aggregation")
    wanted = {key: value for key, value in DISTINCT.items() if key not in parts}
    assert {key: getattr(made, key) for key in wanted} == wanted
    numbers = [v for v in DISTINCT.values() if not isinstance(v, str)]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("loss", OBJECTIVES)
def test_defaults_are_what_the_objective_and_the_place_of_the_kl_say(loss):
    made = optimize.make_settings(knobs(loss=loss), 1)
    assert made.aggregation == OBJECTIVES[loss].aggregation
    assert made.kl_placement == OBJECTIVES[loss].kl_placement
    fitting = {"reward": "k1", "loss": "k3", "nowhere": "k3"}
    assert made.kl_estimator == fitting[made.kl_placement]
    for place in OBJECTIVES[loss].kl_places:
        if place == "loss" or loss != "maxrl":
            moved = optimize.make_settings(knobs(loss=loss, kl_placement=place), 1)
            assert (moved.kl_placement, moved.kl_estimator) == (place, fitting[place])


def step(number: int, **more) -> dict:
    figures = {"step": number, "round": 1, "epoch": number // 2, "loss": 0.5 * number}
    figures |= {"grad_norm": 2.0 * number, "lr": 0.1 * number, "kl": 0.0, "skipped": number}
    return figures | {"clipped_fraction": 0.0, "value_loss": 3.0 * number} | more


def test_the_figures_of_a_round_by_hand():
    """Three scorable completions of 1, 2 and 3 tokens in two groups, and one that is not."""
    tokens = [torch.tensor(x) for x in ([1.0], [2.0, 2.0], [-1.0, 0.0, 1.0], [9.0])]
    values = [torch.tensor(x) for x in ([0.0], [1.0, 1.0], [0.0, 0.0, 0.0], [7.0])]
    returns = [torch.tensor(x) for x in ([1.0], [3.0, 1.0], [0.0, 2.0, 4.0], [8.0])]
    rewards = torch.tensor([1.0, 1.5, 4.0, torch.nan])
    used = torch.tensor([True, True, True, False])
    lengths, groups = torch.tensor([1, 2, 3, 1]), torch.tensor([0, 0, 5, 7])
    targets = Targets(tokens, returns, values, rewards, used, groups, lengths)
    stats = CompletionStats(4)
    stats.ratio_mean[:3] = torch.tensor([1.0, 2.0, 3.0])
    stats.ratio_max[:3] = torch.tensor([1.5, 6.0, 3.5])
    stats.clipped_fraction[:3] = torch.tensor([1.0, 0.5, 0.0])
    stats.kl[:3] = torch.tensor([0.6, 0.0, 0.2])
    stats.kl_ref[:3] = torch.tensor([0.0, 1.2, 0.6])
    stats.entropy[:3] = torch.tensor([3.0, 1.5, 1.0])
    settings = optimize.make_settings(knobs(**DISTINCT), 1)
    found = optimize.round_figures(targets, stats, [step(1), step(2), step(3)], settings)
    flat = [1.0, 2.0, 2.0, -1.0, 0.0, 1.0]
    deviation = math.sqrt(sum((x - 5 / 6) ** 2 for x in flat) / 5)
    gaps, all_returns = [1.0, 2.0, 0.0, 0.0, 2.0, 4.0], [1.0, 3.0, 1.0, 0.0, 2.0, 4.0]

    def variance(x):
        return sum((v - sum(x) / 6) ** 2 for v in x) / 5

    assert found == pytest.approx(
        {
            "steps": 3,
            "epochs": 2,
            "reward_shaped": 6.5 / 3,
            "advantage_std": deviation,
            "groups_without_spread": 1 / 2,
            "groups_left_out": 0,
            "completions_used": 3,
            "unscorable": 1,
            "ratio_mean": (1 + 4 + 9) / 6,
            "ratio_max": 6.0,
            "clipped_fraction": 2 / 6,
            "kl": (0.6 + 0.6) / 6,
            "kl_ref": (2.4 + 1.8) / 6,
            "entropy": 9 / 6,
            "loss": 1.0,
            "grad_norm": 4.0,
            "lr": 0.3,
            "value_loss": 6.0,
            "explained_variance": 1 - variance(gaps) / variance(all_returns),
            "skipped": 6,
        },
        rel=1e-5,
    )
    apart = replace(targets, gaps=[torch.full((n,), 0.5) for n in (1, 2, 3, 1)])
    more = optimize.round_figures(apart, stats, [step(1), step(2), step(3)], settings)
    assert more.keys() - found.keys() == {
        f"sampler_ratio_{name}" for name in ("mean", "max", "cut")
    }
    ratios = [math.exp(0.5), math.exp(1.0), math.exp(1.0), *[math.exp(1.5)] * 3]  # of whole rows
    assert more["sampler_ratio_mean"] == pytest.approx(sum(ratios) / 6, rel=1e-5)
    assert more["sampler_ratio_cut"] == pytest.approx(5 / 6)


def test_a_line_of_the_curve_holds_the_figures_of_policy_and_critic():
    from stages.rl.epochs import StepRecord
    from stages.training.steps import StepFigures

    policy, critic = StepFigures(0.5, 1.5, 1), StepFigures(2.5, 3.5, 2)
    row = optimize.curve_row(7, 3, StepRecord(4, policy, critic, 0.01, 0.02, 0.03))
    assert row == {
        "step": 7,
        "round": 3,
        "epoch": 4,
        "loss": 0.5,
        "grad_norm": 1.5,
        "lr": 0.01,
        "kl": 0.02,
        "clipped_fraction": 0.03,
        "value_loss": 2.5,
        "critic_grad_norm": 3.5,
        "skipped": 3,
    }
    alone = optimize.curve_row(7, 3, StepRecord(4, policy, None, 0.01, 0.02, 0.03))
    assert (alone["value_loss"], alone["critic_grad_norm"], alone["skipped"]) == (None, None, 1)


def pairs() -> list[dict]:
    prompts, chosen, rejected = (
        random_ids(1, 3, 5, 2),
        random_ids(2, 4, 1, 3),
        random_ids(3, 2, 6, 5),
    )
    return [
        {"prompt_ids": p, "chosen_ids": c, "rejected_ids": r, "margin": margin}
        for p, c, r, margin in zip(prompts, chosen, rejected, (0.0, 1.5, 0.25), strict=True)
    ]


def plain_scores(scorer, rows, side) -> list[float]:
    ids = [torch.tensor([row["prompt_ids"] + row[side]]) for row in rows]
    with torch.no_grad():
        return [scorer(input_ids=x, use_cache=False).logits.item() for x in ids]


def test_a_micro_batch_of_pairs_adds_its_summed_loss_over_the_divisor_of_the_step():
    scorer, right = llama_scorer(seed=3), []
    loss = train_rm.micro_batch_loss(scorer, pairs(), 7, 0.02, right)
    wins, losses = (plain_scores(scorer, pairs(), f"{side}_ids") for side in ("chosen", "rejected"))
    total = 0.0
    for pair, c, r in zip(pairs(), wins, losses, strict=True):
        total += math.log1p(math.exp(-(c - r - pair["margin"]))) + 0.02 * (c + r) ** 2
    assert loss.item() == pytest.approx(total / 7, rel=1e-4)
    assert right == [sum(c > r for c, r in zip(wins, losses, strict=True))]


class Table(list):
    def lengths(self, column):
        return [len(row[column]) for row in self]


def test_pairs_are_as_long_as_prompt_and_longer_answer():
    assert pair_lengths(Table(pairs())) == [3 + 4, 5 + 6, 2 + 5]


def test_the_figures_of_a_reward_model_by_hand():
    rows, scorer = pairs(), llama_scorer(seed=3)
    section = small_params()["rm"] | {"train_batch_size": 2, "centering": 9.0}
    section = {name: section[name] for name in Rm.model_fields}
    knobs = SimpleNamespace(rm=Rm(**section), train_max_tokens=None)
    found = train_rm.validate(scorer, Table(rows), knobs)
    wins, losses = (plain_scores(scorer, rows, f"{side}_ids") for side in ("chosen", "rejected"))
    gaps = [c - r for c, r in zip(wins, losses, strict=True)]
    each = [math.log1p(math.exp(row["margin"] - g)) for row, g in zip(rows, gaps, strict=True)]
    both, mean = wins + losses, sum(wins + losses) / 6
    wanted = {
        "validation_accuracy": sum(g > 0 for g in gaps) / 3,
        "validation_ties": 0.0,
        "validation_loss": sum(each) / 3,  # without centring
        "validation_margin": sum(gaps) / 3,
        "score_mean": mean,
        "score_std": math.sqrt(sum((x - mean) ** 2 for x in both) / 5),
        "validation_pairs": 3,
    }
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=1e-4)
    assert sum(found["gaps"]["pairs"]) == sum(found["calibration"]["pairs"]) == 3


def test_the_summary_of_sft_is_of_its_first_and_last_tenth():
    steps = [{"loss": float(i), "tokens": 2 * i, "skipped": i % 3 == 0} for i in range(1, 31)]
    assert train_sft.summary(steps) == {
        "steps": 30,
        "loss_first": 2.0,
        "loss_last": 29.0,
        "trained_tokens": 930,
        "skipped": 10,
    }
    assert train_sft.summary(steps[:1])["loss_last"] == 1.0
