"""The few rows that the report shows, chosen by hand from small tables."""

import json

import pytest

from stages.base.errors import InputError
from stages.base.tables import BUFFERS, EVALUATIONS, UPDATES, write_table
from stages.page.excerpts import (
    answers,
    best_of_answers,
    best_of_rollouts,
    changed_prompts,
    completions,
    telling_groups,
)
from tests.helpers.shared import SHARED, needs

VECTORS = SHARED / "vectors" / "direct.json"

RIGHT = {  # prompt: right answers of four, before and after
    0: (4, 4),
    1: (4, 0),
    2: (0, 4),
    3: (3, 2),
    4: (1, 1),
}
REWARDS = {  # group: rewards of its completions
    0: [1.0, 1.0],
    1: [0.0, 0.0],
    2: [1.0, 0.0],
    3: [None, 0.75],
    4: [None],
    5: [0.5, 0.5, 0.5],
}


def evaluation(path, which):
    rows = [
        dict.fromkeys(EVALUATIONS.names)
        | {"prompt_index": prompt, "sample": max(0, i - 1), "greedy": i == 0, "prompt": "?"}
        | {"completion": f"{i}", "completion_ids": [1], "finished": True}
        | {"correct": i < right[which], "reward_correctness": float(i < right[which])}
        for prompt, right in RIGHT.items()
        for i in range(4)
    ]
    write_table(path, EVALUATIONS, rows, {})
    return path


@pytest.fixture
def round_(tmp_path):
    """Buffer and updates of a round with groups of unequal sizes."""
    buffer, updates = tmp_path / "buffer.parquet", tmp_path / "updates.parquet"
    keys = [(group, i, r) for group, found in REWARDS.items() for i, r in enumerate(found)]
    common = {"round": 1, "prompt": "?", "prompt_ids": [1], "completion_ids": [2, 3]}
    common |= {"prompt_index": 0, "finished": True, "log_probs_old": [0.0, 0.0]}
    rows = [
        dict.fromkeys(BUFFERS.names)
        | common
        | {"group": group, "sample": i, "completion": f"{group}/{i}", "reward": reward}
        for group, i, reward in keys
    ]
    write_table(buffer, BUFFERS, rows, {})
    rows = [
        dict.fromkeys(UPDATES.names)
        | {"round": 1, "group": group, "sample": i, "used": reward is not None}
        | {"advantage": [float(group), group + 1.0], "ratio_max": 1.5}
        for group, i, reward in reversed(keys)
    ]
    write_table(updates, UPDATES, rows, {})
    return buffer, updates


def test_prompts_that_got_worst_come_first_then_those_that_got_best(tmp_path):
    first = evaluation(tmp_path / "first.parquet", 0)
    last = evaluation(tmp_path / "last.parquet", 1)
    assert changed_prompts(first, last, 1) == [(1, -1.0), (2, 1.0)]
    assert changed_prompts(first, last, 2) == [(1, -1.0), (3, -0.25), (2, 1.0), (0, 0.0)]
    assert len(changed_prompts(first, last, 9)) == len(RIGHT)
    assert changed_prompts(first, first, 1) == [(0, 0.0)]


def test_answers_are_those_of_the_prompts_asked_for_the_greedy_one_first(tmp_path):
    found = answers(evaluation(tmp_path / "first.parquet", 0), [3, 1])
    assert list(found) == [3, 1]
    assert [row["greedy"] for row in found[3]] == [True, False, False, False]
    assert [row["correct"] for row in found[3]] == [True, True, True, False]
    assert "completion_ids" not in found[3][0]


def test_groups_are_the_worst_the_best_and_the_widest_and_each_comes_once(round_):
    buffer, _ = round_
    assert telling_groups(buffer, 1) == {"worst": [1], "best": [0], "widest spread": [2]}
    assert telling_groups(buffer, 2) == {"worst": [1, 2], "best": [0, 3], "widest spread": []}


def test_completions_carry_what_the_update_did_highest_reward_first(round_):
    buffer, updates = round_
    found = completions(buffer, updates, [2, 3])
    assert [row["completion"] for row in found[2]] == ["2/0", "2/1"]
    assert [row["advantage"] for row in found[2]] == [2.5, 2.5]
    assert [(row["completion"], row["reward"]) for row in found[3]] == [
        ("3/1", 0.75),
        ("3/0", None),
    ]
    assert [row["used"] for row in found[3]] == [True, False]
    assert completions(buffer, updates, []) == {}


def test_a_table_of_another_stage_is_refused(round_):
    buffer, updates = round_
    with pytest.raises(InputError, match="updates.parquet: column"):
        telling_groups(updates, 1)


def scored(path, groups: list[list[tuple]]):
    """A buffer of groups of (rule's score, reward model's score)."""
    common = {"round": 1, "prompt": "?", "prompt_ids": [1], "completion_ids": [2], "completion": ""}
    common |= {"prompt_index": 0, "finished": True, "log_probs_old": [0.0]}
    rows = [
        dict.fromkeys(BUFFERS.names)
        | common
        | {"group": group, "sample": i, "reward_correctness": rule, "reward_model": score}
        for group, found in enumerate(groups)
        for i, (rule, score) in enumerate(found)
    ]
    write_table(path, BUFFERS, rows, {})
    return path


def best_of(path, groups) -> list[float | None]:
    found = best_of_rollouts(scored(path, groups))
    return [found[f"accuracy_{name}rollout"] for name in ("", "picked_", "best_")]


def test_best_of_n_by_hand(tmp_path):
    groups = [
        [(1.0, -2.0), (0.0, -3.0), (0.0, -4.0)],  # the pick is right
        [(1.0, 0.5), (0.0, 0.75)],  # the pick is wrong, though a right answer is there
        [(0.9, 2.0), (0.0, 1.0)],  # nothing is quite right
        [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0)],  # two share the highest score
    ]
    mean = (1 / 3 + 1 / 2 + 0 + 2 / 3) / 4
    wanted = [mean, (1 + 0 + 0 + 0.5) / 4, 3 / 4]
    assert best_of(tmp_path / "rows.parquet", groups) == pytest.approx(wanted)


def test_what_has_no_score_is_not_picked_from(tmp_path):
    path = tmp_path / "rows.parquet"
    groups = [[(None, 9.0), (1.0, 1.0)], [(None, 1.0)], [(1.0, None), (0.0, 2.0)]]
    assert best_of(path, groups) == pytest.approx([0.5, 0.5, 0.5])
    assert best_of(path, [[(1.0, None), (0.0, None)]]) == [None] * 3
    assert best_of(path, [[(None, 1.0)]]) == [None] * 3


@needs(VECTORS)
def test_the_share_of_right_picks_is_the_peers(tmp_path):
    cases = [c for c in json.loads(VECTORS.read_text()) if c["kind"] == "orm_ranking"]
    assert len(cases) == 2
    for case in cases:
        found = case["inputs"]
        lines = list(zip(found["prompt"], found["labels"], found["scores"], strict=True))
        groups = [
            [(float(label), score) for prompt, label, score in lines if prompt == wanted]
            for wanted in sorted(set(found["prompt"]))
        ]
        top = case["expected"]["top1_accuracy"]
        assert best_of(tmp_path / "rows.parquet", groups)[1] == pytest.approx(top)


def test_the_best_of_the_sampled_answers_by_hand(tmp_path):
    # Number 0 is greedy. Before: prompt 4 has its one right answer there alone, 2 has none.
    assert best_of_answers(evaluation(tmp_path / "a.parquet", 0)) == pytest.approx(3 / 5)
    assert best_of_answers(evaluation(tmp_path / "b.parquet", 1)) == pytest.approx(3 / 5)


def test_answers_that_nothing_could_check_have_no_best(tmp_path):
    path = tmp_path / "rows.parquet"
    row = dict.fromkeys(EVALUATIONS.names) | {"prompt_index": 0, "sample": 0, "greedy": False}
    row |= {"prompt": "?", "completion": "", "completion_ids": [1], "finished": True}
    write_table(path, EVALUATIONS, [row | {"correct": False}], {})
    assert best_of_answers(path) is None
