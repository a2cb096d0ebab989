from stages.base.chunks import chunks


def test_chunks_keep_all_items_in_order():
    assert list(chunks([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4], [5]]
    assert list(chunks([], 2)) == []


def test_chunks_read_no_further_than_they_are_asked():
    numbers = iter(range(10))
    assert next(chunks(numbers, 4)) == [0, 1, 2, 3]
    assert next(numbers) == 4
