"""`dvc exp` with knobs of every kind: workspace, queue, and what is shown of them."""

import json
import time

import pytest

from stages.base.spelling import flat
from tests.helpers.clone import run
from tests.helpers.tiny import plain, small_params
from tests.pipeline.running import dvc, executed

pytestmark = pytest.mark.slow

# As typed -> as the stages must read it: scalars, small floats, booleans, nulls, nested keys.
TYPED = {
    "seed=43": 43,
    "ppo_epochs=2": 2,
    "sft.lr=1e-5": 1e-5,
    "lr=3e-07": 3e-7,
    "beta=0": 0,
    "target_kl=0.02": 0.02,
    "sft.drop_last=true": True,
    "allow_off_policy=True": True,
    "critic=null": None,
    "rewards.reward_model=null": None,
    "evaluate.max_samples=4": 4,
    "task.config.max_word_len=4": 4,
    "verifier=exact": "exact",
    "verifier_pattern='(a|b)'": "(a|b)",
}


def values_of(knobs: dict) -> dict:
    return {key: (type(value), value) for key, value in flat(knobs).items()}


def test_d04_knobs_of_every_kind_arrive_as_they_were_meant(copy):
    settings = [word for knob in TYPED for word in ("-S", knob)]
    output = dvc(copy, "exp", "run", *settings, "prepare_task").stdout
    assert executed(output) == {"prepare_task"}
    wanted = {knob.partition("=")[0]: value for knob, value in TYPED.items()}
    before, after = values_of(small_params()), values_of(plain(copy / "params.yaml"))
    assert after == before | {key: (type(value), value) for key, value in wanted.items()}

    shown = json.loads(dvc(copy, "params", "diff", "--json").stdout)["params.yaml"]
    assert {key: change["new"] for key, change in shown.items()} == wanted
    assert {k: change["old"] for k, change in shown.items()} == {k: before[k][1] for k in wanted}


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("sft.lrr=1", "Key 'lrr' is not in struct"),
        ("+sft.lrr=1", "sft.lrr: no stage knows this key; did you mean sft.lr?"),
        ("rounds.3=models/policy/2", "use +rounds.3=models/policy/2"),
        ("+rounds={3: models/policy/2}", "key 3 is no text: quote it, '3': models/policy/2"),
        ("rounds=3", "stages.rollout.foreach' in 'dvc.yaml': expected list/dictionary, got int"),
    ],
)
def test_a_setting_that_cannot_be_meant_stops_with_what_to_do(copy, setting, hint):
    done = dvc(copy, "exp", "run", "-S", setting, "-S", "task.prompt_rows=13", check=False)
    assert done.returncode != 0
    assert hint in done.stdout
    assert executed(done.stdout) <= {"prepare_task", "report"}


def test_queued_rounds_branch_and_shrink_and_can_be_compared(copy):
    for name, rounds in {"branch": "+rounds.3=models/policy/1", "shrink": "~rounds.2"}.items():
        dvc(copy, "exp", "run", "--queue", "--name", name, "-S", rounds)
    dvc(copy, "queue", "start", "--jobs", "2")
    deadline = time.monotonic() + 300
    while (status := dvc(copy, "queue", "status").stdout).count("Success") < 2:
        assert "Failed" not in status and time.monotonic() < deadline, status
        time.sleep(0.5)
    assert set(executed(dvc(copy, "queue", "logs", "shrink").stdout)) == {"report"}

    rows = json.loads(dvc(copy, "exp", "show", "--json").stdout)[1]["experiments"]
    shown = {row["name"]: row["revs"][0]["data"] for row in rows}
    assert shown.keys() == {"branch", "shrink"}
    rounds = {name: data["params"]["params.yaml"]["data"]["rounds"] for name, data in shown.items()}
    assert rounds["branch"]["3"] == "models/policy/1" and set(rounds["shrink"]) == {"1"}
    assert "metrics/round-3.json" in shown["branch"]["metrics"]
    table = dvc(copy, "exp", "show", "--only-changed", "--md").stdout
    assert "branch" in table and "shrink" in table

    dvc(copy, "exp", "branch", "shrink", "smaller")
    dvc(copy, "exp", "apply", "branch")
    assert executed(dvc(copy, "repro").stdout) == set()
    state = json.loads((copy / "models/policy/3/trainer/state.json").read_text())
    assert state["rounds"] == [1, 3]

    diff = json.loads(dvc(copy, "params", "diff", "main", "smaller", "--json").stdout)
    assert diff == {"params.yaml": {"rounds.2": {"old": "models/policy/1", "new": None}}}
    diff = json.loads(dvc(copy, "metrics", "diff", "--json").stdout)
    assert diff.keys() == {"metrics/round-3.json", "metrics/summary.json"}
    reward = json.loads((copy / "metrics/round-3.json").read_text())["reward"]
    assert diff["metrics/round-3.json"]["reward"]["new"] == reward
    assert "metrics/round-3.json" in dvc(copy, "metrics", "diff", "--md").stdout

    plots = dvc(copy, "plots", "diff", "main", "workspace", "--json").stdout
    drawn = json.loads(plots[plots.index("{") :])
    assert not drawn.get("errors")
    points = drawn["data"]["reward by round"][0]["content"]["data"]["values"]
    counts = {rev: sum(p["rev"] == rev for p in points) for rev in ("main", "workspace")}
    assert counts["workspace"] == counts["main"] + 1
    assert run(copy, "git", "status", "--porcelain", "params.yaml").stdout
