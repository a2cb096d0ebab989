"""The few rows that the report shows, chosen by hand from small tables."""

import pytest

from stages.base.errors import InputError
from stages.base.tables import BUFFERS, EVALUATIONS, UPDATES, write_table
from stages.page.excerpts import answers, changed_prompts, completions, telling_groups

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
