import random

import pytest

from stages.base.chunks import chunks, within


def test_chunks_keep_all_items_in_order():
    assert list(chunks([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4], [5]]
    assert list(chunks([], 2)) == []


def test_chunks_read_no_further_than_they_are_asked():
    numbers = iter(range(10))
    assert next(chunks(numbers, 4)) == [0, 1, 2, 3]
    assert next(numbers) == 4


def test_parts_within_a_limit_by_hand():
    rows = [[3], [4], [4], [9], [1], [1], [30], [2]]
    assert list(within(rows, 12)) == [[0, 1, 2], [3], [4, 5], [6], [7]]  # 3 * 4 fits, 30 goes alone
    assert list(within(rows, None)) == [list(range(8))]
    assert list(within([], 12)) == list(within([], None)) == []
    pairs = [[3, 2], [2, 3], [5, 1]]  # two rows each, which stay together
    assert list(within(pairs, 12)) == [[0, 1], [2]]
    assert list(within(pairs, 1)) == [[0], [1], [2]]


@pytest.mark.parametrize("limit", [1, 20, 64, 300])
def test_parts_are_neighbours_in_order_within_the_limit_and_no_smaller_than_they_must_be(limit):
    draws = random.Random(limit)
    units = [[draws.randint(1, 40) for _ in range(draws.randint(1, 3))] for _ in range(200)]
    parts = list(within(units, limit))
    assert [number for part in parts for number in part] == list(range(200))

    def tokens(part) -> int:
        rows = [length for number in part for length in units[number]]
        return len(rows) * max(rows)

    assert all(tokens(part) <= limit for part in parts if len(part) > 1)
    for part, after in zip(parts, parts[1:], strict=False):
        assert tokens([*part, after[0]]) > limit
