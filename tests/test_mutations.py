"""Faults planted in the maths: for each one a quick test must go red.

Each case edits one line in a copy of the code and runs the tests of that module.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.tiny import ROOT

pytestmark = pytest.mark.slow

OBJECTIVES = "stages/rl/objectives.py"
ADVANTAGES = "stages/rl/advantages.py"
CORRECTION = "stages/rl/correction.py"
EPOCHS = "stages/rl/epochs.py"
TARGETS = "stages/rl/targets.py"
SUPERVISED = "stages/training/supervised.py"
STEPS = "stages/training/steps.py"
OPTIMIZE = "stages/optimize.py"
REWARD_MODEL = "stages/train_rm.py"
PAIR_LOSSES = "stages/direct/losses.py"
PAIRS = "stages/direct/pairs.py"
OUTCOME = "stages/reward/outcome.py"
LABELLED = "stages/reward/labelled.py"
SELECTION = "tests/rl/test_selection.py"


@dataclass(frozen=True)
class Fault:
    """`old`, which stands in `file` once, becomes `new`; `tests`, or the module's own, notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str = ""


FAULTS = [
    Fault(
        "sign of the policy gradient",
        OBJECTIVES,
        "loss = -_on_actions(advantages, action_mask) * log_probs",
        "loss = _on_actions(advantages, action_mask) * log_probs",
    ),
    Fault(
        "sign of the clipped loss",
        OBJECTIVES,
        "return -torch.where(clipped",
        "return torch.where(clipped",
    ),
    Fault("optimistic clip", OBJECTIVES, "clipped = bounded < plain", "clipped = bounded > plain"),
    Fault(
        "no lower bound",
        OBJECTIVES,
        "bounded = ratio.clamp(1 - clip.clip_eps_lo, ",
        "bounded = ratio.clamp(0, ",
    ),
    Fault(
        "old and new swapped",
        OBJECTIVES,
        "log_probs - log_probs_old, 0.0)",
        "log_probs_old - log_probs, 0.0)",
    ),
    Fault(
        "mask dropped from the ratio",
        OBJECTIVES,
        "return torch.where(action_mask, log_probs - log_probs_old, 0.0)",
        "return log_probs - log_probs_old",
    ),
    Fault(
        "mask dropped from the advantage",
        OBJECTIVES,
        "return torch.where(action_mask, advantages, 0.0)",
        "return advantages.expand(action_mask.shape)",
    ),
    Fault(
        "gradient through the weight",
        OBJECTIVES,
        "action_mask).exp().detach()",
        "action_mask).exp()",
    ),
    Fault(
        "gate temperatures swapped",
        OBJECTIVES,
        "masked_fill(advantages > 0,",
        "masked_fill(advantages < 0,",
    ),
    Fault(
        "unused rows weigh", OBJECTIVES, "return torch.where(used, weights, 0.0)", "return weights"
    ),
    Fault(
        "unused rows in the divisor",
        OBJECTIVES,
        "rows = used.sum()",
        "rows = torch.ones_like(used).sum()",
    ),
    Fault(
        "value loss takes the smaller", OBJECTIVES, "0.5 * torch.maximum(", "0.5 * torch.minimum("
    ),
    Fault("population deviation", ADVANTAGES, "(rewards.std() +", "(rewards.std(correction=0) +"),
    Fault("leave-one-out keeps the one", ADVANTAGES, "(size / (size - 1))", "1.0"),
    Fault(
        "NaN rewards in the mean",
        ADVANTAGES,
        "usable = ~rewards.isnan()",
        "usable = torch.ones_like(rewards).bool()",
    ),
    Fault(
        "value enters with a plus",
        ADVANTAGES,
        "next_value - values[:, t]",
        "next_value + values[:, t]",
    ),
    Fault(
        "GAE without gamma",
        ADVANTAGES,
        "delta + gamma * lam * next_advantage",
        "delta + lam * next_advantage",
    ),
    Fault(
        "whitening by the population",
        ADVANTAGES,
        "rsqrt(valid.var() +",
        "rsqrt(valid.var(correction=0) +",
    ),
    Fault(
        "KL paid instead of charged",
        ADVANTAGES,
        "return rewards - beta *",
        "return rewards + beta *",
    ),
    Fault("KL over padding", ADVANTAGES, "torch.where(action_mask, kl, 0.0).sum(1)", "kl.sum(1)"),
    Fault(
        "policy and reference swapped",
        "stages/rl/kl.py",
        "x = log_probs - log_probs_ref",
        "x = log_probs_ref - log_probs",
    ),
    Fault(
        "k3 without its control",
        "stages/rl/kl.py",
        "return torch.expm1(-x) + x",
        "return torch.expm1(-x)",
    ),
    Fault(
        "KL not added to the loss",
        EPOCHS,
        "loss = loss + settings.beta * kl_ref",
        "loss = loss - settings.beta * kl_ref",
    ),
    Fault("KL in reward and in loss", EPOCHS, 'if settings.kl_placement == "loss":', "if True:"),
    Fault(
        "no whitening for PPO",
        TARGETS,
        "cut(whiten(advantages, scored), lengths)",
        "cut(advantages, lengths)",
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "temperature multiplied",
        "stages/models/log_probs.py",
        "logits if temperature == 1 else logits / temperature",
        "logits if temperature == 1 else logits * temperature",
        "tests/models/test_log_probs.py",
    ),
    Fault(
        "reward model prefers the rejected",
        "stages/reward/bradley_terry.py",
        "gap = chosen - rejected\n    if margin",
        "gap = rejected - chosen\n    if margin",
        "tests/reward/test_bradley_terry.py",
    ),
    Fault(
        "score read one token early",
        "stages/models/scorers.py",
        "states.lengths]\n    return scorer.score(last)",
        "states.lengths - 1]\n    return scorer.score(last)",
        "tests/models/test_scorers.py",
    ),
    Fault(
        "states of the answer read one token late",
        "stages/models/forward.py",
        "[len(rest) - 1 for rest in rests], completions",
        "[len(rest) for rest in rests], completions",
        "tests/models/test_forward.py",
    ),
    Fault(
        "micro-batches averaged, not added",
        "stages/training/steps.py",
        "total, kept = total + loss.detach(), kept + 1",
        "total, kept = total + loss.detach() / 2, kept + 1",
        "tests/training",
    ),
    Fault(
        "rate of 0 in the first update",
        "stages/training/steps.py",
        "learning_rate(done + 1,",
        "learning_rate(done,",
        "tests/training",
    ),
    Fault(
        "the rate without its end",
        EPOCHS,
        "self.settings.warmup_steps, self.settings.decay_steps",
        "self.settings.warmup_steps, None",
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "k1 in the reward whatever is asked",
        TARGETS,
        'torch.tensor(row["log_probs_ref"]), estimator)',
        'torch.tensor(row["log_probs_ref"]), "k1")',
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "values clipped by the ratio's bound",
        EPOCHS,
        "mask, self.settings.clip_eps_val",
        "mask, self.settings.clip.clip_eps_lo",
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "the critic by the policy's aggregation",
        EPOCHS,
        'self._weights(batches, "token-mean")',
        "self._weights(batches, settings.aggregation)",
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "the divisor of the first micro-batch",
        SUPERVISED,
        "self.divisor_of([row for batch in batches for row in batch])",
        "self.divisor_of(batches[0])",
        "tests/training/test_supervised.py",
    ),
    Fault(
        "the schedule of one epoch",
        SUPERVISED,
        "recipe.warmup_steps, total)",
        "recipe.warmup_steps, total // recipe.epochs)",
        "tests/training/test_supervised.py",
    ),
    Fault(
        "mean of a micro-batch of pairs",
        REWARD_MODEL,
        "centering).sum() / divisor",
        "centering).mean() / divisor",
        "tests/stages/test_scripts.py",
    ),
    Fault(
        "the bounds of the clip swapped",
        OPTIMIZE,
        "knobs.clip_eps_lo, knobs.clip_eps_hi,",
        "knobs.clip_eps_hi, knobs.clip_eps_lo,",
        "tests/stages/test_scripts.py",
    ),
    Fault(
        "another beta2",
        STEPS,
        "betas=(0.9, 0.95)",
        "betas=(0.9, 0.999)",
        "tests/training/test_steps.py",
    ),
    Fault(
        "gate temperatures swapped in the settings",
        OPTIMIZE,
        "knobs.tau_pos, knobs.tau_neg",
        "knobs.tau_neg, knobs.tau_pos",
        "tests/stages/test_scripts.py",
    ),
    Fault(
        "critic at the policy's rate",
        EPOCHS,
        "losses, done, settings.lr_critic",
        "losses, done, settings.lr",
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "policy at the critic's rate",
        EPOCHS,
        "losses, done, settings.lr)",
        "losses, done, settings.lr_critic)",
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "gamma and lambda swapped",
        TARGETS,
        "scored, settings.gamma, settings.lam",
        "scored, settings.lam, settings.gamma",
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "KL against the old policy",
        EPOCHS,
        '_padded(rows, "log_probs_ref", mask)',
        '_padded(rows, "log_probs_old", mask)',
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "factor of another engine's sample upside down",
        CORRECTION,
        'torch.tensor(row["log_probs_old"]) - torch.tensor(row["log_probs_sampler"])',
        'torch.tensor(row["log_probs_sampler"]) - torch.tensor(row["log_probs_old"])',
    ),
    Fault(
        "factor of another engine's sample without its cut",
        CORRECTION,
        "logs.clamp(max=math.log(cap)).exp()",
        "logs.exp()",
    ),
    Fault(
        "factor of another engine's sample left out",
        EPOCHS,
        "loss = loss * stack([self.targets.factors[i] for i in batch], mask)",
        "pass",
    ),
    Fault(
        "temperature left out",
        EPOCHS,
        "_log_probs_and_entropy(policy, states, settings.temperature)",
        "_log_probs_and_entropy(policy, states, 1.0)",
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "cap of another knob in the constant divisor",
        EPOCHS,
        "aggregation, self.settings.max_new_tokens",
        "aggregation, self.settings.train_batch_size",
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "one order for all rounds",
        EPOCHS,
        'settings.round_number, "shuffle"',
        '1, "shuffle"',
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "rows' means weighed alike",
        "stages/rl/stats.py",
        "weights = torch.where(known, lengths, 0)",
        "weights = torch.where(known, 1, 0)",
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "KL of a step over all rows seen",
        EPOCHS,
        "token_mean(self.stats.kl[rows], lengths)",
        "token_mean(self.stats.kl, self.targets.lengths)",
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "steps not counted on", EPOCHS, "                done += 1\n", "", "tests/rl/test_epochs.py"
    ),
    Fault(
        "unscorable rows stay in the plan",
        "stages/rl/targets.py",
        "for row in self.used.nonzero()[:, 0].tolist()]",
        "for row in range(len(self.used))]",
        "tests/rl/test_epochs.py",
    ),
    Fault(
        "ratio bound forgotten",
        OBJECTIVES,
        "log_ratio.clamp(max=math.log(RATIO_LIMIT)).exp()",
        "log_ratio.exp()",
        "tests/rl/test_objectives.py",
    ),
    Fault(
        "no weight decay at all",
        STEPS,
        'if p.ndim >= 2], "weight_decay": weight_decay',
        'if p.ndim >= 2], "weight_decay": 0.0',
        "tests/training/test_steps.py",
    ),
    Fault(
        "weight decay of Fit left out",
        SUPERVISED,
        "adamw(self.model, recipe.lr, recipe.weight_decay)",
        "adamw(self.model, recipe.lr, 0.0)",
        "tests/training/test_supervised.py",
    ),
    Fault(
        "max_norm of Fit left out",
        SUPERVISED,
        "recipe.max_norm,",
        "1e9,",
        "tests/training/test_supervised.py",
    ),
    Fault(
        "nonfinite of Fit left out",
        SUPERVISED,
        "(recipe.max_norm, recipe.nonfinite)",
        '(recipe.max_norm, "stop")',
        "tests/training/test_supervised.py",
    ),
    Fault(
        "Fit in evaluation mode",
        SUPERVISED,
        "        self.model.train()\n",
        "",
        "tests/training/test_supervised.py",
    ),
    Fault(
        "one order for all epochs of Fit",
        SUPERVISED,
        "recipe.stage, epoch)",
        "recipe.stage, 0)",
        "tests/training/test_supervised.py",
    ),
    Fault(
        "drop_last left out",
        SUPERVISED,
        "recipe.batch_acc, recipe.drop_last)",
        "recipe.batch_acc, False)",
        "tests/training/test_supervised.py",
    ),
    Fault(
        "margins left out",
        REWARD_MODEL,
        "bradley_terry_loss(chosen, rejected, margin, centering)",
        "bradley_terry_loss(chosen, rejected, None, centering)",
        "tests/stages/test_scripts.py",
    ),
    Fault(
        "centring in the validation loss",
        REWARD_MODEL,
        "margin, 0.0).mean()",
        "margin, rm.centering).mean()",
        "tests/stages/test_scripts.py",
    ),
    Fault(
        "validation margin by the wrong sign",
        REWARD_MODEL,
        '"validation_margin": (chosen - rejected)',
        '"validation_margin": (rejected - chosen)',
        "tests/stages/test_scripts.py",
    ),
    Fault(
        "summary's tenth from the wrong end",
        "stages/train_sft.py",
        "mean(steps[-tenth:])",
        "mean(steps[:tenth])",
        "tests/stages/test_scripts.py",
    ),
    Fault(
        "critic's loss in the policy's place",
        OPTIMIZE,
        '"value_loss": None if critic is None else critic.loss',
        '"value_loss": None if critic is None else record.policy.loss',
        "tests/stages/test_scripts.py",
    ),
    Fault(
        "the last step's loss for the round's",
        OPTIMIZE,
        '"loss": means.of("loss")',
        '"loss": steps[-1]["loss"]',
        "tests/stages/test_scripts.py",
    ),
    Fault(
        "mean ratio for the largest",
        OPTIMIZE,
        "stats.ratio_max[~stats.ratio_max.isnan()].max()",
        "stats.ratio_max[~stats.ratio_max.isnan()].mean()",
        "tests/stages/test_scripts.py",
    ),
    Fault(
        "groups without a reward are flat",
        OPTIMIZE,
        "targets.scorable) if len(rows)]",
        "targets.scorable)]",
        "tests/stages/test_scripts.py",
    ),
    Fault(
        "step counter starts anew",
        OPTIMIZE,
        "step=state.step + len(steps)",
        "step=len(steps)",
        "tests/stages/test_chain.py",
    ),
    Fault(
        "optimizer's state not loaded",
        OPTIMIZE,
        "if name in state.optimizers:",
        "if False:",
        "tests/stages/test_chain.py",
    ),
    Fault(
        "score at temperature 1",
        "stages/score.py",
        "model, temperature = self.load_reference(folder), self.knobs.temperature",
        "model, temperature = self.load_reference(folder), 1.0",
        "tests/stages/test_chain.py",
    ),
    Fault(
        "unscored groups not counted anew",
        "stages/rollouts/engine.py",
        "vars(counts).update(vars(start))",
        "vars(counts).update(vars(start) | {'unscored': counts.unscored})",
        "tests/rollouts/test_engine.py",
    ),
    Fault(
        "infinite values pass",
        "stages/base/contents.py",
        "pc.invert(pc.is_finite(flat))",
        "pc.is_nan(flat)",
        "tests/base/test_contents.py",
    ),
    Fault(
        "vocabulary off by one",
        "stages/base/contents.py",
        "if token >= size:",
        "if token > size:",
        "tests/base/test_contents.py",
    ),
    Fault(
        "rows counted from each batch",
        "stages/base/contents.py",
        "        start += batch.num_rows\n    return largest",
        "    return largest",
        "tests/base/test_contents.py",
    ),
    Fault(
        "RAFT keeps the worst",
        ADVANTAGES,
        "argmax()]] = 1.0\n    return picked",
        "argmin()]] = 1.0\n    return picked",
        SELECTION,
    ),
    Fault(
        "the worst of a pair for a better one",
        ADVANTAGES,
        "argmin()]] = -1.0",
        "argmin()]] = 1.0",
        SELECTION,
    ),
    Fault(
        "a tie makes a pair",
        ADVANTAGES,
        "        if has_spread(rewards[rows]):\n            picked",
        "        if len(rows) > 1:\n            picked",
        SELECTION,
    ),
    Fault(
        "pairs pushed the wrong way",
        OBJECTIVES,
        "-logsigmoid(clip.beta * gaps",
        "-logsigmoid(-clip.beta * gaps",
        SELECTION,
    ),
    Fault(
        "beta left out of online DPO",
        OBJECTIVES,
        "clip.beta * gaps.view",
        "gaps.view",
        SELECTION,
    ),
    Fault(
        "a pair's loss on one of its rows",
        OBJECTIVES,
        "torch.where(action_mask, of_pairs.repeat_interleave(2)[:, None], 0.0)",
        "torch.where(action_mask & (advantages > 0), of_pairs.repeat_interleave(2)[:, None], 0.0)",
        SELECTION,
    ),
    Fault(
        "RAFT's answers weighed alike",
        OBJECTIVES,
        '        best_of_group,\n        "token-mean",',
        '        best_of_group,\n        "seq-mean-token-mean",',
        SELECTION,
    ),
    Fault(
        "online DPO against the old policy",
        EPOCHS,
        "against = ref if settings.objective.pairs else old",
        "against = old",
        SELECTION,
    ),
    Fault(
        "pairs parted",
        TARGETS,
        "        if pairs:\n",
        "        if False:\n",
        SELECTION,
    ),
    Fault(
        "wrong groups kept",
        TARGETS,
        "if settings.objective.selects and settings.skip_wrong_groups:",
        "if False:",
        SELECTION,
    ),
    Fault(
        "a wrong answer counts as right",
        TARGETS,
        '(row["reward_correctness"] or 0.0) >= 1',
        '(row["reward_correctness"] or 0.0) >= 0',
        SELECTION,
    ),
    Fault(
        "answers left out are trained on",
        TARGETS,
        "        used = used & ~advantages.isnan()\n",
        "",
        SELECTION,
    ),
    Fault(
        "log-ratios added",
        PAIR_LOSSES,
        "    gap = pairs.chosen_ratio - pairs.rejected_ratio\n    gap = gap -",
        "    gap = pairs.chosen_ratio + pairs.rejected_ratio\n    gap = gap -",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "DPOP rewards what fell",
        PAIR_LOSSES,
        "relu(-pairs.chosen_ratio)",
        "relu(pairs.chosen_ratio)",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "margin added",
        PAIR_LOSSES,
        "relu(-pairs.chosen_ratio)\n    return _preferred(knobs.beta * gap - ",
        "relu(-pairs.chosen_ratio)\n    return _preferred(knobs.beta * gap + ",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "conservative labels with the sign of robust ones",
        PAIR_LOSSES,
        "return -(1 - e) * logsigmoid(z) - e",
        "return -(1 - e) * logsigmoid(z) + e",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "robust labels without their scale",
        PAIR_LOSSES,
        " + e * logsigmoid(-z)) / (1 - 2 * e)",
        " + e * logsigmoid(-z))",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "IPO towards twice its gap",
        PAIR_LOSSES,
        "    return (gap - 1 / (2 * knobs.beta)).square()\n",
        "    return (gap - 1 / knobs.beta).square()\n",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "hinge without beta",
        PAIR_LOSSES,
        "relu(1 - knobs.beta * (",
        "relu(1 - (",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "apo_zero lowers what was chosen",
        PAIR_LOSSES,
        "torch.sigmoid(knobs.beta * pairs.rejected_ratio) - torch",
        "torch.sigmoid(knobs.beta * pairs.rejected_ratio) + torch",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "both sides up in apo_down",
        PAIR_LOSSES,
        "return torch.sigmoid(knobs.beta * pairs.chosen_ratio) - torch.sigmoid(knobs.beta * gap)",
        "return -torch.sigmoid(knobs.beta * pairs.chosen_ratio) - torch.sigmoid(knobs.beta * gap)",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "SimPO's gamma over beta",
        PAIR_LOSSES,
        "-logsigmoid(knobs.beta * gap - knobs.gamma)",
        "-logsigmoid(knobs.beta * (gap - knobs.gamma))",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "SimPO's rejected answer by the chosen one's length",
        PAIR_LOSSES,
        "pairs.rejected_tokens\n    return -logsigmoid",
        "pairs.chosen_tokens\n    return -logsigmoid",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "odds without their denominator",
        PAIR_LOSSES,
        "(x - _log1mexp(x)) - (y - _log1mexp(y))",
        "x - y",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "ORPO without its fine-tuning term",
        PAIR_LOSSES,
        "return -x - knobs.beta",
        "return -knobs.beta",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "fine-tuning on the sum",
        PAIR_LOSSES,
        "return -pairs.chosen / pairs.chosen_tokens\n",
        "return -pairs.chosen\n",
        "tests/direct/test_losses.py",
    ),
    Fault(
        "sides of a pair swapped",
        PAIRS,
        "chosen, rejected = sums.chunk(2)",
        "rejected, chosen = sums.chunk(2)",
        "tests/direct/test_pairs.py",
    ),
    Fault(
        "KL the other way round",
        PAIRS,
        "total += (ours.exp() * (ours - theirs))",
        "total += (theirs.exp() * (theirs - ours))",
        "tests/direct/test_pairs.py",
    ),
    Fault(
        "nll_weight left out",
        PAIRS,
        "return found + nll_weight * negative",
        "return found + negative",
        "tests/direct/test_pairs.py",
    ),
    Fault(
        "a tie of implicit rewards is a win",
        PAIRS,
        "chosen_reward > rejected_reward,",
        "chosen_reward >= rejected_reward,",
        "tests/direct/test_pairs.py",
    ),
    Fault(
        "reference on one side alone",
        PAIRS,
        'known([sum(row["log_probs_ref_rejected"])',
        'known([sum(row["log_probs_ref_chosen"])',
        "tests/direct/test_pairs.py",
    ),
    Fault(
        "labels turned round",
        OUTCOME,
        "wanted = labels.to(logits.dtype)[:, None]",
        "wanted = (1 - labels).to(logits.dtype)[:, None]",
        "tests/stages/test_outcome.py",
    ),
    Fault(
        "judged at the first token",
        OUTCOME,
        "return mask & (positions == last)",
        "return mask & (positions == 1)",
        "tests/reward/test_outcome.py",
    ),
    Fault(
        "last_token judged at every one",
        OUTCOME,
        "if target == EVERY_TOKEN:",
        "if True:",
        "tests/reward/test_outcome.py",
    ),
    Fault(
        "padding judged",
        OUTCOME,
        "return torch.where(where, losses, 0.0)",
        "return losses",
        "tests/reward/test_outcome.py",
    ),
    Fault(
        "a tie outscores",
        OUTCOME,
        "torch.searchsorted(wrong, right) + torch",
        "torch.searchsorted(wrong, right, right=True) + torch",
        "tests/reward/test_outcome.py",
    ),
    Fault(
        "outcome read one token early",
        REWARD_MODEL,
        "logits = values[:, 1:]",
        "logits = values[:, :-1]",
        "tests/stages/test_outcome.py",
    ),
    Fault(
        "outcome loss by the micro-batch",
        REWARD_MODEL,
        "labels, target).sum() / divisor",
        "labels, target).sum() / counted.sum()",
        "tests/stages/test_outcome.py",
    ),
    Fault(
        "completions counted for tokens",
        REWARD_MODEL,
        "if every else 1 for row in completions",
        "for row in completions",
        "tests/stages/test_outcome.py",
    ),
    Fault(
        "almost right is right",
        LABELLED,
        "int(value == 1)",
        "int(value > 0)",
        "tests/stages/test_outcome.py",
    ),
    Fault(
        "held-out prompts trained on",
        LABELLED,
        "if (prompts[row] in chosen) is side]",
        "if side or prompts[row]]",
        "tests/stages/test_outcome.py",
    ),
]


def module_tests(module: str) -> str:
    """stages/rl/kl.py -> tests/rl/test_kl.py"""
    folder, name = module.rsplit("/", 1)
    return f"tests{folder.removeprefix('stages')}/test_{name}"


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Fault -> the run of its tests, two side by side: most of each is the start of Python."""
    items = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params["fault"] for item in items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(2) as pool:
        yield {f: pool.submit(planted, f, tmp_path_factory.mktemp("planted")) for f in chosen}
        pool.shutdown(cancel_futures=True)


def planted(fault: Fault, folder: Path) -> subprocess.CompletedProcess:
    """Run the tests that should notice a fault on a copy of the tree that has it."""
    for name in ("stages", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, folder / name)
    file = folder / fault.file
    text = file.read_text()
    assert text.count(fault.old) == 1, f"{fault.file}: {fault.old!r} stands not once there"
    file.write_text(text.replace(fault.old, fault.new))
    words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, *words, fault.tests or module_tests(fault.file)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_turns_a_test_red(fault, runs):
    done = runs[fault].result()
    assert done.returncode == 1, f"no test noticed: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    assert " failed" in done.stdout
