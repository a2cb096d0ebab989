"""RAFT and online DPO: which completions they keep, what they learn of them, that pairs stay whole.

Against peers' numbers (shared/vectors/direct.json), hand arithmetic and slow plain loops.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stages.base.errors import InputError
from stages.optimize import checked_targets, warn_of_stale_steps
from stages.rl.advantages import best_and_worst, best_of_group
from stages.rl.objectives import OBJECTIVES, Clip, pair_loss, token_weights
from stages.rl.targets import make_targets
from tests.helpers.models import llama, plain_log_probs, same_weights
from tests.helpers.shared import SHARED
from tests.rl.test_epochs import TEMPERATURE, hand_rows, make_buffer, run, settings

VECTORS = SHARED / "vectors" / "direct.json"
NO_CLIP = {"clip_eps_lo": math.nan, "clip_eps_hi": math.nan, "tau_pos": 1.0, "tau_neg": 1.0}
in_both_precisions = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
needs_vectors = pytest.mark.skipif(not VECTORS.is_file(), reason="no vectors beside the checkout")


def cases(kind: str, convention: str) -> list:
    if not VECTORS.is_file():
        return []
    found = [
        pytest.param(case, id=case["id"])
        for case in json.loads(VECTORS.read_text())
        if case["kind"] == kind and case["convention"]["name"].startswith(convention)
    ]
    assert found, f"no case of {kind}, {convention}"
    return found


def flat(rewards: list[list[float]], dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards by group -> (B,) rewards, (B,) groups."""
    groups = [i for i, group in enumerate(rewards) for _ in group]
    return torch.tensor([r for group in rewards for r in group], dtype=dtype), torch.tensor(groups)


def rows_at(picked: torch.Tensor, value: float) -> list[int]:
    return (picked == value).nonzero()[:, 0].tolist()


# Which completions are kept.


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", cases("rejection_sampling", "select=best-of-group"))
def test_the_best_of_each_group_is_the_peers(case, dtype):
    rewards = case["inputs"]["rewards"]
    picked = best_of_group(*flat(rewards, dtype))
    starts = [sum(map(len, rewards[:i])) for i in range(len(rewards))]
    wanted = [starts[group] + sample for group, sample in case["expected"]["selected"]]
    assert rows_at(picked, 1.0) == wanted
    assert picked.isnan().sum() == len(picked) - len(wanted)


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", cases("group_pairs", "pairs=best-worst;ties=skip"))
def test_the_pair_of_each_group_is_the_peers(case, dtype):
    rewards, expected = case["inputs"]["rewards"], case["expected"]
    values, groups = flat(rewards, dtype)
    picked = best_and_worst(values, groups)
    assert len(rows_at(picked, 1.0)) == len(rows_at(picked, -1.0)) == expected["pairs"]
    for i, (better, worse) in enumerate(zip(expected["chosen"], expected["rejected"], strict=True)):
        of_group = picked[groups == i]
        assert rows_at(of_group, 1.0) == ([] if better is None else [better])
        assert rows_at(of_group, -1.0) == ([] if worse is None else [worse])
        if better is not None:
            gap = values[groups == i][better] - values[groups == i][worse]
            assert gap.item() == pytest.approx(expected["reward_gap"][i], rel=1e-5)


def test_unscorable_rows_are_neither_best_nor_worst():
    rewards = torch.tensor([math.nan, 2.0, 1.0, math.nan, math.nan, 5.0, math.nan])
    groups = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    assert rows_at(best_of_group(rewards, groups), 1.0) == [1, 5]
    pairs = best_and_worst(rewards, groups)
    assert (rows_at(pairs, 1.0), rows_at(pairs, -1.0)) == ([1], [2])


def test_rewards_that_differ_by_rounding_alone_make_no_pair():
    rewards, groups = torch.tensor([0.1 + 0.2, 0.3, 1e6, 1e6 + 0.06]), torch.tensor([0, 0, 1, 1])
    assert best_and_worst(rewards.double(), groups).isnan().all()
    assert rows_at(best_of_group(rewards, groups), 1.0) in ([0, 2], [0, 3])


@pytest.mark.parametrize("estimator", [best_of_group, best_and_worst])
def test_an_infinite_reward_is_refused(estimator):
    with pytest.raises(ValueError, match="a reward is infinite"):
        estimator(torch.tensor([math.inf, 0.0]), torch.tensor([0, 0]))


def test_targets_of_what_is_kept_by_hand():
    raft = make_targets(hand_rows(), settings("raft"))
    assert [part.tolist() for part in raft.advantages] == [[1.0, 1.0], [0.0], [1.0], [0.0, 0.0]]
    assert raft.used.tolist() == [True, False, True, False]
    assert raft.scorable.all() and raft.rewards.tolist() == [1.0, 0.0, 3.0, 1.0]
    assert raft.units(pairs=False) == {0: [0], 2: [2]}
    rows = hand_rows(reward=[0.0, 1.0, 2.0, 2.0])
    pairs = make_targets(rows, settings("online_dpo", beta=0.1))
    assert [part.tolist() for part in pairs.advantages] == [[-1.0, -1.0], [1.0], [0.0], [0.0, 0.0]]
    assert pairs.used.tolist() == [True, True, False, False]
    assert pairs.units(pairs=True) == {0: [0, 1]}


def test_the_kl_in_the_reward_has_a_say_in_which_is_best():
    # Summed k1: 0.5, 0.25, 0, 1. Without it rows 0 and 2 are best.
    shaped = settings("raft", beta=5.0, kl_placement="reward", kl_estimator="k1")
    assert make_targets(hand_rows(), shaped).used.tolist() == [False, True, True, False]


@pytest.mark.parametrize("loss", ["raft", "online_dpo"])
def test_groups_without_a_right_answer_are_left_out_where_the_knob_says(loss):
    rows = hand_rows(reward_correctness=[0.0, 0.5, 0.0, 1.0])
    every = make_targets(rows, settings(loss))
    chosen = make_targets(rows, settings(loss, skip_wrong_groups=True))
    assert every.used.tolist() == [True, loss != "raft"] * 2
    assert chosen.used.tolist() == [False, False, True, loss != "raft"]
    unknown = hand_rows(reward_correctness=[None] * 4)
    assert not make_targets(unknown, settings(loss, skip_wrong_groups=True)).used.any()
    other = make_targets(rows, settings("grpo", skip_wrong_groups=True))
    assert other.used.all()


# Losses against the peers.


def selected_loss(case, loss: str, aggregation: str, dtype):
    """Loss of a case over the rows that the objective keeps, and its gradient by all log-probs."""
    i, objective = case["inputs"], OBJECTIVES[loss]
    mask = torch.tensor(i["mask"], dtype=torch.bool)
    leaf = torch.tensor(i["logp"], dtype=dtype, requires_grad=True)
    picked = objective.estimator(*flat(i["rewards"], dtype))
    used = ~picked.isnan()
    rows = used.nonzero()[:, 0]
    weights = token_weights(mask.sum(1), used, aggregation, mask.shape[1], dtype)[rows]
    against = torch.tensor(i.get("ref_logp", i["logp"]), dtype=dtype)[rows]
    clip = Clip(**NO_CLIP, beta=i.get("beta", 0.0))
    per_token, clipped = objective.loss(leaf[rows], against, picked[rows, None], mask[rows], clip)
    total = (per_token * weights[:, None]).sum()
    assert not clipped.any()
    return total, torch.autograd.grad(total, leaf)[0], picked


def close(case, found, wanted, dtype) -> None:
    tolerance = case["tolerance"][str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=dtype), **tolerance)


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", cases("policy_loss.raft", "select=best-of-group"))
def test_raft_is_the_peers(case, dtype):
    aggregation = case["convention"]["name"].rpartition("agg=")[2]
    total, gradient, picked = selected_loss(case, "raft", aggregation, dtype)
    assert rows_at(picked, 1.0) == case["expected"]["selected_rows"]
    close(case, total.detach(), case["expected"]["loss"], dtype)
    close(case, gradient, case["expected"]["grad_logp"], dtype)


@needs_vectors
@in_both_precisions
@pytest.mark.parametrize("case", cases("online_dpo", "pairs=best-worst;ties=skip;loss=sigmoid"))
def test_online_dpo_is_the_peers(case, dtype):
    total, gradient, picked = selected_loss(case, "online_dpo", "seq-mean-token-mean", dtype)
    assert rows_at(picked, 1.0) == case["expected"]["chosen_rows"]
    assert rows_at(picked, -1.0) == case["expected"]["rejected_rows"]
    close(case, total.detach(), case["expected"]["loss"], dtype)
    close(case, gradient, case["expected"]["grad_logp"], dtype)


@needs_vectors
@pytest.mark.parametrize("case", cases("pair_accumulation", "agg=pair-mean"))
def test_shares_of_unlike_micro_batches_of_pairs_are_the_peers(case):
    """Rows 0 and 1 are the first pair: the divisor counts all pairs of the step."""
    i, expected = case["inputs"], case["expected"]
    width = max(len(i[f"{side}_mask"][0]) for side in ("chosen", "rejected"))

    def rows(name: str, kind) -> torch.Tensor:
        sides = [i[name.format(side)] for side in ("chosen", "rejected")]
        padded = [[row + [0] * (width - len(row)) for row in side] for side in sides]
        return torch.tensor(padded, dtype=kind).transpose(0, 1).reshape(-1, width)

    new, ref = (rows(name, torch.float64) for name in ("{}_logp", "ref_{}_logp"))
    mask, signs = rows("{}_mask", torch.bool), torch.tensor([[1.0], [-1.0]] * 4).double()
    weights = token_weights(mask.sum(1), mask.any(1), "seq-mean-token-mean", width, torch.float64)
    clip = Clip(**NO_CLIP, beta=i["beta"])
    for split, wanted in expected["splits"].items():
        shares, start = [], 0
        for size in (2 * int(pairs) for pairs in split.split("+")):
            part = slice(start, start + size)
            loss, _ = pair_loss(new[part], ref[part], signs[part], mask[part], clip)
            shares.append((loss * weights[part, None]).sum().item())
            start += size
        assert shares == pytest.approx(wanted["micro_share"])
        assert sum(shares) == pytest.approx(expected["loss"])


# The loss of pairs.


def two_pairs(dtype=torch.float64):
    """Two pairs, worse row first in the second; lengths 3, 1 and 2, 3."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    generator = torch.Generator().manual_seed(5)
    new, ref = (-3 * torch.rand(4, 3, generator=generator, dtype=dtype) for _ in "ab")
    return new, ref, torch.tensor([[1.0], [-1.0], [-1.0], [1.0]], dtype=dtype), mask


def test_the_loss_of_a_pair_by_hand_is_written_to_all_of_its_tokens():
    new, ref, advantages, mask = two_pairs()
    loss, clipped = pair_loss(new, ref, advantages, mask, Clip(**NO_CLIP, beta=0.5))
    ratio = [sum((new - ref)[b][mask[b]].tolist()) for b in range(4)]
    first = math.log(1 + math.exp(-0.5 * (ratio[0] - ratio[1])))
    second = math.log(1 + math.exp(-0.5 * (ratio[3] - ratio[2])))
    for b, wanted in enumerate((first, first, second, second)):
        assert loss[b][mask[b]].tolist() == pytest.approx([wanted] * int(mask[b].sum()))
    assert loss[~mask].eq(0).all() and not clipped.any()


def test_at_the_reference_a_pair_has_ln_2_and_pushes_its_sides_apart_alike():
    _, ref, advantages, mask = two_pairs()
    new = ref.clone().requires_grad_()
    loss, _ = pair_loss(new, ref, advantages, mask, Clip(**NO_CLIP, beta=0.5))
    weights = token_weights(mask.sum(1), mask.any(1), "seq-mean-token-mean", 3, torch.float64)
    total = (loss * weights[:, None]).sum()
    assert total.item() == pytest.approx(math.log(2))
    # beta / 2 over two pairs, up for the better and down for the worse.
    wanted = torch.where(mask, -advantages * 0.5 / 2 / 2, 0.0)
    torch.testing.assert_close(torch.autograd.grad(total, new)[0], wanted)


def test_the_gradient_of_the_loss_of_pairs_is_that_of_finite_differences():
    new, ref, advantages, mask = two_pairs()
    clip = Clip(**NO_CLIP, beta=0.7)
    new.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: pair_loss(x, ref, advantages, mask, clip)[0], new)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 500.0])
def test_junk_outside_the_mask_reaches_no_pair(junk):
    new, ref, advantages, mask = two_pairs()
    clip = Clip(**NO_CLIP, beta=0.5)
    dirty = [torch.where(mask, x, junk) for x in (new, ref, advantages.expand(4, 3))]
    new, dirty_new = new.requires_grad_(), dirty[0].requires_grad_()
    wanted, got = pair_loss(new, ref, advantages, mask, clip)[0], pair_loss(*dirty, mask, clip)[0]
    assert torch.equal(got, wanted)
    gradient = torch.autograd.grad(got.sum(), dirty_new)[0]
    assert torch.equal(gradient, torch.autograd.grad(wanted.sum(), new)[0])


@pytest.mark.parametrize("far", [1e4, -1e4])
def test_a_log_ratio_however_far_leaves_loss_and_gradient_finite(far):
    new, ref, advantages, mask = two_pairs(torch.float32)
    ref[0, 0] = new[0, 0] - far
    new.requires_grad_()
    loss, _ = pair_loss(new, ref, advantages, mask, Clip(**NO_CLIP, beta=0.5))
    gradient = torch.autograd.grad(loss.sum(), new)[0]
    assert loss.isfinite().all() and gradient.isfinite().all()
    assert gradient.abs().max() <= 0.5 * (2 + 3)  # beta times the tokens that a pair is written to


# Rounds.

REWARDS = [1.0, 0.0, 0.5, 0.25, 0.75, 0.75, 0.75, 0.75, 0.0, 1.0, 0.1, 0.2]
LENGTHS = [3, 1, 8, 2, 4, 5, 1, 2, 6, 3, 2, 4]  # three groups of four; the second has no spread


def twelve(moved: float = 0.2) -> list[dict]:
    return make_buffer(llama(), REWARDS, LENGTHS, size=4, moved=moved)


def plain_loss(policy, rows, loss: str, beta: float) -> torch.Tensor:
    """The step's loss from plain forward passes, completion by completion."""
    of_row = [
        plain_log_probs(policy, row["prompt_ids"], row["completion_ids"], TEMPERATURE)
        for row in rows
    ]
    if loss == "raft":
        best = [0, 4, 9]
        return -sum(of_row[i].sum() for i in best) / sum(LENGTHS[i] for i in best)
    total = 0.0
    for better, worse in ((0, 1), (9, 8)):
        lc, lr = (of_row[i].sum() - sum(rows[i]["log_probs_ref"]) for i in (better, worse))
        total = total - torch.nn.functional.logsigmoid(beta * (lc - lr)) / 2
    return total


@pytest.mark.parametrize("loss", ["raft", "online_dpo"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 12])
def test_a_step_has_the_loss_and_gradient_of_plain_passes_at_any_size_of_micro_batches(loss, size):
    rows, policy = twelve(), llama()
    wanted = plain_loss(policy, rows, loss, beta=0.3)
    wanted.backward()
    norm = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]).norm()
    made = run(loss, rows, beta=0.3, train_batch_size=size, batch_acc=-(-12 // size))
    assert len(made.records) == 1
    assert made.records[0].policy.loss == pytest.approx(wanted.item(), rel=1e-4)
    assert made.records[0].policy.grad_norm == pytest.approx(norm.item(), rel=1e-3)


@pytest.mark.parametrize("size, acc", [(1, 1), (3, 1), (3, 2), (5, 1), (4, 1)])
def test_pairs_are_whole_in_every_step_and_every_pair_is_trained_on_once_a_pass(size, acc):
    """A step is as many completions of the buffer as with any objective, used or not."""
    rows, asked = twelve(), []

    class Watched(list):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    made = run("online_dpo", Watched(rows), beta=0.3, train_batch_size=size, batch_acc=acc)
    assert sorted(zip(asked[::2], asked[1::2], strict=True)) == [(0, 1), (8, 9)]
    assert len(made.records) <= math.ceil(12 / (size * acc))
    unused = [not used for used in made.targets.used.tolist()]
    assert made.stats.entropy.isnan().tolist() == unused
    assert [ratios is None for ratios in made.stats.ratios] == unused


def test_the_steps_of_a_round_are_those_of_grpo_and_their_micro_batches_are_filled():
    """Four completions of each prompt, one of them used: a quarter of the rows, as many steps."""
    rewards = [1.0, 0.0, 0.5, 0.2] * 6
    rows = make_buffer(llama(), rewards, [2] * 24, size=4)
    options = {"train_batch_size": 4, "batch_acc": 2}
    grpo, raft = (run(loss, rows, **options) for loss in ("grpo", "raft"))
    assert len(grpo.records) == len(raft.records) == 3
    assert int(raft.targets.used.sum()) == 6


@pytest.mark.parametrize("loss", ["raft", "online_dpo"])
def test_several_passes_go_on_learning_from_what_was_kept(loss):
    once, more = (
        run(loss, twelve(moved=0.0), beta=0.3, ppo_epochs=epochs, lr=3e-3) for epochs in (1, 4)
    )
    losses = [record.policy.loss for record in more.records]
    assert [record.epoch for record in more.records] == [0, 1, 2, 3]
    assert losses == sorted(losses, reverse=True) and losses[3] < losses[0] - 0.05
    assert losses[0] == once.records[0].policy.loss
    assert more.records[0].kl == pytest.approx(0.0, abs=1e-8) and more.records[3].kl > 1e-4
    stopped = run(
        loss, twelve(moved=0.0), beta=0.3, ppo_epochs=4, lr=3e-3, target_kl=more.records[1].kl / 2
    )
    assert [record.epoch for record in stopped.records] == [0, 1]


@pytest.mark.parametrize("loss", ["raft", "online_dpo"])
def test_a_round_of_kept_completions_twice_is_the_same_bit_for_bit(loss):
    options = {"beta": 0.3, "ppo_epochs": 2, "train_batch_size": 3}
    first, second = (run(loss, twelve(), **options) for _ in range(2))
    assert same_weights(first.weights(), second.weights()) and first.records == second.records


def test_raft_looks_at_no_reference_and_at_nothing_of_what_it_left_out():
    rows = twelve()
    wanted = run("raft", rows, beta=0.0)
    for i, row in enumerate(rows):
        row["log_probs_ref"] = None
        if i not in (0, 4, 9):
            row["log_probs_old"] = [math.nan] * len(row["log_probs_old"])
    got = run("raft", rows, beta=0.0)
    assert same_weights(got.weights(), wanted.weights())


# What the stage says.


@pytest.mark.parametrize(
    ("knobs", "rewards", "expected"),
    [
        ({"loss": "online_dpo"}, [1.0, 1.0, 0.0, 0.0], "in each group the rewards are all alike"),
        (
            {"loss": "raft", "skip_wrong_groups": True},
            [1.0, 0.0, 2.0, 0.0],
            "in each group no answer is right (skip_wrong_groups)",
        ),
        ({"loss": "raft"}, [None] * 4, "no completion has a reward; expected at least one"),
    ],
)
def test_a_buffer_with_nothing_to_train_on_is_refused_in_one_line(knobs, rewards, expected):
    rows = hand_rows(reward=rewards, reward_correctness=[0.0] * 4)
    chosen = SimpleNamespace(loss=knobs["loss"])
    with pytest.raises(InputError) as refusal:
        checked_targets(Path("b.parquet"), rows, settings(**knobs, beta=0.1), chosen)
    assert str(refusal.value).startswith("b.parquet: ") and expected in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_several_passes_without_a_target_kl_are_told_of(capsys):
    chosen = SimpleNamespace(loss="raft")
    for options, told in (
        ({"ppo_epochs": 2}, True),
        ({"ppo_epochs": 2, "target_kl": 0.1}, False),
        ({"ppo_epochs": 1}, False),
    ):
        warn_of_stale_steps(chosen, settings("raft", **options), steps=8)
        assert ("loss raft has no clip: in 2 passes" in capsys.readouterr().out) == told
