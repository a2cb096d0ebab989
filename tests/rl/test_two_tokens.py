"""N23: the penalty holds every objective where its maths says, wherever the penalty stands.

Two tokens, a reference that finds both alike, reward 1 for the first, beta 2. Each round's buffer
holds the two completions as often as the policy gives them, so that a step is its expectation; the
policy learns one number, the gap s between its two logits. Where the penalty is in the reward the
policy rests where the shaped rewards are alike: 1 - 2 log(p / (1 - p)) = 0, whatever scales them.
"""

import math

import pytest
import torch

from stages.rl.epochs import Learner, Round
from stages.rl.kl import FITTING
from stages.rl.objectives import OBJECTIVES
from stages.rl.targets import make_targets
from tests.helpers.models import cpu_accelerator, llama, llama_scorer
from tests.rl.test_epochs import settings

SIZE, BETA, ROUNDS = 200, 2.0, 30
PLACES = [
    (loss, place, estimator)
    for loss, objective in OBJECTIVES.items()
    for place, estimators in FITTING.items()
    for estimator in estimators
    # RAFT and online DPO train on chosen completions, which are no sample of the policy, and have
    # no penalty to rest at: they go on (test_what_keeps_the_best, below).
    if place in objective.kl_places and not objective.selects
    if place != "reward" or objective.negative_rewards
]


def head_only(model, head):
    """The model with only a fixed head of zeros to learn: its two logits start alike."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is head)
    torch.nn.init.zeros_(head)
    return model


def log_odds(policy) -> float:
    with torch.no_grad():
        first, second = policy(input_ids=torch.tensor([[0]])).logits[0, -1].tolist()
    return first - second


def buffer(s: float) -> list[dict]:
    """SIZE completions of one prompt, as many of each token as the policy of log-odds s gives."""
    ones = min(SIZE - 1, max(1, round(SIZE / (1 + math.exp(-s)))))
    log_probs = (-math.log1p(math.exp(-s)), -math.log1p(math.exp(s)))
    return [
        {
            "group": 0,
            "sample": i,
            "reward": 1.0 if i < ones else 0.0,
            "reward_correctness": None,
            "log_probs_sampler": None,
            "prompt_ids": [0],
            "completion_ids": [0 if i < ones else 1],
            "log_probs_old": [log_probs[0 if i < ones else 1]],
            "log_probs_ref": [-math.log(2)],
            "values_old": [0.0],
        }
        for i in range(SIZE)
    ]


def rest(loss: str, place: str, estimator: str) -> float:
    """Log-odds at which the gradient by s is 0, by bisection on its closed form."""

    def gradient(s: float) -> float:
        p, q = 1 / (1 + math.exp(-s)), 1 / (1 + math.exp(s))
        if place == "reward":
            return 1 - BETA * s
        # Slope of sum of p * advantage, the advantage held: p q times the gap of the advantages.
        scale = {"grpo": math.sqrt(p * q), "maxrl": p}.get(SCALE_LIKE.get(loss, loss), 1.0)
        # k2: of KL(policy || reference), p q s. k3: of KL(reference || policy), p - 1/2.
        return p * q / scale - BETA * (p * q * s if estimator == "k2" else p - 0.5)

    low, high = 0.0, 3.0  # past 3 the divided advantages outgrow the penalty again
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gradient(middle) > 0 else (low, middle)
    return low


# Advantages of these are divided by the deviation of the rewards too.
SCALE_LIKE = dict.fromkeys(("dapo", "gspo", "cispo", "sapo", "ppo"), "grpo")


def test_the_optimum_of_the_penalty_in_the_reward_is_the_one_that_the_textbook_gives():
    assert 1 / (1 + math.exp(-rest("rloo", "reward", "k1"))) == pytest.approx(0.6225, abs=1e-4)
    assert 1 / (1 + math.exp(-rest("rloo", "loss", "k2"))) == pytest.approx(0.6225, abs=1e-4)
    assert 1 / (1 + math.exp(-rest("rloo", "loss", "k3"))) == pytest.approx(0.6180, abs=1e-4)


def learned(loss: str, place: str, estimator: str) -> float:
    """Log-odds after ROUNDS rounds of one step each, at a rate that falls to 0."""
    policy = llama(vocabulary=2, tied=False)
    head_only(policy, policy.lm_head.weight)
    critic = None
    if OBJECTIVES[loss].critic:
        critic = llama_scorer(vocabulary=2)
        head_only(critic, critic.score.weight)
    chosen = settings(
        loss,
        beta=BETA,
        kl_placement=place,
        kl_estimator=estimator,
        temperature=1.0,
        max_new_tokens=1,
        train_batch_size=SIZE,
        lr=0.02,
        decay_steps=ROUNDS,
        lr_critic=0.01,
    )
    optimizers = {"policy": torch.optim.SGD([policy.lm_head.weight])}
    if critic is not None:
        optimizers["critic"] = torch.optim.SGD([critic.score.weight])
    for number in range(ROUNDS):
        if log_odds(policy) > 3:
            break  # it has left for good
        rows = buffer(log_odds(policy))
        learner, targets = Learner(policy, critic, optimizers), make_targets(rows, chosen)
        list(Round(cpu_accelerator(), learner, rows, targets, chosen).steps(number))
    return log_odds(policy)


@pytest.mark.parametrize(("loss", "place", "estimator"), PLACES)
def test_the_policy_comes_to_rest_where_the_penalty_says(loss, place, estimator):
    s, wanted = learned(loss, place, estimator), rest(loss, place, estimator)
    p, q = 1 / (1 + math.exp(-s)), 1 / (1 + math.exp(-wanted))
    assert p == pytest.approx(q, abs=0.01)
    if place == "reward":
        assert p == pytest.approx(0.622, abs=0.01)


@pytest.mark.parametrize("loss", ["raft", "online_dpo"])
def test_what_keeps_the_best_makes_it_likelier_round_by_round(loss):
    """Two tokens alike at first: the one with the reward ends up with nine of ten."""
    assert learned(loss, "nowhere", "k3") > math.log(9)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_what_is_refused_in_the_reward_lets_the_policy_leave_its_reference(estimator):
    """The reason for the refusal: at a gap of 1.5 the first token has 0.82, and it goes on."""
    assert learned("rloo", "reward", estimator) > 1.5
