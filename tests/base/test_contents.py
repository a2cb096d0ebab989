"""N17: tables edited with other tools are refused when read, by file, row and column."""

import math

import pyarrow.parquet as pq
import pytest

from stages.base.contents import (
    check_contents,
    check_positions,
    check_provenance,
    check_vocabulary,
)
from stages.base.errors import InputError
from stages.base.tables import (
    BUFFERS,
    PAIRS,
    ROWS_PER_GROUP,
    SCORED_PAIRS,
    SFT,
    write_table,
)


def completion(**changes) -> dict:
    """A row of a buffer with two prompt ids and three of the completion."""
    numbers = {"round": 1, "group": 0, "sample": 0, "prompt_index": 0, "finished": True}
    numbers |= {"prompt": "p", "completion": "c", "answer": None}
    numbers |= {"prompt_ids": [5, 6], "completion_ids": [7, 8, 9]}
    numbers |= {name: [-0.5, -1.5, 0.0] for name in ("log_probs_old", "log_probs_ref")}
    numbers |= {"values_old": [0.1, 0.2, 0.3], "reward": 1.0, "reward_model": None}
    numbers |= dict.fromkeys(("reward_correctness", "reward_format", "reward_length"))
    numbers |= {"log_probs_sampler": None}
    return numbers | changes


PAIR = {"prompt_ids": [3], "chosen_ids": [4, 5], "rejected_ids": [6], "margin": 0.0}
LABELLED = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}


def table(folder, schema, rows):
    write_table(folder / "t.parquet", schema, rows, {"prompt_cursor": 4})
    return folder / "t.parquet"


BAD_COMPLETIONS = [
    ({"log_probs_ref": [-1.0]}, "'log_probs_ref' has 1 entries, expected 3, one for each of"),
    ({"log_probs_old": [-1.0] * 4}, "'log_probs_old' has 4 entries, expected 3"),
    ({"values_old": []}, "'values_old' has 0 entries, expected 3"),
    ({"log_probs_sampler": [-1.0] * 3}, "has 'log_probs_sampler', but row 0 has no"),
    ({"log_probs_old": [-1.0, math.nan, 0.0]}, "'log_probs_old' holds nan, expected a finite"),
    ({"log_probs_ref": [-1.0, -math.inf, 0.0]}, "'log_probs_ref' holds -inf, expected a finite"),
    ({"values_old": [math.inf, 0.0, 0.0]}, "'values_old' holds inf, expected a finite"),
    ({"log_probs_old": [-1.0, 0.5, 0.0]}, "'log_probs_old' holds 0.5, expected a log-prob, 0 or"),
    ({"log_probs_ref": [2.0, -1.0, 0.0]}, "'log_probs_ref' holds 2.0, expected a log-prob, 0 or"),
    ({"reward": math.nan}, "'reward' holds nan, expected a finite"),
    ({"reward_model": math.inf}, "'reward_model' holds inf, expected a finite"),
    ({"completion_ids": [], "log_probs_old": [], "log_probs_ref": [], "values_old": []}, "'compl"),
    ({"prompt_ids": []}, "'prompt_ids' is empty, expected ids"),
    ({"prompt_ids": [3, -1]}, "'prompt_ids' holds -1, expected ids, 0 or more"),
    ({"log_probs_ref": None}, "has no 'log_probs_ref', but row 0 has"),
]


@pytest.mark.parametrize(("changes", "expected"), BAD_COMPLETIONS)
@pytest.mark.parametrize("place", [2, ROWS_PER_GROUP + 3], ids=["first group", "second group"])
def test_a_completion_with_other_numbers_is_refused_by_row_and_column(
    tmp_path, changes, expected, place
):
    rows = [completion() for _ in range(ROWS_PER_GROUP + 5)]
    rows[place] = completion(**changes)
    path = table(tmp_path, BUFFERS, rows)
    with pytest.raises(InputError) as error:
        check_contents(path, BUFFERS)
    assert str(error.value).startswith(f"{path}: row {place}")
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"chosen_ids": []}, "'chosen_ids' is empty"),
        ({"rejected_ids": []}, "'rejected_ids' is empty"),
        ({"prompt_ids": []}, "'prompt_ids' is empty"),
        ({"rejected_ids": [-5]}, "'rejected_ids' holds -5"),
        ({"margin": math.nan}, "'margin' holds nan"),
        ({"margin": -1.0}, "'margin' holds -1.0, expected 0 or more"),
    ],
)
def test_a_pair_that_no_stage_wrote_is_refused(tmp_path, changes, expected):
    path = table(tmp_path, PAIRS, [PAIR, PAIR | changes])
    with pytest.raises(InputError, match=f"row 1: {expected}"):
        check_contents(path, PAIRS)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_scored_pair_has_a_log_prob_for_each_token_of_its_side(tmp_path, side):
    scored = PAIR | {"log_probs_ref_chosen": [-0.5, -1.0], "log_probs_ref_rejected": [-2.0]}
    path = table(tmp_path, SCORED_PAIRS, [scored, scored | {f"log_probs_ref_{side}": [0.0] * 3}])
    with pytest.raises(InputError, match=f"row 1: 'log_probs_ref_{side}' has 3 entries, expected"):
        check_contents(path, SCORED_PAIRS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"labels": [2, 3]}, "'labels' has 2 entries, expected 3, one for each of 'input_ids'"),
        ({"labels": [-1, 2, 3]}, "'labels' holds -1, expected ids, or -100 for none"),
        ({"input_ids": [], "labels": []}, "'input_ids' is empty"),
        ({"labels": [-100] * 3}, "'labels' has no id after its first entry, expected at least"),
        ({"labels": [1, -100, -100]}, "'labels' has no id after its first entry, expected at"),
        ({"input_ids": [1], "labels": [1]}, "'labels' has no id after its first entry, expected"),
    ],
)
def test_labels_that_no_stage_wrote_are_refused(tmp_path, changes, expected):
    path = table(tmp_path, SFT, [LABELLED, LABELLED | changes])
    with pytest.raises(InputError, match=f"row 1: {expected}"):
        check_contents(path, SFT)


def test_labels_without_a_target_are_found_in_a_later_batch(tmp_path):
    rows = [LABELLED] * (ROWS_PER_GROUP + 3)
    rows[ROWS_PER_GROUP + 1] = LABELLED | {"labels": [-100] * 3}
    path = table(tmp_path, SFT, rows)
    with pytest.raises(InputError, match=f"row {ROWS_PER_GROUP + 1}: 'labels' has no id"):
        check_contents(path, SFT)


def test_what_stages_write_passes_nulls_and_all(tmp_path):
    check_contents(table(tmp_path, SFT, [LABELLED, LABELLED | {"labels": [-100, -100, 3]}]), SFT)
    rounded = completion(log_probs_old=[1e-6, -0.5, 0.0])
    check_contents(table(tmp_path, BUFFERS, [rounded]), BUFFERS)
    for row in (completion(), completion(log_probs_ref=None, values_old=None, reward=None)):
        check_contents(table(tmp_path, BUFFERS, [row, row]), BUFFERS)
    mixed = [completion(reward=None), completion(reward=0.5)]  # one could not be scored
    check_contents(table(tmp_path, BUFFERS, mixed), BUFFERS)
    rows = [completion(values_old=None), completion()]
    with pytest.raises(InputError, match="row 1 has 'values_old', but row 0 has no"):
        check_contents(table(tmp_path, BUFFERS, rows), BUFFERS)


def test_ids_are_held_against_the_vocabulary_of_the_model_that_reads_them(tmp_path):
    rows = [completion() for _ in range(ROWS_PER_GROUP + 2)]
    rows[5] = completion(completion_ids=[7, 40, 9])
    rows[ROWS_PER_GROUP + 1] = completion(prompt_ids=[48, 6])
    path = table(tmp_path, BUFFERS, rows)
    largest = check_contents(path, BUFFERS)
    assert largest == {"completion_ids": (40, 5), "prompt_ids": (48, ROWS_PER_GROUP + 1)}
    check_vocabulary(path, largest, 49, tmp_path / "model")
    with pytest.raises(InputError) as error:
        check_vocabulary(path, largest, 48, tmp_path / "model")
    told = f"{path}: row {ROWS_PER_GROUP + 1}: 'prompt_ids' holds the id 48, but {tmp_path}/model"
    assert str(error.value) == f"{told} knows 48 ids, 0 to 47"
    path = table(tmp_path, SFT, [LABELLED, LABELLED | {"labels": [-100, 2, 99]}])
    with pytest.raises(InputError, match="row 1: 'labels' holds the id 99"):
        check_vocabulary(path, check_contents(path, SFT), 50, tmp_path)


def test_metadata_that_an_edit_lost_is_told(tmp_path):
    path = table(tmp_path, SFT, [LABELLED] * 3)
    assert check_provenance(path, "prompt_cursor") == {"prompt_cursor": 4}
    with pytest.raises(InputError, match="its metadata lost 'provenance' with 'tokenizer'"):
        check_provenance(path, "prompt_cursor", "tokenizer")
    pq.write_table(pq.read_table(path).slice(0, 2), path)
    with pytest.raises(InputError, match="t.parquet: its metadata lost 'provenance' with 'prompt"):
        check_provenance(path, "prompt_cursor")


def test_rows_are_held_against_the_positions_of_the_model_that_reads_them(tmp_path):
    long = {"labels": [-100] * 8 + [1], "input_ids": [1] * 9}
    path = table(tmp_path, SFT, [LABELLED] * (ROWS_PER_GROUP + 1) + [long])
    check_positions(path, SFT, 9, tmp_path)
    check_positions(path, SFT, None, tmp_path)
    with pytest.raises(InputError) as error:
        check_positions(path, SFT, 8, tmp_path / "model")
    told = f"{path}: row {ROWS_PER_GROUP + 1} has 9 tokens, but {tmp_path}/model has 8 positions"
    assert str(error.value) == told


@pytest.mark.parametrize(
    ("schema", "row", "tokens"),
    [
        (BUFFERS, completion(), 5),
        (PAIRS, PAIR, 3),
        (PAIRS, PAIR | {"rejected_ids": [6, 7, 8]}, 4),
    ],
)
def test_prompt_and_longer_answer_count_together(tmp_path, schema, row, tokens):
    path = table(tmp_path, schema, [row])
    check_positions(path, schema, tokens, tmp_path)
    with pytest.raises(InputError, match=f"row 0 has {tokens} tokens, but .* {tokens - 1} pos"):
        check_positions(path, schema, tokens - 1, tmp_path)
