from collections import Counter
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stages.rollouts.engine import Engine, Prompt, prompt_at
from stages.rollouts.sampling import Sampling, sample
from tests.helpers.models import byte_tokenizer, gpt2, llama, random_ids

NONE = {"reward_correctness": None, "reward_format": None, "reward_length": None}
IDS = [[3, 9, 27, 33], [7], [3, 9], [3, 9, 27, 2, 2, 5], [40, 41], [3]]
PROMPTS = [Prompt(100 + i, ids, f"prompt {i}", str(i), None) for i, ids in enumerate(IDS)]


def engine(policy=None, rewards=lambda prompt, text, ids: NONE, **options) -> Engine:
    sampling = Sampling(1.3, 1.0, 0, 0.0, options.pop("cap", 6), (11, 12, 13))
    return Engine(
        **{
            "policy": policy or llama(),
            "decode": lambda ids: " ".join(map(str, ids)),
            "sampling": sampling,
            "num_rollouts": 3,
            "batch_size": 6,
            "rewards": rewards,
            "seed": 42,
            **options,
        }
    )


def rows_of(made: Engine, round_number=1, cursor=0, wanted=4, tries=0) -> list[dict]:
    return list(made.rows(PROMPTS, round_number, cursor, wanted, tries))


def judged(spread: dict[int, bool | None]):
    """Rewards whose groups have spread (True), are all alike (False) or partly unscorable (None).

    The scores of an unscorable group that are there are alike.
    """
    seen = Counter()

    def rewards(prompt, text, ids):
        seen[prompt.index] += 1
        odd, kind = seen[prompt.index] % 2, spread[prompt.index]
        if kind is None:
            return NONE | {"reward_correctness": 1.0 if odd else None}
        return NONE | {"reward_correctness": float(kind and odd)}

    return rewards


@pytest.mark.parametrize("count", [1, 2, 7])
def test_each_pass_over_the_prompts_is_a_permutation_and_another_one(count):
    order = [prompt_at(position, count, 42) for position in range(3 * count)]
    passes = [order[start : start + count] for start in range(0, 3 * count, count)]
    assert all(sorted(part) == list(range(count)) for part in passes)
    if count == 7:
        assert passes[0] != passes[1] and passes[1] != passes[2]
        assert passes[0] != [prompt_at(position, count, 43) for position in range(count)]


def test_a_round_continues_in_the_order_where_the_last_one_stopped():
    asked, cursor = [], 0
    for round_number in (1, 2, 3):
        made = engine()
        rows = rows_of(made, round_number, cursor, wanted=4)
        asked += [row["prompt_index"] for row in rows if row["sample"] == 0]
        assert made.counts.cursor == cursor + 4
        cursor = made.counts.cursor
    assert asked == [100 + prompt_at(position, 6, 42) for position in range(12)]
    assert Counter(asked) == dict.fromkeys(range(100, 106), 2)


def test_one_engine_serves_round_after_round():
    made, separate = engine(), []
    for round_number, cursor in ((1, 0), (2, 4)):
        separate.append(rows_of(engine(), round_number, cursor))
        assert rows_of(made, round_number, cursor) == separate[-1]
        assert (made.counts.kept, made.counts.tried, made.counts.cursor) == (4, 4, cursor + 4)


def test_rows_carry_their_prompt_group_and_sample():
    rows = rows_of(engine(), round_number=5)
    assert [(row["group"], row["sample"]) for row in rows] == [
        (g, s) for g in range(4) for s in range(3)
    ]
    for row in rows:
        prompt = PROMPTS[row["prompt_index"] - 100]
        assert (row["prompt"], row["answer"], row["prompt_ids"]) == (
            prompt.text,
            prompt.answer,
            prompt.ids,
        )
        assert row["round"] == 5
        assert len(row["completion_ids"]) == len(row["log_probs_old"])
        assert row["finished"] == (row["completion_ids"][-1] in (11, 12, 13))


def test_rewards_see_prompt_text_and_ids_of_the_completion_itself():
    calls = []

    def rewards(prompt, text, ids):
        calls.append((prompt.index, text, list(ids)))
        return NONE | {"reward_length": float(len(calls))}

    rows = rows_of(engine(rewards=rewards))
    assert calls == [(r["prompt_index"], r["completion"], r["completion_ids"]) for r in rows]
    assert all(r["completion"] == " ".join(map(str, r["completion_ids"])) for r in rows)
    assert [row["reward_length"] for row in rows] == list(range(1, 13))


@pytest.mark.parametrize("make", [llama, gpt2])
def test_batch_size_changes_no_sample(make):
    policy = make()
    whole = rows_of(engine(policy, batch_size=100))
    for size in (1, 3, 7):
        for got, wanted in zip(rows_of(engine(policy, batch_size=size)), whole, strict=True):
            assert got["log_probs_old"] == pytest.approx(wanted["log_probs_old"], abs=1e-5)
            got, wanted = ({**row, "log_probs_old": None} for row in (got, wanted))
            assert got == wanted


def test_rounds_seeds_and_places_have_their_own_streams():
    same_prompt = [Prompt(0, IDS[0], "", None, None)]

    def ids(round_number, seed=42, cursor=0):
        rows = engine(seed=seed, num_rollouts=4).rows(same_prompt, round_number, cursor, 1, 0)
        return tuple(tuple(row["completion_ids"]) for row in rows)

    assert ids(1) == ids(1)
    assert len({ids(1), ids(2), ids(3), ids(1, seed=43), ids(1, cursor=1)}) == 5
    assert len(set(ids(1))) == 4  # samples of one prompt differ from each other


def test_dynamic_sampling_replaces_groups_that_are_all_alike_and_the_counts_add_up():
    spread = {100: True, 101: False, 102: True, 103: False, 104: None, 105: True}
    made = engine(rewards=judged(spread))
    rows = rows_of(made, cursor=2, wanted=4, tries=5)
    kept, position = [], 2
    while len(kept) < 4:
        index = 100 + prompt_at(position, 6, 42)
        kept += [index] if spread[index] else []
        position += 1
    assert [row["prompt_index"] for row in rows[::3]] == kept
    assert [row["group"] for row in rows[::3]] == [0, 1, 2, 3]
    assert made.counts.cursor == position
    assert made.counts.kept == 4
    assert made.counts.dropped == position - 2 - 4 > 0
    assert made.counts.tried == made.counts.kept + made.counts.dropped
    for start in range(0, len(rows), 3):
        assert len({row["reward_correctness"] for row in rows[start : start + 3]}) == 2


@pytest.mark.parametrize("batch_size", [1, 6, 100])
def test_the_batch_size_changes_neither_what_is_kept_nor_the_cursor(batch_size):
    spread = {100: True, 101: False, 102: True, 103: False, 104: False, 105: True}
    made = engine(rewards=judged(spread), batch_size=batch_size)
    wanted = engine(rewards=judged(spread), batch_size=3)
    got, other = rows_of(made, tries=5), rows_of(wanted, tries=5)
    assert [row["completion_ids"] for row in got] == [row["completion_ids"] for row in other]
    assert made.counts == wanted.counts


@pytest.mark.parametrize("batch_size", [1, 6, 100])
def test_dynamic_sampling_gives_up_at_its_bound_with_a_short_buffer(batch_size):
    spread = dict.fromkeys(range(100, 106), False) | {102: True}
    made = engine(rewards=judged(spread), batch_size=batch_size)
    rows = rows_of(made, wanted=3, tries=2)
    assert [row["prompt_index"] for row in rows] == [102] * 3
    assert (made.counts.kept, made.counts.dropped, made.counts.tried) == (1, 5, 6)
    assert made.counts.cursor == 6


def test_dynamic_sampling_may_keep_nothing_at_all():
    made = engine(rewards=judged(dict.fromkeys(range(100, 106))))
    assert rows_of(made, wanted=2, tries=4) == []
    assert (made.counts.kept, made.counts.dropped, made.counts.cursor) == (0, 8, 8)


def test_groups_without_any_score_are_counted_apart_and_anew_in_each_round():
    made = engine()
    for round_number in (1, 2):
        assert rows_of(made, round_number, wanted=2, tries=1) == []
        assert (made.counts.dropped, made.counts.unscored) == (2, 2)
    some = engine(rewards=judged(dict.fromkeys(range(100, 106))))
    assert rows_of(some, wanted=2, tries=1) == []
    assert (some.counts.dropped, some.counts.unscored) == (2, 0)


def test_without_dynamic_sampling_every_group_is_kept():
    made = engine(rewards=judged(dict.fromkeys(range(100, 106), False)))
    assert len(rows_of(made)) == 12
    assert (made.counts.kept, made.counts.dropped) == (4, 0)


def merging_tokenizer() -> Tokenizer:
    """«he» + «llo» reads as hello, whose own encoding is the one token hello."""
    words = ["h", "e", "l", "o", "he", "lo", "llo", "hello", "Ã", "¤"]
    merges = [("h", "e"), ("l", "o"), ("l", "lo"), ("he", "llo")]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return core


def test_sampled_ids_are_kept_where_decoding_and_encoding_would_change_them():
    tokenizer = merging_tokenizer()
    assert tokenizer.encode(tokenizer.decode([4, 6])).ids == [7]
    policy = llama(vocabulary=10)
    made = engine(policy, decode=tokenizer.decode, num_rollouts=40, cap=3)
    prompts = [Prompt(i, ids, "", None, None) for i, ids in enumerate(random_ids(0, 3, 5))]
    prompts = [Prompt(p.index, [i % 10 for i in p.ids], "", None, None) for p in prompts]
    rows = list(made.rows(prompts, 1, 0, 2, 0))
    again = [tokenizer.encode(row["completion"]).ids for row in rows]
    changed = [row["completion_ids"] != ids for row, ids in zip(rows, again, strict=True)]
    assert sum(changed) > 10
    for row in rows:
        assert len(row["completion_ids"]) == 3 == len(row["log_probs_old"])
        assert row["completion"] == tokenizer.decode(row["completion_ids"])


def test_special_tokens_and_broken_utf8_stay_in_the_ids_and_not_in_the_text():
    tokenizer = byte_tokenizer()
    policy = llama(vocabulary=len(tokenizer))
    made = engine(
        policy,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        num_rollouts=30,
        cap=30,
    )
    rows = rows_of(made, wanted=2)
    special = [row for row in rows if set(row["completion_ids"]) & {0, 1, 2}]
    broken = [row for row in rows if "\N{REPLACEMENT CHARACTER}" in row["completion"]]
    assert special and broken
    for row in rows:
        assert len(row["completion_ids"]) == len(row["log_probs_old"])
        assert "<|" not in row["completion"]


@pytest.mark.parametrize("limit", [1, 12, 20, 40, 80])
def test_a_limit_on_tokens_decodes_fewer_rows_side_by_side_and_changes_no_sample(
    monkeypatch, limit
):
    policy, passes = llama(), []
    whole = rows_of(engine(policy, batch_size=100))

    def watched(policy, prompts, draws, sampling):
        passes.append((len(prompts) * draws.shape[1], max(map(len, prompts)) + 6))
        return sample(policy, prompts, draws, sampling)

    monkeypatch.setattr("stages.rollouts.engine.sample", watched)
    made = engine(policy, batch_size=100)
    sampling = replace(made.sampling, max_tokens=limit)
    for got, wanted in zip(rows_of(replace(made, sampling=sampling)), whole, strict=True):
        assert got["log_probs_old"] == pytest.approx(wanted["log_probs_old"], abs=1e-5)
        assert got | {"log_probs_old": None} == wanted | {"log_probs_old": None}
    assert sum(rows for rows, _ in passes) == 12 and len(passes) > 1
    assert all(rows == 1 or rows * width <= limit for rows, width in passes)
