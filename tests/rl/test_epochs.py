"""One round of optimization on tiny models, against hand arithmetic and slow plain loops."""

import math
from dataclasses import replace

import pytest
import torch

from stages.rl.epochs import Learner, Round
from stages.rl.objectives import OBJECTIVES, Clip
from stages.rl.stats import explained_variance, token_mean
from stages.rl.targets import Settings, make_targets
from stages.training.steps import NonFinite, adamw
from tests.helpers.models import (
    buffer_row,
    cpu_accelerator,
    gpt2,
    gpt2_scorer,
    llama,
    llama_scorer,
    plain_log_probs,
    plain_logits,
    random_ids,
    same_weights,
    weights_of,
)

PAIRS = {"llama": (llama, llama_scorer), "gpt2": (gpt2, gpt2_scorer)}
each_pair = pytest.mark.parametrize("make, make_critic", PAIRS.values(), ids=PAIRS)
each_objective = pytest.mark.parametrize("loss", OBJECTIVES)
TEMPERATURE = 0.8


def settings(loss: str, **options) -> Settings:
    objective = OBJECTIVES[loss]
    return Settings(
        **{
            "objective": objective,
            "aggregation": objective.aggregation,
            "kl_placement": objective.kl_placement,
            "clip": Clip(0.2, 0.28, 1.0, 1.05, options.get("beta", 0.0)),
            "clip_eps_val": 0.15,
            "gamma": 1.0,
            "lam": 0.95,
            "beta": 0.0,
            "skip_wrong_groups": False,
            "kl_estimator": "k3",
            "sampler_correction": "token",
            "sampler_correction_cap": 2.0,
            "temperature": TEMPERATURE,
            "max_new_tokens": 8,
            "ppo_epochs": 1,
            "target_kl": None,
            "train_batch_size": 100,
            "batch_acc": 1,
            "train_max_tokens": None,
            "lr": 1e-2,
            "lr_critic": 2e-2,
            "warmup_steps": 0,
            "decay_steps": None,
            "max_norm": 1e6,
            "nonfinite": "stop",
            "seed": 42,
            "round_number": 1,
            **options,
        }
    )


def noise(seed: int, count: int, scale: float) -> torch.Tensor:
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))


def make_buffer(policy, rewards, lengths, size=2, moved=0.0) -> list[dict]:
    """Groups of `size`; with `moved` the old log-probs are not quite the policy's."""
    prompts, completions = random_ids(1, 3, 9, 1, 5, 2, 4), random_ids(2, *lengths)
    rows = []
    for i, (reward, completion) in enumerate(zip(rewards, completions, strict=True)):
        row = buffer_row(
            policy,
            prompts[i // size],
            completion,
            group=i // size,
            sample=i % size,
            reward=reward,
            temperature=TEMPERATURE,
        )
        old = torch.tensor(row["log_probs_old"])
        row["log_probs_ref"] = (old + noise(i, len(old), 0.3)).tolist()
        row["values_old"] = noise(100 + i, len(old), 0.5).tolist()
        row["log_probs_old"] = (old + noise(200 + i, len(old), moved)).tolist()
        rows.append(row)
    return rows


SIX = {"rewards": [1.0, 0.0, 0.25, 0.75, 0.0, 1.0], "lengths": [3, 1, 8, 2, 4, 5]}


class Run:
    """Models after `optimize`, with the records and stats of its steps."""

    def __init__(self, policy, critic, rows, chosen: Settings, sgd=None, step=0):
        self.policy, self.critic = policy, critic
        models = {"policy": policy} | ({"critic": critic} if critic else {})
        self.optimizers = {
            name: torch.optim.SGD(model.parameters(), lr=0.1) if sgd else adamw(model, 1.0, 0.0)
            for name, model in models.items()
        }
        self.targets = make_targets(rows, chosen)
        learner = Learner(policy, critic, self.optimizers)
        learning = Round(cpu_accelerator(), learner, rows, self.targets, chosen)
        self.stats, self.records = learning.stats, list(learning.steps(step))

    def weights(self):
        critic = weights_of(self.critic) if self.critic else {}
        return weights_of(self.policy) | {f"critic/{k}": v for k, v in critic.items()}


def run(loss, rows=None, sgd=None, make=llama, make_critic=llama_scorer, step=0, **options) -> Run:
    policy, chosen = make(), settings(loss, **options)
    critic = make_critic(seed=7) if chosen.objective.critic else None
    rows = make_buffer(policy, **SIX) if rows is None else rows
    return Run(policy, critic, rows, chosen, sgd, step)


# Targets, by hand.


def hand_rows(**columns) -> list[dict]:
    """Two groups of two, 2 tokens in the longest completion."""
    rows = [
        {"reward": 1.0, "group": 0, "log_probs_old": [-1.0, -2.0], "log_probs_ref": [-1.5, -2.0]},
        {"reward": 0.0, "group": 0, "log_probs_old": [-1.0], "log_probs_ref": [-1.25]},
        {"reward": 3.0, "group": 4, "log_probs_old": [-1.0], "log_probs_ref": [-1.0]},
        {"reward": 1.0, "group": 4, "log_probs_old": [-0.5, -1.0], "log_probs_ref": [-0.5, -2.0]},
    ]
    columns = {"log_probs_sampler": [None] * 4} | columns
    return [
        row | {name: column[i] for name, column in columns.items()} for i, row in enumerate(rows)
    ]


def lists(parts) -> list:
    return [part.tolist() for part in parts]


def close(got, wanted) -> None:
    assert [len(row) for row in got] == [len(row) for row in wanted]
    flat = [x for row in got for x in row.tolist()]
    assert flat == pytest.approx([x for row in wanted for x in row], abs=1e-5)


def test_grpo_targets_by_hand():
    found = make_targets(hand_rows(), settings("grpo", beta=0.5))
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    b = 1.0 / (math.sqrt(2.0) + 1e-4)
    close(found.advantages, [[a, a], [-a], [b], [-b, -b]])
    assert found.rewards.tolist() == [1.0, 0.0, 3.0, 1.0]  # its KL goes into the loss
    assert found.returns is None and found.values_old is None
    assert found.used.tolist() == [True] * 4
    assert found.groups.tolist() == [0, 0, 4, 4]
    assert found.lengths.tolist() == [2, 1, 1, 2]


def test_rloo_targets_by_hand_with_the_kl_of_the_whole_completion_in_the_reward():
    found = make_targets(hand_rows(), settings("rloo", beta=0.5, kl_estimator="k1"))
    # Summed k1: 0.5 + 0, 0.25, 0, 0 + 1; half of it comes off.
    assert found.rewards.tolist() == pytest.approx([0.75, -0.125, 3.0, 0.5])
    close(found.advantages, [[0.875, 0.875], [-0.875], [2.5], [-2.5, -2.5]])


@pytest.mark.parametrize(
    ("estimator", "sums"),
    [("k1", [0.5, 0.25, 0.0, 1.0]), ("k2", [0.125, 0.03125, 0.0, 0.5])],
)
def test_the_kl_in_the_reward_is_by_the_estimator_asked_for(estimator, sums):
    found = make_targets(hand_rows(), settings("rloo", beta=0.5, kl_estimator=estimator))
    rewards = [r - 0.5 * kl for r, kl in zip([1.0, 0.0, 3.0, 1.0], sums, strict=True)]
    assert found.rewards.tolist() == pytest.approx(rewards)
    rows = hand_rows(values_old=[[0.0, 0.0], [0.0], [0.0], [0.0, 0.0]])
    chosen = settings("ppo", beta=0.5, kl_estimator=estimator, lam=1.0)
    firsts = [part[0].item() for part in make_targets(rows, chosen).returns]
    assert firsts == pytest.approx(rewards)


def test_the_kl_in_the_loss_is_by_the_estimator_asked_for():
    rows, beta = make_buffer(llama(), **SIX), 0.3
    for estimator, of in (("k2", lambda x: x * x / 2), ("k3", lambda x: math.exp(-x) - 1 + x)):
        with_kl = run("dapo", rows, beta=beta, kl_estimator=estimator)
        without = run("dapo", rows, beta=0.0)
        pairs = [p for r in rows for p in zip(r["log_probs_old"], r["log_probs_ref"], strict=True)]
        mean = sum(of(new - ref) for new, ref in pairs) / 23
        gap = with_kl.records[0].policy.loss - without.records[0].policy.loss
        assert gap == pytest.approx(beta * mean, rel=1e-3)


def test_beta_zero_needs_no_reference():
    rows = hand_rows(log_probs_ref=[None] * 4)
    close(
        make_targets(rows, settings("rloo")).advantages, [[1.0, 1.0], [-1.0], [2.0], [-2.0, -2.0]]
    )


def test_ppo_targets_by_hand():
    rows = hand_rows(values_old=[[0.5, 0.25], [0.5], [1.0], [0.0, 2.0]])
    found = make_targets(rows, settings("ppo", beta=0.5, kl_estimator="k1", gamma=1.0, lam=0.5))
    # Token rewards: -0.25, 1 | -0.125 | 3 | 0, 0.5.
    raw = [
        [-0.25 + 0.25 - 0.5 + 0.5 * 0.75, 0.75],
        [-0.125 - 0.5],
        [2.0],
        [0 + 2.0 - 0.0 + 0.5 * -1.5, -1.5],
    ]
    close(found.returns, [[0.375, 1.0], [-0.125], [3.0], [1.25, 0.5]])
    flat = [x for row in raw for x in row]
    mean = sum(flat) / 6
    std = math.sqrt(sum((x - mean) ** 2 for x in flat) / 5)
    close(found.advantages, [[(x - mean) / std for x in row] for row in raw])
    assert lists(found.values_old) == [[0.5, 0.25], [0.5], [1.0], [0.0, 2.0]]


def test_unscorable_rows_have_advantage_zero_and_do_not_count():
    rows = hand_rows(reward=[1.0, 0.0, None, 1.0])
    found = make_targets(rows, settings("rloo"))
    close(found.advantages, [[1.0, 1.0], [-1.0], [0.0], [0.0, 0.0]])  # one row left of a group
    assert found.used.tolist() == [True, True, False, True]
    assert found.rewards.isnan().tolist() == [False, False, True, False]
    rows = hand_rows(reward=[1.0, 0.0, None, 1.0], values_old=[[0.0, 0.0], [0.0], [9.0], [0.0] * 2])
    found = make_targets(rows, settings("ppo", lam=1.0))
    close(found.returns, [[1.0, 1.0], [0.0], [0.0], [1.0, 1.0]])
    a = 0.2 / math.sqrt(4 * 0.2**2 / 4 + 0.8**2 / 4)
    close(found.advantages, [[a, a], [-4 * a], [0.0], [a, a]])


# The first step, and the ones after it.


@each_objective
@each_pair
def test_at_the_first_step_the_ratio_is_one_and_nothing_is_clipped(loss, make, make_critic):
    made = run(loss, make=make, make_critic=make_critic, temperature=TEMPERATURE, beta=0.2)
    assert len(made.records) == 1
    used = made.targets.used
    ones = torch.ones(6)[used]
    torch.testing.assert_close(made.stats.ratio_mean[used], ones, rtol=0, atol=1e-5)
    torch.testing.assert_close(made.stats.ratio_max[used], ones, rtol=0, atol=1e-5)
    assert made.stats.clipped_fraction[used].tolist() == [0.0] * len(ones)
    assert made.stats.kl[used].tolist() == pytest.approx([0.0] * len(ones), abs=1e-8)
    assert made.records[0].kl == pytest.approx(0.0, abs=1e-8)
    assert made.records[0].clipped_fraction == 0.0


@pytest.mark.parametrize("loss", ["grpo", "ppo"])
def test_later_epochs_move_away_from_the_policy_that_sampled(loss):
    policy = llama()
    rows = make_buffer(policy, **SIX)
    before = [list(row["log_probs_old"]) for row in rows]
    made = run(loss, rows, ppo_epochs=3, lr=2e-2)
    assert [record.epoch for record in made.records] == [0, 1, 2]
    assert made.records[0].kl == pytest.approx(0.0, abs=1e-8)
    assert made.records[1].kl > 1e-3 and made.records[2].kl > 1e-3
    assert made.records[2].clipped_fraction > 0
    assert (made.stats.ratio_mean - 1).abs().max() > 1e-2
    assert [row["log_probs_old"] for row in rows] == before


def test_rates_continue_from_the_steps_done_before():
    made = run("grpo", ppo_epochs=4, warmup_steps=4, lr=1e-4, step=1)
    assert [record.lr for record in made.records] == pytest.approx([5e-5, 7.5e-5, 1e-4, 1e-4])


def test_rates_of_policy_and_critic_fall_along_their_cosines_to_the_last_step():
    options = {"ppo_epochs": 4, "warmup_steps": 1, "decay_steps": 5, "lr": 1e-4, "lr_critic": 3e-4}
    made = run("ppo", step=1, **options)
    # Steps 2 to 5 of 6 (the one after the last has rate 0), 1 of them a warm-up.
    falling = [0.5 * (1 + math.cos(math.pi * part / 5)) for part in (1, 2, 3, 4)]
    assert [record.lr for record in made.records] == pytest.approx([1e-4 * f for f in falling])
    rates = {name: o.param_groups[0]["lr"] for name, o in made.optimizers.items()}
    assert rates == pytest.approx({"policy": 1e-4 * falling[-1], "critic": 3e-4 * falling[-1]})


def test_gradients_of_policy_and_critic_are_scaled_down_to_max_norm():
    rates = {"lr": 0.1, "lr_critic": 0.3}
    made = run("ppo", sgd=True, max_norm=0.02, **rates)
    record, before = made.records[0], {"policy": llama(), "critic": llama_scorer(seed=7)}
    assert record.policy.grad_norm > 0.02 < record.critic.grad_norm
    for name, rate in (("policy", 0.1), ("critic", 0.3)):
        after, start = weights_of(getattr(made, name)), weights_of(before[name])
        moved = torch.cat([(after[key] - start[key]).flatten() for key in start])
        assert moved.norm().item() == pytest.approx(0.02 * rate, rel=1e-3)


def test_entropy_and_kl_to_the_reference_are_means_over_a_rows_tokens():
    policy = llama()
    rows = make_buffer(policy, **SIX)
    made = run("grpo", rows, beta=0.1)
    for i, row in enumerate(rows):
        logits = plain_logits(policy, row["prompt_ids"], row["completion_ids"]) / TEMPERATURE
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean().item()
        assert made.stats.entropy[i].item() == pytest.approx(entropy, rel=1e-4)
        pairs = list(zip(row["log_probs_old"], row["log_probs_ref"], strict=True))
        kl = sum(math.exp(ref - new) - 1 - (ref - new) for new, ref in pairs) / len(pairs)
        assert made.stats.kl_ref[i].item() == pytest.approx(kl, rel=1e-3, abs=1e-5)


# Loss and gradient of a step against slow loops.


def plain_policy_loss(policy, rows, targets, chosen: Settings) -> torch.Tensor:
    """The clipped objective, token by token; its aggregation written out."""
    tokens = sum(len(row["completion_ids"]) for row in rows)
    total = 0.0
    for i, row in enumerate(rows):
        new = plain_log_probs(policy, row["prompt_ids"], row["completion_ids"], TEMPERATURE)
        for t, old in enumerate(row["log_probs_old"]):
            advantage = targets.advantages[i][t].item()
            if chosen.objective.loss.__name__ == "policy_gradient_loss":
                term = -advantage * new[t]
            else:
                ratio = torch.exp(new[t] - old)
                term = -min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            if chosen.beta and chosen.kl_placement == "loss":
                x = row["log_probs_ref"][t] - new[t]
                term = term + chosen.beta * (torch.exp(x) - 1 - x)
            if row["log_probs_sampler"] is not None:
                pairs = list(zip(row["log_probs_old"], row["log_probs_sampler"], strict=True))
                shares = pairs if chosen.sampler_correction == "sequence" else [pairs[t]]
                factor = math.prod(math.exp(a - b) for a, b in shares)
                term = term * min(factor, chosen.sampler_correction_cap)
            weight = {
                "token-mean": 1 / tokens,
                "seq-mean-token-mean": 1 / (len(rows) * len(new)),
                "seq-mean-token-sum": 1 / len(rows),
            }[chosen.aggregation]
            total = total + weight * term
    return total


def norm_of(model) -> float:
    return (
        torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        .norm()
        .item()
    )


@pytest.mark.parametrize("loss, beta", [("grpo", 0.0), ("grpo", 0.3), ("rloo", 0.3), ("ppo", 0.3)])
@each_pair
def test_a_step_has_the_loss_and_the_gradient_of_slow_plain_passes(loss, beta, make, make_critic):
    rows = make_buffer(make(), **SIX, moved=0.3)
    made = run(
        loss, rows, make=make, make_critic=make_critic, beta=beta, train_batch_size=2, batch_acc=3
    )
    chosen, policy = settings(loss, beta=beta), make()
    wanted = plain_policy_loss(policy, rows, made.targets, chosen)
    wanted.backward()
    assert made.records[0].policy.loss == pytest.approx(wanted.item(), rel=1e-4, abs=1e-6)
    assert made.records[0].policy.grad_norm == pytest.approx(norm_of(policy), rel=1e-3)
    assert (made.records[0].clipped_fraction > 0) == (loss != "rloo")


def sampled_elsewhere(rows: list[dict], apart: float = 0.4) -> list[dict]:
    """The rows as an engine would have drawn them whose log-probs are not quite the old ones."""
    return [
        row | {"log_probs_sampler": (old + noise(300 + i, len(old), apart)).tolist()}
        for i, (row, old) in enumerate((r, torch.tensor(r["log_probs_old"])) for r in rows)
    ]


@pytest.mark.parametrize("correction", ["token", "sequence"])
@pytest.mark.parametrize("loss, beta", [("grpo", 0.3), ("rloo", 0.3), ("ppo", 0.3)])
def test_a_sampler_that_is_not_the_policy_weighs_losses_as_a_slow_loop_does(loss, beta, correction):
    rows = sampled_elsewhere(make_buffer(llama(), **SIX, moved=0.3))
    options = {"beta": beta, "sampler_correction": correction, "sampler_correction_cap": 1.3}
    made = run(loss, rows, train_batch_size=2, batch_acc=3, **options)
    chosen, policy = settings(loss, **options), llama()
    wanted = plain_policy_loss(policy, rows, made.targets, chosen)
    wanted.backward()
    factors = torch.cat(made.targets.factors)
    assert (factors == factors.max()).sum() > 1 and factors.min() < 0.9  # some were cut
    assert made.records[0].policy.loss == pytest.approx(wanted.item(), rel=1e-4, abs=1e-6)
    assert made.records[0].policy.grad_norm == pytest.approx(norm_of(policy), rel=1e-3)


@pytest.mark.parametrize("loss", ["raft", "online_dpo"])
def test_chosen_completions_have_no_factors(loss):
    rows = sampled_elsewhere(make_buffer(llama(), **SIX))
    found = make_targets(rows, settings(loss, beta=0.2, sampler_correction="token"))
    assert found.factors is None and found.gaps is not None


@pytest.mark.parametrize("correction", ["token", "sequence"])
@pytest.mark.parametrize("loss", [loss for loss, o in OBJECTIVES.items() if not o.selects])
def test_factors_scale_the_advantages_of_every_objective(loss, correction):
    """Losses grow with the advantage, so that both ways give the same weights."""
    rows, chosen = make_buffer(llama(), **SIX, moved=0.2), settings(loss)
    apart = settings(loss, sampler_correction=correction)
    weighed = learned(make_targets(sampled_elsewhere(rows), apart), rows, apart)
    targets = make_targets(sampled_elsewhere(rows), apart)
    scaled = [a * f for a, f in zip(targets.advantages, targets.factors, strict=True)]
    wanted = learned(replace(targets, advantages=scaled, factors=None), rows, chosen)
    plain = learned(make_targets(rows, chosen), rows, chosen)
    for name, weight in wanted.items():
        assert torch.allclose(weighed[name], weight, rtol=1e-4, atol=1e-6), name
    assert not all(torch.allclose(weighed[k], plain[k], rtol=1e-4, atol=1e-6) for k in plain)


def learned(targets, rows: list[dict], chosen: Settings) -> dict:
    """The policy's weights after a step of plain gradient descent."""
    policy = llama()
    critic = llama_scorer(seed=7) if chosen.objective.critic else None
    models = {"policy": policy} | ({"critic": critic} if critic else {})
    optimizers = {k: torch.optim.SGD(model.parameters(), lr=0.1) for k, model in models.items()}
    learner = Learner(policy, critic, optimizers)
    list(Round(cpu_accelerator(), learner, rows, targets, chosen).steps(0))
    return weights_of(policy)


@each_objective
def test_without_the_correction_a_sampler_changes_no_bit(loss):
    rows = make_buffer(llama(), **SIX, moved=0.2)
    made = run(loss, sampled_elsewhere(rows), sampler_correction="none", beta=0.2)
    assert made.targets.gaps is not None
    assert same_weights(made.weights(), run(loss, rows, beta=0.2).weights())


@each_pair
def test_the_critic_has_the_loss_and_the_gradient_of_slow_plain_passes(make, make_critic):
    rows = make_buffer(make(), **SIX)
    options = {"aggregation": "seq-mean-token-sum", "train_batch_size": 4, "batch_acc": 2}
    made = run("ppo", rows, make=make, make_critic=make_critic, **options)
    critic, total = make_critic(seed=7), 0.0
    for i, row in enumerate(rows):
        for t, old in enumerate(row["values_old"]):
            ids = torch.tensor([row["prompt_ids"] + row["completion_ids"][:t]])
            value = critic(input_ids=ids, use_cache=False).logits[0, 0]
            wanted = made.targets.returns[i][t].item()
            clipped = old + (value - old).clamp(-0.15, 0.15)
            total = total + 0.5 * max((value - wanted) ** 2, (clipped - wanted) ** 2) / 23
    total.backward()
    assert made.records[0].critic.loss == pytest.approx(total.item(), rel=1e-4)
    assert made.records[0].critic.grad_norm == pytest.approx(norm_of(critic), rel=1e-3)


# Micro-batches and metrics.


@each_objective
def test_micro_batches_change_neither_loss_nor_norm_nor_weights(loss):
    rows = make_buffer(llama(), **SIX, moved=0.2)
    options = {"sgd": True, "beta": 0.2, "lr": 0.1, "lr_critic": 0.1}
    whole = run(loss, rows, **options)
    for size, acc in ((2, 3), (4, 2), (1, 6)):
        parts = run(loss, rows, train_batch_size=size, batch_acc=acc, **options)
        assert len(parts.records) == 1
        got, wanted = parts.records[0], whole.records[0]
        assert got.policy.loss == pytest.approx(wanted.policy.loss, rel=1e-4, abs=1e-6)
        assert got.policy.grad_norm == pytest.approx(wanted.policy.grad_norm, rel=1e-4)
        if loss == "ppo":
            assert got.critic.loss == pytest.approx(wanted.critic.loss, rel=1e-4)
            assert got.critic.grad_norm == pytest.approx(wanted.critic.grad_norm, rel=1e-4)
        weights = whole.weights()
        for name, weight in parts.weights().items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)


@each_objective
@pytest.mark.parametrize("limit", [1, 24, 40])
def test_a_limit_on_tokens_cuts_micro_batches_and_changes_no_step(loss, limit):
    rows = make_buffer(llama(), **SIX, moved=0.2)
    options = {"sgd": True, "beta": 0.2, "lr": 0.1, "lr_critic": 0.1, "ppo_epochs": 2}
    whole, parts = (run(loss, rows, train_max_tokens=cap, **options) for cap in (None, limit))
    lengths = [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows]
    settled = settings(loss, train_max_tokens=limit)
    learner = Learner(parts.policy, None, {})
    (step,) = Round(cpu_accelerator(), learner, rows, parts.targets, settled)._plan(0)
    used = parts.targets.used.nonzero()[:, 0].tolist()
    assert sorted(row for batch in step for row in batch) == used
    assert len(step) > 1 or (loss == "raft" and limit == 40)  # three rows of 13 tokens
    whole_unit = 2 if OBJECTIVES[loss].pairs else 1
    for batch in step:
        widest = max(lengths[row] for row in batch)
        assert len(batch) == whole_unit or len(batch) * widest <= limit
    for got, wanted in zip(parts.records, whole.records, strict=True):
        assert got.policy.loss == pytest.approx(wanted.policy.loss, rel=1e-4, abs=1e-6)
        assert got.policy.grad_norm == pytest.approx(wanted.policy.grad_norm, rel=1e-4)
    weights = whole.weights()
    for name, weight in parts.weights().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)


@each_objective
def test_metrics_do_not_depend_on_padding(loss):
    lengths = [3, 1, 60, 2, 4, 5]  # one mate pads all others by more than 50
    policy = llama()
    rows = make_buffer(policy, SIX["rewards"], lengths, moved=0.3)
    wide = run(loss, rows, beta=0.1)
    narrow = run(loss, rows, beta=0.1, train_batch_size=1, batch_acc=6)
    for name in ("ratio_mean", "ratio_max", "clipped_fraction", "kl", "kl_ref", "entropy"):
        left, right = getattr(wide.stats, name), getattr(narrow.stats, name)
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5, equal_nan=True)
    used = wide.targets.used
    assert (wide.stats.entropy[used] >= 0).all() and (wide.stats.kl[used] >= 0).all()
    clipped = wide.stats.clipped_fraction[used]
    assert ((clipped >= 0) & (clipped <= 1)).all()
    assert wide.records[0].kl == pytest.approx(narrow.records[0].kl, rel=1e-4)
    assert wide.records[0].clipped_fraction == pytest.approx(narrow.records[0].clipped_fraction)


def test_the_mean_kl_of_a_step_weighs_tokens_alike():
    rows = make_buffer(llama(), **SIX, moved=0.3)
    made = run("grpo", rows)
    total = 0.0
    for row in rows:
        new = plain_log_probs(llama(), row["prompt_ids"], row["completion_ids"], TEMPERATURE)
        log_ratios = [n - o for n, o in zip(new.tolist(), row["log_probs_old"], strict=True)]
        total += sum(math.exp(x) - 1 - x for x in log_ratios)
    assert made.records[0].kl == pytest.approx(total / 23, rel=1e-3)


def test_the_figures_of_a_step_are_of_its_own_rows():
    """Each step is one group; the rate is so low that the policy stays where it is."""
    rows = make_buffer(llama(), **SIX, moved=0.5)
    made, wanted = run("grpo", rows, train_batch_size=2, lr=1e-12), []
    for group in (rows[:2], rows[2:4], rows[4:]):
        kl, clipped, better = [], [], max(row["reward"] for row in group)
        for row in group:
            new = plain_log_probs(llama(), row["prompt_ids"], row["completion_ids"], TEMPERATURE)
            for n, old in zip(new.tolist(), row["log_probs_old"], strict=True):
                ratio = math.exp(n - old)
                kl.append(ratio - 1 - (n - old))
                clipped.append(ratio > 1.28 if row["reward"] == better else ratio < 0.8)
        wanted.append((sum(kl) / len(kl), sum(clipped) / len(clipped)))
    found = sorted((record.kl, record.clipped_fraction) for record in made.records)
    assert len({share for _, share in wanted}) > 1
    for pair, hand in zip(found, sorted(wanted), strict=True):
        assert pair == pytest.approx(hand, rel=1e-3)


def test_token_means_weigh_rows_by_length_and_leave_out_what_was_not_seen():
    means = torch.tensor([1.0, math.nan, 4.0])
    assert token_mean(means, torch.tensor([1, 100, 2])) == pytest.approx(3.0)
    assert token_mean(torch.tensor([math.nan]), torch.tensor([3])) == 0.0


def test_explained_variance_by_hand():
    values, returns = (
        [torch.tensor([1.0, 2.0]), torch.tensor([3.0])],
        [
            torch.tensor([1.0, 3.0]),
            torch.tensor([5.0]),
        ],
    )
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(values, returns) == pytest.approx(1 - 1.0 / 4.0)
    assert explained_variance(values, [torch.ones(2), torch.ones(1)]) is None
    assert explained_variance([torch.ones(1)], [torch.zeros(1)]) is None


# Stopping early, leaving out.


def test_target_kl_stops_after_the_epoch_that_exceeded_it():
    free = run("grpo", ppo_epochs=4, lr=2e-2)
    kls = [record.kl for record in free.records]
    assert len(kls) == 4 and kls[0] < 1e-6 < kls[1]
    stopped = run("grpo", ppo_epochs=4, lr=2e-2, target_kl=kls[1] / 2)
    assert [record.epoch for record in stopped.records] == [0, 1]
    loose = run("grpo", ppo_epochs=4, lr=2e-2, target_kl=2 * max(kls))
    assert len(loose.records) == 4


@each_objective
def test_unscorable_rows_train_nothing_and_count_in_no_divisor(loss):
    """A buffer with them gives the step of the buffer without them."""
    policy = llama()
    rewards = [1.0, 0.0, None, 0.25, None, 0.75, 0.5, None]
    rows = make_buffer(policy, rewards, [3, 1, 8, 2, 4, 5, 2, 6], size=4, moved=0.2)
    scored = [row for row in rows if row["reward"] is not None]
    options = {"sgd": True, "beta": 0.2, "lr": 0.1, "lr_critic": 0.1}
    with_them, without = run(loss, rows, **options), run(loss, scored, **options)
    got, wanted = with_them.records[0], without.records[0]
    assert got.policy.loss == pytest.approx(wanted.policy.loss, rel=1e-4, abs=1e-6)
    assert got.policy.grad_norm == pytest.approx(wanted.policy.grad_norm, rel=1e-4)
    assert got.kl == pytest.approx(wanted.kl, rel=1e-4)
    assert got.clipped_fraction == pytest.approx(wanted.clipped_fraction)
    weights = without.weights()
    for name, weight in with_them.weights().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)
    unused = [not used for used in with_them.targets.used.tolist()]
    assert all(unused[i] for i, row in enumerate(rows) if row["reward"] is None)
    assert with_them.stats.ratio_mean.isnan().tolist() == unused
    assert with_them.stats.entropy.isnan().tolist() == unused


@pytest.mark.parametrize("loss", ["grpo", "ppo"])
def test_a_step_of_unscorable_rows_only_is_not_taken(loss):
    rows = make_buffer(llama(), [None, None, 1.0, 0.0, None, None], SIX["lengths"])
    made = run(loss, rows, train_batch_size=2, warmup_steps=2)
    alone = run(loss, rows[2:4], train_batch_size=2, warmup_steps=2)
    assert len(made.records) == 1
    assert made.records[0].lr == alone.records[0].lr
    assert same_weights(made.weights(), alone.weights())


@pytest.mark.parametrize("loss", ["grpo", "ppo"])
def test_a_buffer_without_any_reward_leaves_weights_and_optimizer_as_they_were(loss):
    policy, critic = llama(), llama_scorer(seed=7)
    before = weights_of(policy) | {f"critic/{k}": v for k, v in weights_of(critic).items()}
    rows = make_buffer(policy, [None] * 6, SIX["lengths"])
    made = Run(policy, critic, rows, settings(loss, ppo_epochs=2, target_kl=0.1))
    assert made.records == []
    assert same_weights(made.weights(), before)
    assert not any(optimizer.state for optimizer in made.optimizers.values())


def test_groups_without_spread_move_nothing():
    policy = llama()
    before = weights_of(policy)
    rows = make_buffer(policy, [1.0, 1.0, 0.1 + 0.2, 0.3, 0.0, 0.0], SIX["lengths"])
    made = Run(policy, None, rows, settings("grpo"))
    assert made.records[0].policy.grad_norm == 0.0
    assert same_weights(weights_of(policy), before)


@pytest.mark.parametrize("loss", ["grpo", "ppo", "gspo"])
def test_a_loss_that_is_not_finite_stops_the_round_with_its_row(loss):
    rows = make_buffer(llama(), [1.0, 0.0, 0.25, 0.75, 0.0, 1.0], [3, 1, 8, 2, 4, 5])
    rows[3]["log_probs_old"][1] = math.nan
    with pytest.raises(NonFinite, match="^group 1, sample 1: the loss is nan; nonfinite: stop"):
        run(loss, rows, train_batch_size=2, batch_acc=3)


def test_a_value_loss_that_is_not_finite_stops_the_round_with_its_row():
    rows = make_buffer(llama(), **SIX)
    rows[4]["values_old"][1] = math.nan
    with pytest.raises(NonFinite, match="^group 2, sample 0: the loss is nan; nonfinite: stop"):
        run("ppo", rows, gamma=0.0, lam=0.0)


@each_objective
@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_n18_junk_in_an_unscorable_row_is_as_if_the_row_were_not_there(loss, nonfinite):
    """Its mates of the same micro-batch are trained on, and nothing is skipped."""
    rewards = [1.0, 0.0, None, 0.25, None, 0.75]
    rows, junk = (make_buffer(llama(), rewards, SIX["lengths"], size=3) for _ in "ab")
    for i in (2, 4):
        junk[i]["log_probs_old"][0], junk[i]["log_probs_ref"][0] = -200.0, 300.0
        junk[i]["values_old"][0] = 1e30
    options = {"beta": 0.2, "train_batch_size": 3, "nonfinite": nonfinite, "ppo_epochs": 2}
    wanted, got = run(loss, rows, **options), run(loss, junk, **options)
    assert got.records == wanted.records and same_weights(got.weights(), wanted.weights())
    assert [record.policy.skipped for record in got.records] == [0] * 4


@each_objective
@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_n18_one_overflowing_ratio_neither_stops_a_round_nor_outweighs_it(loss, nonfinite):
    for row in range(6):
        rows = make_buffer(llama(), [1.0, 0.0, 0.5, 0.5, 0.0, 1.0], SIX["lengths"])
        rows[row]["log_probs_old"][0] = -200.0
        beta = 0.2 if OBJECTIVES[loss].pairs else 0.0
        made = run(loss, rows, train_batch_size=2, batch_acc=3, nonfinite=nonfinite, beta=beta)
        assert made.records[0].policy.skipped == 0
        assert abs(made.records[0].policy.loss) < 300 and made.records[0].policy.grad_norm < 1000
        assert all(weight.isfinite().all() for weight in made.weights().values())


def test_under_skip_the_other_micro_batches_are_trained_on_and_the_bad_one_counted():
    rows = make_buffer(llama(), **SIX)
    rows[2]["log_probs_old"][3] = math.nan
    made = run("grpo", rows, train_batch_size=2, batch_acc=3, nonfinite="skip")
    assert made.records[0].policy.skipped == 1
    assert all(weight.isfinite().all() for weight in made.weights().values())
    assert not same_weights(made.weights(), weights_of(llama()))


# The critic's clip.


def test_old_values_stay_the_buffers_over_all_epochs():
    """Old value 0, return 1, clip 0.2: the loss of a value past 0.2 is held at 0.32, not at 0."""
    policy, rows = llama(), []
    for i, (prompt, answer) in enumerate(
        zip(random_ids(1, 3, 9), random_ids(2, 2, 3), strict=True)
    ):
        rows.append(
            buffer_row(
                policy,
                prompt,
                answer,
                group=i,
                reward=1.0,
                temperature=TEMPERATURE,
                values_old=[0.0] * len(answer),
            )
        )
    critic = llama_scorer(seed=7)
    with torch.no_grad():
        critic.score.weight.zero_()
    options = {"lam": 1.0, "clip_eps_val": 0.2, "ppo_epochs": 30, "lr_critic": 3e-3, "lr": 1e-5}
    made = Run(policy, critic, rows, settings("ppo", **options))
    losses = [record.critic.loss for record in made.records]
    assert losses[0] == pytest.approx(0.5)
    assert losses[-1] == pytest.approx(0.32, abs=1e-4)
    assert made.records[-1].critic.grad_norm == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["prompt_ids"]])
            assert 0.2 <= critic(input_ids=ids, use_cache=False).logits.item() < 0.9
    assert [row["values_old"] for row in rows] == [[0.0] * 2, [0.0] * 3]


# Epochs.


def test_rows_are_reshuffled_in_each_epoch_by_seed_and_round():
    def order(**options):
        policy, asked = llama(), []
        rows = make_buffer(policy, **SIX, size=1)

        class Watched(list):
            def __getitem__(self, index):
                asked.append(index)
                return super().__getitem__(index)

        chosen = settings("grpo", train_batch_size=1, ppo_epochs=3, **options)
        Run(policy, None, Watched(rows), chosen)
        return [tuple(asked[start : start + 6]) for start in range(0, 18, 6)]

    first = order()
    assert all(sorted(epoch) == list(range(6)) for epoch in first)
    assert len(set(first)) > 1
    assert order() == first
    assert order(seed=43) != first and order(round_number=2) != first


def test_a_round_twice_is_the_same_bit_for_bit():
    first, second = (run("ppo", beta=0.1, ppo_epochs=2, train_batch_size=2) for _ in range(2))
    assert same_weights(first.weights(), second.weights())
    assert first.records == second.records
    assert replace(settings("ppo"), seed=43) != settings("ppo")
