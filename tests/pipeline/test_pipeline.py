"""The real DVC pipeline on a tiny task, in a Git repository of its own: what runs, and what not."""

import json

import pytest

from tests.helpers.clone import commit, run
from tests.helpers.tiny import plain
from tests.pipeline.running import (
    ALL,
    changed,
    duplicate,
    dvc,
    executed,
    lock_of,
    of_round,
    restored,
    set_params,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(first, tmp_path_factory):
    """A repository for the tests of this file, its cache with all that they have run so far."""
    return duplicate(first[0], tmp_path_factory.mktemp("shared") / "repository")


@pytest.fixture
def repository(shared):
    """That repository as the first run left it."""
    run(shared, "git", "checkout", "--quiet", "--force", "main")
    dvc(shared, "checkout", "--quiet", "--force")
    return shared


def test_the_first_run_executes_every_stage_and_the_second_none(first, repository):
    _, output = first
    assert executed(output) == ALL
    before = lock_of(repository)
    again = dvc(repository, "repro").stdout
    assert executed(again) == restored(again) == set()
    assert "Data and pipelines are up to date" in again
    assert lock_of(repository) == before
    assert changed(repository) == []


def test_d11_nothing_that_the_pipeline_wrote_is_left_half_or_unknown_to_git(repository):
    assert not list(repository.rglob("*.partial"))
    ignored = run(repository, "git", "status", "--porcelain", "--ignored", "--short").stdout
    names = {line.split()[1] for line in ignored.splitlines()}
    assert not [
        name
        for name in names
        if not name.startswith(("data", "models", "plots", "reports", "stages"))
        and name not in (".dvc/cache/", ".dvc/tmp/", ".dvc/config.local")
    ], names


def test_the_last_policy_is_a_model_that_transformers_loads(repository):
    code = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer;"
        "m = AutoModelForCausalLM.from_pretrained('models/policy/2');"
        "t = AutoTokenizer.from_pretrained('models/policy/2');"
        "r = t.apply_chat_template([{'role': 'user', 'content': 'hi'}], return_tensors='pt',"
        " add_generation_prompt=True, return_dict=True);"
        "print('generated', m.generate(**r, max_new_tokens=3).shape)"
    )
    assert "generated torch.Size([1," in run(repository, "python", "-c", code).stdout


def test_more_epochs_run_the_optimizer_and_what_follows_and_going_back_runs_nothing(repository):
    before = lock_of(repository)
    output = dvc(repository, "exp", "run", "--name", "two", "-S", "ppo_epochs=2").stdout
    assert executed(output) == {"optimize@1", "evaluate@1", "report"} | of_round(2)
    assert restored(output) == set()
    assert plain(repository / "params.yaml")["ppo_epochs"] == 2
    assert lock_of(repository) != before
    back = dvc(repository, "exp", "run", "-S", "ppo_epochs=1").stdout
    assert executed(back) == {"report"}
    assert restored(back) == {"optimize@1", "evaluate@1"} | of_round(2)
    assert lock_of(repository) == before
    assert changed(repository) == []


def test_another_temperature_runs_nothing_before_the_first_rollout(repository):
    output = dvc(repository, "exp", "run", "-S", "temperature=0.8", "rollout@1").stdout
    assert executed(output) == {"rollout@1"} and restored(output) == set()
    assert plain(repository / "params.yaml")["temperature"] == 0.8


def test_a_small_learning_rate_reaches_the_reward_model_and_runs_nothing_before_it(repository):
    output = dvc(repository, "exp", "run", "-S", "rm.lr=1e-5", "train_rm").stdout
    assert executed(output) == {"train_rm"} and restored(output) == set()
    assert plain(repository / "params.yaml")["rm"]["lr"] == 1e-5
    curve = (repository / "data" / "curves" / "train_rm.csv").read_text().splitlines()
    column = curve[0].split(",").index("lr")
    assert max(float(line.split(",")[column]) for line in curve[1:]) <= 1e-5


def test_one_more_round_runs_its_own_stages_and_the_report(repository):
    output = dvc(repository, "exp", "run", "-S", "+rounds.3=models/policy/2").stdout
    assert executed(output) == of_round(3) | {"report"}
    assert plain(repository / "params.yaml")["rounds"]["3"] == "models/policy/2"
    state = json.loads((repository / "models/policy/3/trainer/state.json").read_text())
    assert state["rounds"] == [1, 2, 3]
    assert len(json.loads((repository / "plots" / "rounds.json").read_text())) == 4
    back = dvc(repository, "exp", "run", "-S", "~rounds.3").stdout
    assert executed(back) <= {"report"}
    assert len(json.loads((repository / "plots" / "rounds.json").read_text())) == 3


@pytest.mark.parametrize(
    ("rounds", "fix"),
    [
        ({1: "models/sft"}, "quote it, '1': models/sft"),
        # The same as what has run, for DVC's run cache; and what it cannot even sort.
        ({1: "models/sft", 2: "models/policy/1"}, "quote it, '1': models/sft"),
        ({"1": "models/sft", 2: "models/policy/1"}, "quote it, '2': models/policy/1"),
        (
            {"1": "models/policy/2", "2": "models/sft"},
            "round '1' starts from 'models/policy/2'; expected models/sft, models/policy/",
        ),
    ],
)
def test_rounds_that_are_no_chain_stop_with_the_fix_in_the_message(repository, rounds, fix):
    set_params(repository, rounds=rounds)
    done = dvc(repository, "repro", check=False)
    assert done.returncode != 0
    assert fix in done.stdout


def test_a_bad_knob_stops_the_first_stage_that_runs_with_the_key(repository):
    done = dvc(repository, "exp", "run", "-S", "task.sft_rows=many", check=False)
    assert done.returncode != 0
    assert "params.yaml: task.sft_rows: found 'many'; Input should be a valid int" in done.stdout
    assert executed(done.stdout) == {"prepare_task"}
    set_params(repository)
    again = dvc(repository, "repro").stdout
    assert executed(again) == set()


def test_metrics_experiments_and_plots_can_be_read(repository):
    metrics = json.loads(dvc(repository, "metrics", "show", "--json").stdout)
    found = metrics[""]["data"]
    assert set(found) == {
        f"metrics/{name}.json" for name in ("training", "summary", "round-0", "round-1", "round-2")
    }
    for name in ("reward", "accuracy_sampled", "kl", "clipped_fraction", "length", "finished"):
        assert isinstance(found["metrics/round-2.json"]["data"][name], int | float)
    table = dvc(repository, "metrics", "show", "--md").stdout
    assert "accuracy_sampled" in table

    experiments = json.loads(dvc(repository, "exp", "show", "--json").stdout)
    assert experiments[0]["rev"] == "workspace" and not experiments[0].get("error")
    table = dvc(repository, "exp", "show", "--csv", "--drop", ".*(round-|/).*").stdout
    columns = table.partition("\n")[0].split(",")
    assert {"accuracy_gain", "final_reward", "ppo_epochs"} <= set(columns)
    assert not [name for name in columns if "/" in name]

    plots = dvc(repository, "plots", "show", "--json").stdout
    drawn = json.loads(plots[plots.index("{") :])
    assert not drawn.get("errors"), drawn["errors"]
    declared = {
        title: curve
        for plot in plain(repository / "dvc.yaml")["plots"]
        for title, curve in plot.items()
    }
    assert set(drawn["data"]) == set(declared)
    for title, curve in declared.items():
        points = drawn["data"][title][0]["content"]["data"]["values"]
        for columns in curve["y"].values():
            for column in [columns] if isinstance(columns, str) else columns:
                known = [p[column] for p in points if p[column] not in (None, "")]
                assert list(map(float, known)), title
        assert all(float(point[curve["x"]]) >= 0 for point in points)


def test_d05_an_experiment_in_a_folder_of_its_own_leaves_the_workspace_alone(repository):
    before = lock_of(repository)
    output = dvc(
        repository, "exp", "run", "--temp", "--name", "asked-more", "-S", "evaluate.max_samples=4"
    ).stdout
    wanted = {"prepare_task", "evaluate_sft", "evaluate@1", "evaluate@2", "report"}
    assert executed(output) == wanted  # the first of them looks into the dataset again
    assert lock_of(repository) == before
    assert plain(repository / "params.yaml")["evaluate"]["max_samples"] is None
    dvc(repository, "exp", "apply", "asked-more")
    assert plain(repository / "params.yaml")["evaluate"]["max_samples"] == 4
    assert executed(dvc(repository, "repro").stdout) == set()


def test_d10_a_conflict_in_the_lock_file_is_solved_by_dropping_it(repository):
    """Faults D10: two branches, one knob each; what did not change comes from the run cache."""
    for branch, knobs in (("more", {"evaluate__max_samples": 4}), ("longer", {"ppo_epochs": 2})):
        run(repository, "git", "checkout", "--quiet", "--force", "-B", branch, "main")
        set_params(repository, **knobs)
        dvc(repository, "repro")
        commit(repository, branch)
    merge = run(repository, "git", "merge", "more", check=False)
    assert (
        merge.returncode != 0 and "CONFLICT (content): Merge conflict in dvc.lock" in merge.stdout
    )
    assert "CONFLICT (content): Merge conflict in params.yaml" not in merge.stdout
    assert dvc(repository, "status", check=False).returncode != 0

    run(repository, "git", "rm", "--quiet", "-r", "-f", "--ignore-unmatch", "dvc.lock", "metrics")
    output = dvc(repository, "repro").stdout
    both = {"evaluate@1", "evaluate@2", "report"}
    assert executed(output) == both
    assert restored(output) == ALL - both
    commit(repository, "both")
    assert changed(repository) == []
