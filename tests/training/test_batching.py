import random

import pytest

from stages.training.batching import cut, fill, in_order, plan_epoch, plan_groups

LENGTHS = [random.Random(0).randrange(1, 40) for _ in range(53)]


def flat(steps) -> list[int]:
    return [row for step in steps for batch in step for row in batch]


@pytest.mark.parametrize("rows", [1, 5, 8, 53])
@pytest.mark.parametrize("batch_size, batch_acc", [(1, 1), (1, 4), (4, 1), (3, 2), (100, 1)])
def test_every_row_occurs_once_in_an_epoch(rows, batch_size, batch_acc):
    steps = plan_epoch(LENGTHS[:rows], batch_size, batch_acc, False, 42, "train", 0)
    assert sorted(flat(steps)) == list(range(rows))
    assert all(1 <= len(step) <= batch_acc for step in steps)
    assert all(1 <= len(batch) <= batch_size for step in steps for batch in step)
    assert [len(batch) for step in steps for batch in step].count(batch_size) == rows // batch_size


def test_only_the_last_step_is_partial():
    steps = plan_epoch(LENGTHS, 4, 3, False, 42, "train", 0)
    assert [sum(map(len, step)) for step in steps] == [12, 12, 12, 12, 5]


def test_drop_last_leaves_out_a_partial_last_step_and_nothing_else():
    kept = plan_epoch(LENGTHS, 4, 3, False, 42, "train", 0)
    assert plan_epoch(LENGTHS, 4, 3, True, 42, "train", 0) == kept[:-1]
    even = plan_epoch(LENGTHS[:48], 4, 3, True, 42, "train", 0)
    assert even == plan_epoch(LENGTHS[:48], 4, 3, False, 42, "train", 0)
    assert len(even) == 4


def test_drop_last_keeps_the_only_step_of_a_small_set():
    assert sorted(flat(plan_epoch(LENGTHS[:5], 4, 3, True, 42, "train", 0))) == [0, 1, 2, 3, 4]


def test_epochs_seeds_and_stages_have_their_own_order_and_a_second_call_the_same():
    first = plan_epoch(LENGTHS, 4, 3, False, 42, "train", 0)
    assert first == plan_epoch(LENGTHS, 4, 3, False, 42, "train", 0)
    assert first != plan_epoch(LENGTHS, 4, 3, False, 42, "train", 1)
    assert first != plan_epoch(LENGTHS, 4, 3, False, 43, "train", 0)
    assert first != plan_epoch(LENGTHS, 4, 3, False, 42, "other", 0)


def test_micro_batches_hold_rows_of_like_length_in_no_order_of_length():
    lengths = list(range(64))
    batches = [step[0] for step in plan_epoch(lengths, 4, 1, False, 42, "train", 0)]
    assert all(max(batch) - min(batch) == 3 for batch in batches)  # one window holds all 64
    firsts = [batch[0] for batch in batches]
    assert firsts != sorted(firsts) and firsts != sorted(firsts, reverse=True)


def test_rows_meet_other_rows_in_the_next_epoch():
    lengths = [1] * 200

    def batches(epoch):
        steps = plan_epoch(lengths, 4, 1, False, 42, "train", epoch)
        return {frozenset(batch) for step in steps for batch in step}

    assert len(batches(0)) == 50 and len(batches(0) & batches(1)) < 5


GROUPS = [7, 7, 7, 3, 3, 3, 5, 5, 5, 1, 1, 1, 9, 9, 9]


@pytest.mark.parametrize("batch_size, batch_acc", [(1, 1), (3, 1), (3, 2), (4, 2), (100, 1)])
def test_every_completion_occurs_once_and_groups_stay_neighbours(batch_size, batch_acc):
    steps = plan_groups(GROUPS, batch_size, batch_acc, 42, "optimize", 1)
    order = flat(steps)
    assert sorted(order) == list(range(15))
    for start in range(0, 15, 3):
        assert order[start] % 3 == 0
        assert order[start + 1 : start + 3] == [order[start] + 1, order[start] + 2]
    sizes = [len(batch) for step in steps for batch in step]
    assert sizes == [batch_size] * (15 // batch_size) + [15 % batch_size] * (15 % batch_size > 0)
    assert all(len(step) == batch_acc for step in steps[:-1])


def test_rows_of_a_group_that_lie_apart_are_brought_together_in_their_order():
    order = flat(plan_groups([1, 2, 1, 2, 1], 2, 1, 42, "optimize"))
    assert order in ([0, 2, 4, 1, 3], [1, 3, 0, 2, 4])


def test_groups_are_reshuffled_in_each_epoch_and_round():
    groups = list(range(20))
    plans = [
        plan_groups(groups, 4, 1, 42, "optimize", round_number, "shuffle", epoch)
        for round_number in (1, 2)
        for epoch in (0, 1)
    ]
    assert plans[0] == plan_groups(groups, 4, 1, 42, "optimize", 1, "shuffle", 0)
    assert len({str(plan) for plan in plans}) == 4
    assert plans[0] != plan_groups(groups, 4, 1, 43, "optimize", 1, "shuffle", 0)


def test_a_micro_batch_of_too_many_tokens_is_cut_and_a_row_above_the_limit_goes_alone():
    lengths = [5, 6, 50, 7, 1]
    assert cut([3, 0, 2, 1, 4], lengths, 20) == [[4, 0, 1], [3], [2]]
    assert cut([3, 0, 2, 1, 4], lengths, 20, sides=2) == [[4, 0], [1], [3], [2]]
    assert cut([3, 1, 4], lengths, None) == cut([3, 1, 4], lengths, 21) == [[3, 1, 4]]


def test_rows_in_order_are_cut_by_number_and_by_tokens():
    assert in_order([1, 1, 1, 9, 9], 2, None) == [[0, 1], [2, 3], [4]]
    assert in_order([1, 1, 1, 9, 9], 2, 10) == [[0, 1], [2], [3], [4]]
    assert in_order([1, 1, 9, 1, 9], 5, 10, sides=2) == [[0, 1], [2], [3], [4]]


def test_units_fill_micro_batches_and_are_never_parted():
    pairs = [[0, 1], [4, 2], [3, 9], [5, 8], [6, 7]]
    assert fill(pairs, 4, None, None) == [[0, 1, 4, 2], [3, 9, 5, 8], [6, 7]]
    assert fill(pairs, 5, None, None) == fill(pairs, 4, None, None)
    assert fill(pairs, 1, None, None) == fill(pairs, 3, None, None) == pairs
    assert fill([[3], [1], [2]], 2, None, None) == [[3, 1], [2]]
    assert fill([], 2, None, None) == []


def test_units_are_cut_apart_where_a_pass_would_hold_too_many_padded_tokens():
    pairs, lengths = [[0, 1], [2, 3], [4, 5]], [3, 4, 1, 5, 2, 2]
    assert fill(pairs, 6, lengths, 30) == [[0, 1, 2, 3, 4, 5]]  # 6 rows of 5
    assert fill(pairs, 6, lengths, 29) == [[4, 5, 0, 1], [2, 3]]  # 4 rows of 4, 2 of 5
    assert fill(pairs, 4, lengths, 100) == [[0, 1, 2, 3], [4, 5]]
    assert fill(pairs, 6, lengths, 1) == [[4, 5], [0, 1], [2, 3]]
