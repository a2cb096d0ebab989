"""The table of all ways to train, made by its tool from a finished tiny run."""

import json
import sys

import pytest

from tests.helpers.clone import commit, run
from tools.docs_numbers import filled

pytestmark = pytest.mark.slow

ROWS = {
    "dpo": ("models/direct/pairs", "direct-pairs", {"+branches.pairs": "models/sft"}),
    "broken": ("models/policy/2", "round-2", {"loss": "maxrl"}),
    "raft": ("models/policy/2", "round-2", {"loss": "raft"}),
    "grpo": ("models/policy/2", "round-2", {}),
}


def compare(folder, *words):
    return run(folder, sys.executable, "tools/compare_methods.py", *words, check=False)


def test_a_table_is_made_goes_on_after_a_failure_and_reuses_what_is_there(copy):
    rows = [
        {"name": name, "title": name, "settings": settings, "policy": policy, "figures": figures}
        for name, (policy, figures, settings) in ROWS.items()
    ]
    file = copy / "docs" / "comparison.json"
    file.write_text(json.dumps({"processor": None, "rows": rows}))
    commit(copy, "rows to measure")

    first = compare(copy)
    assert first.returncode == 1
    assert "these rows failed, the others are written:\nbroken: dvc exp run" in first.stdout
    found = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(found) == list(ROWS)
    assert "seconds" not in found.pop("broken")
    assert found["dpo"]["ran"] == [
        "evaluate_direct@pairs",
        "score_pairs@pairs",
        "train_direct@pairs",
    ]
    changed = {f"{name}@{key}" for name in ("optimize", "evaluate") for key in (1, 2)}
    assert set(found["raft"]["ran"]) == changed | {"rollout@2", "score@2"}
    assert len(found["grpo"]["ran"]) == found["grpo"]["stages"]
    for row in found.values():
        assert row["seconds"] > 0
        assert 0 <= row["accuracy_sampled"] <= 1
        assert row["kl_sft"] > -1e-6
    trained = json.loads(of_experiment(copy, "dpo", "metrics/direct-pairs.json"))
    assert found["dpo"]["kl_sft"] == pytest.approx(trained["pairs_kl_ref"], rel=1e-3, abs=1e-7)
    page = filled((copy / "docs" / "direct.md").read_text(), copy)
    assert "| grpo | the defaults | 0.000 |" in page and "| broken | `loss: maxrl` |  |" in page

    commit(copy, "the table")
    again = compare(copy)  # the rows that are measured stay
    assert "== broken" in again.stdout and "== raft" not in again.stdout
    refused = compare(copy, "--only", "grpo,dpo2")
    assert "--only: found dpo2, expected some of dpo, broken, raft, grpo" in refused.stdout


def of_experiment(folder, name, path):
    """A file of the last commit of an experiment of the table."""
    refs = run(folder, "git", "for-each-ref", "--format=%(refname)", "refs/exps").stdout.split()
    ref = next(ref for ref in refs if ref.endswith(f"/methods-{name}"))
    return run(folder, "git", "show", f"{ref}:{path}").stdout
