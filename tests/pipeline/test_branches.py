"""Branches of direct alignment in the real pipeline: what a branch adds, and what reruns."""

import json

import pytest

from tests.helpers.clone import commit
from tests.pipeline.running import ALL, changed, dvc, executed, of_round, restored, set_params

pytestmark = pytest.mark.slow

ADD = ("exp", "run", "-S", "+branches.dpo=models/sft")
BRANCH = {"score_pairs@dpo", "train_direct@dpo", "evaluate_direct@dpo"}


@pytest.fixture
def branched(copy):
    """The finished repository with a branch `dpo`, and what adding it printed."""
    output = dvc(copy, *ADD).stdout
    return copy, output


def test_a_branch_runs_its_three_stages_and_the_report(branched):
    copy, output = branched
    assert executed(output) == BRANCH | {"report"}
    assert (copy / "models" / "direct" / "dpo" / "model.safetensors").is_file()
    found = json.loads((copy / "metrics" / "direct-dpo.json").read_text())
    assert found["pairs_loss_before"] == pytest.approx(0.6931472, abs=1e-4)
    assert "Direct alignment" in (copy / "reports" / "index.html").read_text()


def test_another_loss_or_beta_reuses_scores_and_rollouts(branched):
    copy, _ = branched
    for change in ("direct.beta=0.3", "direct.loss=ipo"):
        ran = executed(dvc(copy, "exp", "run", "-S", change).stdout)
        assert ran == {"train_direct@dpo", "evaluate_direct@dpo", "report"}
    output = dvc(copy, "exp", "run", "-S", "direct.loss=dpo", "-S", "direct.beta=0.1").stdout
    assert executed(output) == {"report"}
    assert restored(output) >= {"train_direct@dpo", "evaluate_direct@dpo"}


def test_other_pairs_rerun_scores_and_training_of_the_branch(branched):
    copy, _ = branched
    ran = executed(dvc(copy, "exp", "run", "-S", "preferences.validation_share=0.5").stdout)
    assert ran >= {"split_preferences", "train_rm", *BRANCH}
    assert not ran & {"train_sft", "tokenize_preferences", "rollout@1"}


def test_a_round_starts_from_a_branch(copy):
    words = (*ADD, "-S", "rounds.1=models/direct/dpo")
    ran = executed(dvc(copy, *words).stdout)
    assert ran == BRANCH | of_round(1) | of_round(2) | {"report"}


def test_a_leftover_folder_of_a_dropped_branch_is_no_start(branched):
    copy, _ = branched
    commit(copy, "a branch")
    set_params(copy, rounds={"1": "models/direct/dpo", "2": "models/policy/1"})
    failed = dvc(copy, "repro", check=False)
    assert failed.returncode != 0
    assert "branches has no 'dpo'" in failed.stdout


def test_without_branches_the_pipeline_has_no_stage_more(copy):
    listed = dvc(copy, "stage", "list", "--name-only").stdout.split()
    assert set(listed) == ALL
    assert changed(copy) == []


@pytest.fixture
def labelled(copy):
    """The finished repository with a file of labelled completions; the setting that names it."""
    rows = [
        {"prompt": f"word {i // 2}", "completion": "ab" if i % 2 else "ba", "label": i % 2}
        for i in range(12)
    ]
    file = copy / "data" / "source" / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return copy, "+labelled.mine=data/source/mine.jsonl"


def test_a_further_reward_model_reruns_no_training_and_no_round(labelled):
    copy, setting = labelled
    beside = "+reward_models.o={kind: outcome, data: data/labelled/mine.parquet}"
    picks = ("-S", "+best_of_n.o=models/reward/o", "-S", "+best_of_n.rm=models/rm")
    ran = executed(dvc(copy, "exp", "run", "-S", setting, "-S", beside, *picks).stdout)
    assert ran >= {"tokenize_labelled@mine", "train_reward@o", "score_answers@o", "report"}
    # A new file under data/source makes those that read rows run again, to the same bytes.
    assert not ran & {"train_sft", "train_rm", "score@1", "optimize@1"}
    for number in (0, 1, 2):
        found = json.loads((copy / "metrics" / f"round-{number}.json").read_text())
        for name in ("o", "rm"):
            assert 0 <= found[f"accuracy_picked_{name}"] <= found["accuracy_best"]
    found = json.loads((copy / "metrics" / "reward-o.json").read_text())
    assert found["kind"] == "outcome" and 0 <= found["validation_accuracy"] <= 1
    assert "Reward models" in (copy / "reports" / "index.html").read_text()


def test_an_outcome_model_takes_the_place_of_models_rm_and_scores_every_round(labelled):
    copy, setting = labelled
    words = ("-S", "rm.kind=outcome", "-S", "rm.data=data/labelled/mine.parquet")
    ran = executed(dvc(copy, "exp", "run", "-S", setting, *words).stdout)
    assert ran >= {"tokenize_labelled@mine", "train_rm", "score@1", "optimize@1", "score@2"}
    assert not ran & {"train_sft", "split_preferences"}


def test_an_outcome_model_of_rollouts_that_depend_on_it_is_a_cycle(copy):
    words = ("-S", "rm.kind=outcome", "-S", "rm.data=data/rollouts/round-2.parquet")
    failed = dvc(copy, "exp", "run", *words, check=False)
    assert failed.returncode != 0
    assert "defined as both a dependency and an output in stages: train_rm" in failed.stdout
