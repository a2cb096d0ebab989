"""Rows on their way into the stages: what is refused, dropped with a count, or kept.

Names such as n16 are those of the project's list of faults.
"""

import datetime
import hashlib
import json
import shutil

import pyarrow.parquet as pq
import pytest
from transformers import GPT2Config, GPT2LMHeadModel, MptConfig
from transformers.utils import chat_template_utils

from stages.base.positions import positions_of
from stages.base.tables import PAIRS, SFT, write_table
from stages.sources.tiny import CHATML, byte_tokenizer
from tests.helpers.models import NO_SPECIAL_IDS
from tests.helpers.stage import figures, refuse, succeed

LONG = {"prompt": "a" * 600, "completion": "b" * 600, "chosen": "b" * 600, "rejected": "c" * 600}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the base model of the small knobs."""
    folder = tmp_path_factory.mktemp("base")
    succeed(folder, "prepare_model")
    return folder


@pytest.fixture
def folder(base, tmp_path):
    """A copy of it, and an empty data/source."""
    copy = tmp_path / "run"
    shutil.copytree(base, copy)
    (copy / "data" / "source").mkdir(parents=True)
    return copy


def source(folder, *rows):
    """Rows as a file under data/source; the knob's value for it."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "data" / "source" / "rows.jsonl").write_text(text)
    return "data/source/rows.jsonl"


def pair(**ids):
    return {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3], "margin": 0.0} | ids


# Nothing half done.


@pytest.mark.parametrize(
    ("stage", "section", "out"),
    [
        ("tokenize_sft", "sft", "data/sft.parquet"),
        ("tokenize_preferences", "preferences", "data/preferences/pairs.parquet"),
    ],
)
def test_n16_a_stage_that_keeps_no_row_leaves_no_table(folder, stage, section, out):
    message = refuse(folder, stage, **{f"{section}__dataset": source(folder, LONG)})
    assert "data/source/rows.jsonl: no row was kept of 1" in message
    assert not (folder / out).exists() and not list((folder / "data").rglob(".*"))


def test_n16_an_sft_without_rows_is_refused_before_it_begins(folder):
    write_table(folder / "data" / "sft.parquet", SFT, [], {})
    assert "data/sft.parquet: no rows; expected at least one" in refuse(folder, "train_sft")
    assert not (folder / "models" / "sft").exists()


@pytest.mark.parametrize("empty", ["train", "validation"])
def test_n16_a_reward_model_without_rows_on_one_side_is_refused_before_it_begins(folder, empty):
    shutil.copytree(folder / "models" / "base", folder / "models" / "sft")
    for side in ("train", "validation"):
        pairs = [] if side == empty else [pair()]
        write_table(folder / "data" / "preferences" / f"{side}.parquet", PAIRS, pairs, {})
    message = refuse(folder, "train_rm")
    assert f"data/preferences/{empty}.parquet: no rows; expected at least one" in message
    assert not (folder / "models" / "rm").exists()


def test_n16_pairs_without_rows_are_refused_by_the_split(folder):
    write_table(folder / "data" / "preferences" / "pairs.parquet", PAIRS, [], {})
    assert "pairs.parquet: no rows; expected at least one" in refuse(folder, "split_preferences")


# The split of the pairs.


def split(folder, prompts, seed, share=1 / 3):
    """Prompts of either side, of the pairs that have these prompts."""
    tokenizer = byte_tokenizer(64)
    pairs = [pair(prompt_ids=tokenizer(text)["input_ids"], margin=i) for i, text in prompts]
    write_table(folder / "data" / "preferences" / "pairs.parquet", PAIRS, pairs, {})
    succeed(folder, "split_preferences", seed=seed, preferences__validation_share=share)
    sides = [table(folder, f"preferences/{side}") for side in ("train", "validation")]
    assert sorted(row["margin"] for side in sides for row in side) == [i for i, _ in prompts]
    return [{tokenizer.decode(row["prompt_ids"]) for row in side} for side in sides]


@pytest.mark.parametrize("share", [0.01, 1 / 3, 0.99])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_n19_both_sides_have_prompts_wherever_there_are_two(folder, count, share):
    prompts = list(enumerate([f"question {i % count}" for i in range(4 * count)]))
    for seed in range(12 if count == 3 else 4):
        train, held = split(folder, prompts, seed, share)
        assert train and held and not train & held and len(train | held) == count


def test_n19_prompts_that_differ_in_white_space_alone_stay_together(folder):
    spellings = [
        "What is it?",
        "What is it? ",
        "  What is  it?",
        "What\tis\nit?",
        "What is\u00a0it?",
    ]
    prompts = list(enumerate([*spellings, *"abcdefgh"]))
    for seed in range(8):
        sides = split(folder, prompts, seed)
        assert sum(not side.isdisjoint(spellings) for side in sides) == 1
        assert (
            split(folder, [(i, text) for i, (_, text) in enumerate(prompts[::-1])], seed) == sides
        )


def test_n19_a_prompt_goes_where_the_hash_of_its_ids_says(folder):
    """Written out by hand from the docstrings: a prompt that stands alone is held out below."""
    prompts = [f"question {i}" for i in range(40)]
    expected = set()
    for text in prompts:
        ids = byte_tokenizer(64)(text)["input_ids"]
        words = "\x1f".join(map(str, [7, "split_preferences", *ids]))
        digest = hashlib.sha256(words.encode()).digest()
        if int.from_bytes(digest[:8], "big") / 2**64 < 0.25:
            expected.add(text)
    assert 0 < len(expected) < 40
    assert split(folder, list(enumerate(prompts)), 7, 0.25)[1] == expected


@pytest.mark.parametrize("prompts", [["q"], ["q", "q", " q"]])
def test_n19_one_prompt_cannot_be_split(folder, prompts):
    with pytest.raises(AssertionError, match="one prompt; expected at least two prompts"):
        split(folder, list(enumerate(prompts)), 0)
    assert not list((folder / "data" / "preferences").glob("[tv]*"))


# What prepare_task finds before anything trains.


@pytest.fixture
def empty(tmp_path):
    (tmp_path / "data" / "source").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("section", ["prompts", "evaluate"])
@pytest.mark.parametrize("field", ["answer", "prompt", "system"])
def test_n08_a_column_that_is_not_there_is_refused_by_the_first_stage(empty, section, field):
    rows = source(empty, {"prompt": "q", "reward_model": {"ground_truth": "a"}})
    knobs = {f"{section}__dataset": rows, f"{section}__columns": {field: "ground_thruth"}}
    message = refuse(empty, "prepare_task", **knobs)
    wanted = f"no column 'ground_thruth' (for '{field}'); there are [prompt, reward_model"
    assert f"  {section}: {rows}: columns: {wanted}.ground_truth]" in message
    assert not (empty / "data" / "task").exists()


@pytest.mark.parametrize(("section", "field"), [("sft", "system"), ("preferences", "margin")])
def test_n08_a_column_that_the_embedded_task_lacks_is_refused_too(empty, section, field):
    message = refuse(empty, "prepare_task", **{f"{section}__columns": {field: "nowhere"}})
    assert f"  {section}: task: columns: no column 'nowhere' (for '{field}')" in message


UNVERIFIED = [
    ({"prompt": "q"}, "exact", "'answer'"),
    ({"prompt": "q", "answer": None}, "regex", "'answer'"),
    ({"prompt": "q", "answer": ""}, "exact", "'answer'"),
    ({"prompt": "q", "answer": " \n"}, "regex", "'answer'"),
    ({"prompt": "q", "answer": "forty two"}, "numeric", "'answer' with a number"),
    ({"prompt": "q", "answer": "a"}, "task", "'entry'"),
]


@pytest.mark.parametrize(("row", "verifier", "needed"), UNVERIFIED)
def test_n09_prompts_that_nothing_can_verify_are_refused_by_the_first_stage(
    empty, row, verifier, needed
):
    knobs = {"verifier": verifier, "verifier_pattern": "(.)"}
    rows = source(empty, *[row] * 1100)
    message = refuse(empty, "prepare_task", prompts__dataset=rows, **knobs)
    assert f"  prompts: {rows}: verifier {verifier} needs {needed} and no prompt has one" in message
    assert "expected a column of that name" in message and "rewards.correctness null" in message
    rewards = {"correctness": None, "format": None, "length": None, "reward_model": 1.0}
    succeed(empty, "prepare_task", prompts__dataset=rows, rewards=rewards, **knobs)


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ({}, "None"),
        ({"answer": "a", "metadata": "m"}, "None"),
        ({"metadata": {"source_dataset": "nosuch"}}, "'nosuch'"),
        ({"metadata": {"source_dataset": ["spell_backward"]}}, "['spell_backward']"),
    ],
)
def test_n09_an_entry_that_no_verifier_of_the_task_knows_is_refused(empty, entry, found):
    rows = source(empty, {"prompt": "q"}, {"prompt": "q", "entry": entry})
    message = refuse(empty, "prepare_task", prompts__dataset=rows)
    assert f"{rows}: row 2: 'entry' has {found} as metadata.source_dataset, expected" in message
    succeed(
        empty,
        "prepare_task",
        prompts__dataset=rows,
        verifier="regex",
        verifier_pattern="(.)",
        rewards={"correctness": None, "format": None, "length": 1.0, "reward_model": None},
    )
    good = {"prompt": "q", "entry": {"metadata": {"source_dataset": "spell_backward"}}}
    succeed(empty, "prepare_task", prompts__dataset=source(empty, good))


@pytest.mark.parametrize("weight", [1.0, 0.0, -0.5])
def test_n09_a_component_that_is_null_leaves_no_reward_whatever_its_weight(empty, weight):
    rewards = {"correctness": weight, "format": None, "length": None, "reward_model": 1.0}
    rows = source(empty, {"prompt": "q"})
    knobs = {"prompts__dataset": rows, "verifier": "exact", "rewards": rewards}
    assert f"with rewards.correctness {weight} none" in refuse(empty, "prepare_task", **knobs)


def test_n09_one_prompt_with_an_answer_is_enough_and_ones_own_verifier_is_trusted(empty):
    late = source(empty, *[{"prompt": "q"}] * 1500, {"prompt": "q", "answer": "3"})
    for verifier in ("exact", "numeric"):
        succeed(empty, "prepare_task", prompts__dataset=late, verifier=verifier)
    (empty / "data" / "source" / "mine.py").write_text("def check(text, answer, entry): return 1")
    rows = source(empty, {"prompt": "q"})
    succeed(empty, "prepare_task", prompts__dataset=rows, verifier="mine:check")


def test_n09_the_embedded_task_is_looked_at_as_well(empty):
    message = refuse(empty, "prepare_task", verifier="numeric")
    assert "  prompts: task: verifier numeric needs 'answer' with a number" in message


# What a base model brings: positions, a template that prints the date, options of a template.


def table(folder, name):
    return pq.read_table(folder / "data" / f"{name}.parquet").to_pylist()


def brought(folder, template=CHATML, **config):
    """A tiny GPT-2 as a model folder under models/source; the knob's value for it."""
    tokenizer = byte_tokenizer(64)
    tokenizer.chat_template = template
    place = folder / "models" / "source" / "mine"
    sizes = {"vocab_size": len(tokenizer), "n_embd": 8, "n_layer": 1, "n_head": 2, **NO_SPECIAL_IDS}
    GPT2LMHeadModel(GPT2Config(**sizes | {"n_positions": 96} | config)).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return {"model__source": "models/source/mine"}


def test_n10_rows_and_pairs_are_cut_at_the_models_positions_and_counted(empty):
    # ChatML of the tiny tokenizer: a header, the bytes and <|im_end|> for a turn, a line break.
    succeed(empty, "prepare_model", **brought(empty, n_positions=48))
    short, long = {"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "a" * 60}
    rows = source(empty, short, long, {"prompt": "q" * 60, "completion": "a"})
    output = succeed(empty, "tokenize_sft", sft__dataset=rows)
    assert "sft.max_length: 512, but models/base has 48 positions: rows are cut there" in output
    found = figures(empty, "tokenize_sft")
    assert (found["kept"], found["truncated"], found["dropped"]) == (2, 1, 1)
    assert [len(row["input_ids"]) for row in table(empty, "sft")] == [8, 48]
    pair = {"prompt": "q", "chosen": "a" * 60, "rejected": "b"}
    rows = source(empty, pair, pair | {"prompt": "q" * 60})
    output = succeed(empty, "tokenize_preferences", preferences__dataset=rows)
    assert "preferences.max_length: 512, but models/base has 48 positions" in output
    (row,) = table(empty, "preferences/pairs")
    assert len(row["prompt_ids"]) + len(row["chosen_ids"]) == 48
    found = figures(empty, "tokenize_preferences")
    assert (found["truncated"], found["dropped"]) == (1, 1)


def test_n10_a_max_length_below_the_positions_stays_and_nothing_is_said(empty):
    succeed(empty, "prepare_model", **brought(empty, n_positions=48))
    rows = source(empty, {"prompt": "q", "completion": "a" * 60})
    for length in (20, 48):
        output = succeed(empty, "tokenize_sft", sft__dataset=rows, sft__max_length=length)
        assert "positions" not in output
        assert [len(row["input_ids"]) for row in table(empty, "sft")] == [length]


def test_n10_positions_go_by_many_names():
    assert positions_of(GPT2Config(n_positions=7)) == 7
    assert positions_of(MptConfig(max_seq_len=9)) == 9

    class Unlimited(GPT2Config):
        attribute_map = {}

    assert positions_of(Unlimited()) is None
    assert positions_of(Unlimited(max_position_embeddings=-1)) is None


DATED = "Today is {{ strftime_now('%d %b %Y') }} ({{ strftime_now('%A, %-d %B') }})." + CHATML


class Clock(datetime.datetime):
    """A clock that stands at another day each time that somebody looks."""

    day = 0

    @classmethod
    def now(cls, tz=None):
        cls.day += 1
        return datetime.datetime(2031, 1, 1) + datetime.timedelta(days=cls.day)


@pytest.mark.parametrize("stage", ["tokenize_sft", "tokenize_preferences"])
def test_n06_a_template_that_prints_the_date_gives_the_same_bytes_every_day(
    empty, monkeypatch, stage
):
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    knobs = brought(empty, DATED) | {"model__date": "2024-07-06"}
    rows = source(empty, {"prompt": "q", "completion": "a", "chosen": "a", "rejected": "b"})
    knobs |= {"sft__dataset": rows, "preferences__dataset": rows}
    out = {"tokenize_sft": "sft", "tokenize_preferences": "preferences/pairs"}[stage]
    written = []
    for _ in range(2):
        for each in ("prepare_model", stage):
            succeed(empty, each, **knobs)
        written.append((empty / "data" / f"{out}.parquet").read_bytes())
    assert written[0] == written[1]
    ids = table(empty, out)[0]
    text = byte_tokenizer(64).decode(ids.get("input_ids") or ids["prompt_ids"])
    assert text.startswith("Today is 06 Jul 2024 (Saturday, 6 July).<|im_start|>user\nq")


def test_n06_a_model_that_was_saved_again_keeps_the_date_and_the_knob_changes_it(empty):
    knobs = brought(empty, DATED)
    succeed(empty, "prepare_model", **knobs)
    for number, date in enumerate(["2026-01-01", "1999-12-31"]):
        if number:
            shutil.rmtree(empty / "models" / "source")
            shutil.copytree(empty / "models" / "base", empty / "models" / "source" / "mine")
            succeed(empty, "prepare_model", **knobs, model__date=date)
        config = json.loads((empty / "models" / "base" / "tokenizer_config.json").read_text())
        assert config["chat_template_date"] == date


def test_n06_a_template_that_prints_no_date_has_none_recorded(base):
    config = json.loads((base / "models" / "base" / "tokenizer_config.json").read_text())
    assert not [key for key in config if key.startswith("chat_template_")]


@pytest.mark.parametrize("date", ["2026-02-30", "today", "2026-1-1", "20260101"])
def test_n06_a_date_that_is_none_is_refused(empty, date):
    assert "model.date" in refuse(empty, "prepare_model", model__date=date)


BLOCK = "('<think></think>' if enable_thinking is defined and not enable_thinking else '')"
THINKING = CHATML.replace(
    "message['content']", f"({BLOCK} if message.role == 'assistant' else '') + message['content']"
).replace("assistant\\n' }}", f"assistant\\n' + {BLOCK} }}}}")


@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_n22_options_of_a_template_are_a_knob_that_every_stage_obeys(empty, options):
    knobs = brought(empty, THINKING) | {"model__template_options": options}
    rows = source(empty, {"prompt": "q", "chosen": "a", "rejected": "b"})
    for stage in ("prepare_model", "tokenize_preferences"):
        succeed(empty, stage, **knobs, preferences__dataset=rows)
    (row,) = table(empty, "preferences/pairs")
    shown = byte_tokenizer(64).decode(row["prompt_ids"])
    assert shown.endswith("<think></think>") is (options == {"enable_thinking": False})


@pytest.mark.parametrize("name", ["enable_thinkin", "tools", "tokenize", "add_generation_prompt"])
def test_n22_an_option_that_the_template_does_not_know_is_refused(empty, name):
    knobs = brought(empty, THINKING) | {"model__template_options": {name: False}}
    message = refuse(empty, "prepare_model", **knobs)
    assert f"params.yaml: model.template_options: found '{name}', of which" in message
