"""Each stage by its command line, on a tiny model and task: what it writes and what it refuses."""

import csv
import html
import json
import os
import re
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from stages.base import params, tables
from stages.base.environment import TRACK
from stages.models.checkpoints import load_scorer
from stages.models.scorers import scores
from stages.page.page import visible
from stages.prepare_model import set_padding
from stages.rl.objectives import OBJECTIVES
from stages.sources import tiny
from tests.helpers.own_code import CODE, bring_code
from tests.helpers.stage import figures, refuse, succeed
from tests.helpers.tiny import ROOT, SMALL, command_line, small_params, write

ORDER = [
    "prepare_task",
    "prepare_model",
    "tokenize_sft",
    "train_sft",
    "tokenize_preferences",
    "split_preferences",
    "train_rm",
    "evaluate_sft",
    *(f"{stage}@{k}" for k in (1, 2) for stage in ("rollout", "score", "optimize", "evaluate")),
    "report",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder in which every stage ran once; tests read it and never write into it."""
    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "data" / "source").mkdir(parents=True)
    shutil.copytree(ROOT / "docs", folder / "docs")
    for stage in ORDER:
        succeed(folder, stage)
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    """The finished folder, to change; outputs of the first run are there and may be replaced."""
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    return folder


def rows(folder, name):
    return pq.read_table(folder / "data" / f"{name}.parquet").to_pylist()


def curve(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# What stages write.


@pytest.mark.parametrize(
    ("name", "stage", "model"),
    [
        ("sft", "tokenize_sft", "models/base"),
        ("preferences/pairs", "tokenize_preferences", "models/base"),
        ("preferences/validation", "split_preferences", "models/base"),
        ("evaluations/sft", "evaluate", "models/sft"),
        ("rollouts/round-2", "rollout", "models/policy/1"),
        ("buffers/round-2", "score", "models/policy/1"),
        ("updates/round-2", "optimize", "models/policy/1"),
    ],
)
def test_every_table_names_its_stage_and_the_model_folder_that_knows_its_tokens(
    finished, name, stage, model
):
    made = tables.read_provenance(finished / "data" / f"{name}.parquet")
    assert made["stage"] == stage
    assert [made[key] for key in ("tokenizer", "policy") if key in made] == [model]


def test_the_task_has_as_many_rows_as_asked_for_and_no_question_twice(finished):
    found = {path.stem: lines(path) for path in (finished / "data" / "task").iterdir()}
    sizes = {name: len(entries) for name, entries in found.items()}
    assert sizes == {"sft": 24, "preferences": 24, "prompts": 12, "heldout": 6}
    assert figures(finished, "prepare_task") == {f"{name}_rows": n for name, n in sizes.items()}
    questions = [row["messages"][0]["content"] for row in found["sft"]]
    for name in ("preferences", "prompts", "heldout"):
        questions += [row["prompt"][-1]["content"] for row in found[name]]
    assert len(set(questions)) == len(questions) == 66


def test_preferred_answers_are_right_and_rejected_ones_wrong(finished):
    for row in lines(finished / "data" / "task" / "preferences.jsonl"):
        word = row["prompt"][-1]["content"].split()[-1]
        assert row["chosen"][0]["content"] == word[::-1]
        assert row["rejected"][0]["content"] != word[::-1]


def test_another_model_makes_no_other_task(finished, copy):
    before = (copy / "data" / "task" / "sft.jsonl").read_bytes()
    succeed(copy, "prepare_task", model__layers=2, sft__lr=0.5)
    assert (copy / "data" / "task" / "sft.jsonl").read_bytes() == before
    succeed(copy, "prepare_task", seed=7)
    assert (copy / "data" / "task" / "sft.jsonl").read_bytes() != before


def test_more_sft_rows_leave_the_held_out_ones_as_they_are(copy):
    before = (copy / "data" / "task" / "heldout.jsonl").read_bytes()
    succeed(copy, "prepare_task", task__sft_rows=30)
    assert (copy / "data" / "task" / "heldout.jsonl").read_bytes() == before


def test_the_base_model_is_what_the_knobs_say(finished):
    model = AutoModelForCausalLM.from_pretrained(finished / "models" / "base")
    tokenizer = AutoTokenizer.from_pretrained(finished / "models" / "base")
    assert model.config.num_hidden_layers == 1 and model.config.hidden_size == 16
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_a_local_folder_serves_as_base_model(copy):
    shutil.copytree(copy / "models" / "sft", copy / "models" / "source" / "mine")
    source = "models/source/mine"
    output = succeed(copy, "prepare_model", {"--out": "models/again"}, model__source=source)
    assert "lies outside" not in output
    again = load_file(copy / "models" / "again" / "model.safetensors")
    before = load_file(copy / "models" / "sft" / "model.safetensors")
    assert again.keys() == before.keys()
    assert all(torch.equal(again[key], before[key]) for key in again)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_itself_scores_alike_where_the_base_model_pads_with_eos(copy, side):
    sft = copy / "models" / "sft"
    tokenizer = AutoTokenizer.from_pretrained(sft)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(sft)
    succeed(copy, "prepare_model", {"--out": "models/base"}, model__source="models/sft")
    succeed(copy, "train_rm", {"--sft": "models/base"})
    rm = copy / "models" / "rm"
    tokenizer = AutoTokenizer.from_pretrained(rm, padding_side=side)
    model = AutoModelForSequenceClassification.from_pretrained(rm).eval()
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id
    pairs = rows(copy, "preferences/validation")
    prompts = [pair["prompt_ids"] for pair in pairs] * 2
    answers = [pair[name] for name in ("chosen_ids", "rejected_ids") for pair in pairs]
    ids = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    assert len(set(map(len, ids))) > 1 and {row[-1] for row in ids} == {tokenizer.eos_token_id}
    found = model(**tokenizer.pad({"input_ids": ids}, return_tensors="pt")).logits[:, 0]
    wanted = scores(load_scorer(rm, "sdpa", torch.device("cpu")), prompts, answers)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_base_model_without_another_special_token_pads_with_eos():
    tokenizer = tiny.byte_tokenizer(64)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] == "<|im_end|>"]
    bare = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token="<|im_end|>",
        chat_template=tokenizer.chat_template,
    )
    set_padding(bare)
    assert bare.pad_token_id == bare.eos_token_id


def test_sft_labels_are_the_answer_and_its_end(finished):
    tokenizer = AutoTokenizer.from_pretrained(finished / "models" / "base")
    task = lines(finished / "data" / "task" / "sft.jsonl")
    table = rows(finished, "sft")
    assert len(table) == len(task) == figures(finished, "tokenize_sft")["kept"]
    trained = 0
    for row, source in zip(table, task, strict=True):
        labelled = [label for label in row["labels"] if label != -100]
        trained += len(labelled)
        answer = source["messages"][-1]["content"]
        assert tokenizer.decode(labelled).startswith(f"{answer}{tokenizer.eos_token}")
        assert len(row["labels"]) == len(row["input_ids"])
    assert figures(finished, "tokenize_sft")["trained_tokens"] == trained


def test_sft_figures_are_those_of_its_curve(finished):
    steps = curve(finished / "data" / "curves" / "train_sft.csv")
    found = figures(finished, "train_sft")
    assert found["steps"] == len(steps) == 3
    assert found["loss_first"] == pytest.approx(float(steps[0]["loss"]))
    assert found["loss_last"] == pytest.approx(float(steps[-1]["loss"]))
    assert found["trained_tokens"] == sum(int(step["tokens"]) for step in steps)
    assert found["trained_tokens"] == figures(finished, "tokenize_sft")["trained_tokens"]
    assert found["skipped"] == 0


def test_training_changes_the_weights(finished):
    names = ("base", "sft", "policy/1", "policy/2")
    weights = [load_file(finished / "models" / name / "model.safetensors") for name in names]
    for before, after in zip(weights, weights[1:], strict=False):
        assert before.keys() == after.keys()
        assert any(not torch.equal(before[key], after[key]) for key in before)


def test_pairs_are_split_by_prompt_and_none_is_lost(finished):
    pairs = rows(finished, "preferences/pairs")
    train, held = rows(finished, "preferences/train"), rows(finished, "preferences/validation")
    assert len(train) + len(held) == len(pairs) == 24
    assert not {tuple(r["prompt_ids"]) for r in train} & {tuple(r["prompt_ids"]) for r in held}
    assert figures(finished, "split_preferences") == {
        "train_pairs": len(train),
        "validation_pairs": len(held),
    }


def test_reordered_pairs_go_to_the_same_sides(copy):
    path = copy / "data" / "preferences" / "pairs.parquet"
    before = {tuple(r["prompt_ids"]) for r in rows(copy, "preferences/validation")}
    pairs = rows(copy, "preferences/pairs")
    tables.write_table(path, tables.PAIRS, pairs[::-1], {})
    succeed(copy, "split_preferences")
    assert {tuple(r["prompt_ids"]) for r in rows(copy, "preferences/validation")} == before


def test_the_reward_models_figures_are_of_the_validation_pairs(finished):
    found = figures(finished, "train_rm")
    assert found["validation_pairs"] == len(rows(finished, "preferences/validation"))
    assert 0 <= found["validation_accuracy"] <= 1
    assert found["steps"] == len(curve(finished / "data" / "curves" / "train_rm.csv"))


def test_a_rollout_has_a_row_for_every_completion(finished):
    found = rows(finished, "rollouts/round-1")
    assert [(r["group"], r["sample"]) for r in found] == [(g, s) for g in range(4) for s in (0, 1)]
    assert {r["round"] for r in found} == {1}
    for row in found:
        assert 1 <= len(row["completion_ids"]) == len(row["log_probs_old"]) <= 6
        assert all(log_prob <= 0 for log_prob in row["log_probs_old"])
        assert row["finished"] or len(row["completion_ids"]) == 6
        assert row["reward_format"] is None and -1 <= row["reward_length"] <= 0
        assert 0 <= row["reward_correctness"] <= 1
    numbers = figures(finished, "rollout/1")
    assert numbers["completions"] == 8
    assert numbers["tokens"] == sum(len(r["completion_ids"]) for r in found)
    assert numbers["length"] == pytest.approx(numbers["tokens"] / 8)
    assert numbers["finished"] == pytest.approx(sum(r["finished"] for r in found) / 8)
    assert numbers["groups_kept"] == numbers["groups_tried"] == 4


def test_rounds_take_prompts_in_turn_and_each_once_a_pass(finished):
    seen = [
        row["prompt_index"] for k in (1, 2) for row in rows(finished, f"rollouts/round-{k}")[::2]
    ]
    assert len(set(seen)) == 8
    cursors = [
        tables.read_provenance(finished / "data" / "rollouts" / f"round-{k}.parquet")[
            "prompt_cursor"
        ]
        for k in (1, 2)
    ]
    assert cursors == [4, 8]


def test_two_rounds_share_no_random_stream(finished, copy):
    succeed(copy, "rollout@1", {"--round": 9})
    other, first = rows(copy, "rollouts/round-1"), rows(finished, "rollouts/round-1")
    assert [r["prompt_index"] for r in other] == [r["prompt_index"] for r in first]
    assert [r["completion_ids"] for r in other] != [r["completion_ids"] for r in first]


def test_a_buffer_is_its_rollout_with_scores(finished):
    for k in (1, 2):
        sampled = rows(finished, f"rollouts/round-{k}")
        scored = rows(finished, f"buffers/round-{k}")
        assert [{key: row[key] for key in sampled[0]} for row in scored] == sampled
        for row in scored:
            expected = 1.0 * row["reward_correctness"] + 0.1 * row["reward_model"]
            assert row["reward"] == pytest.approx(expected, abs=1e-6)
            tokens = len(row["completion_ids"])
            assert len(row["log_probs_ref"]) == len(row["values_old"]) == tokens
        mean = sum(row["reward"] for row in scored) / len(scored)
        assert figures(finished, f"score/{k}")["reward"] == pytest.approx(mean, abs=1e-6)
        assert figures(finished, f"score/{k}")["unscorable"] == 0


def test_the_reference_of_the_first_round_is_the_policy_itself(finished):
    for row in rows(finished, "buffers/round-1"):
        assert row["log_probs_ref"] == pytest.approx(row["log_probs_old"], abs=1e-5)


def test_what_is_not_asked_for_is_null_in_the_same_schema(copy):
    before = pq.read_schema(copy / "data" / "buffers" / "round-1.parquet").remove_metadata()
    succeed(copy, "score@1", beta=0.0, critic=None, rewards__reward_model=None)
    assert pq.read_schema(copy / "data" / "buffers" / "round-1.parquet").remove_metadata() == before
    for row in rows(copy, "buffers/round-1"):
        nulls = [row[name] for name in ("log_probs_ref", "values_old", "reward_model")]
        assert nulls == [None, None, None]
        assert row["reward"] == row["reward_correctness"]
    assert figures(copy, "score/1")["reward_model"] is None


def test_the_format_and_length_rules_count_by_their_weights(copy):
    knobs = {"format_pattern": "[a-z]*", "rewards__format": 2.0, "rewards__length": 0.5}
    succeed(copy, "rollout@1", **knobs)
    succeed(copy, "score@1", rewards__reward_model=None, **knobs)
    for row in rows(copy, "buffers/round-1"):
        letters = all("a" <= sign <= "z" for sign in row["completion"])
        assert row["reward_format"] == float(letters)
        parts = row["reward_correctness"] + 2 * row["reward_format"] + 0.5 * row["reward_length"]
        assert row["reward"] == pytest.approx(parts, abs=1e-6)


def test_an_update_has_a_row_for_every_completion_in_the_order_of_the_buffer(finished):
    for k in (1, 2):
        buffer, updates = rows(finished, f"buffers/round-{k}"), rows(finished, f"updates/round-{k}")
        for name in ("group", "sample"):
            assert [row[name] for row in updates] == [row[name] for row in buffer]
        for row, source in zip(updates, buffer, strict=True):
            assert row["round"] == k and row["used"]
            assert len(row["advantage"]) == len(source["completion_ids"])
            assert row["reward_shaped"] == pytest.approx(source["reward"], abs=1e-6)


def test_ratios_of_a_first_step_are_1(copy):
    succeed(copy, "optimize@1", train_batch_size=64)
    for row in rows(copy, "updates/round-1"):
        assert row["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert row["ratio"] == pytest.approx([1.0] * len(row["advantage"]), abs=1e-5)
        assert row["kl"] == pytest.approx(0.0, abs=1e-5) and row["clipped_fraction"] == 0


def test_a_policy_carries_its_training_state_and_is_a_plain_model_folder(finished):
    for k, steps in ((1, 2), (2, 4)):
        folder = finished / "models" / "policy" / str(k)
        state = json.loads((folder / "trainer" / "state.json").read_text())
        assert state == {"step": steps, "prompt_cursor": 4 * k, "rounds": list(range(1, k + 1))}
        assert (folder / "trainer" / "policy.safetensors").is_file()
        assert not list(folder.rglob("*.bin")) and not list(folder.rglob("*.pt"))
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_round_goes_on_with_the_steps_of_the_round_it_starts_from(finished):
    steps = [
        int(row["step"])
        for k in (1, 2)
        for row in curve(finished / "data" / "curves" / "optimize" / f"{k}.csv")
    ]
    assert steps == [1, 2, 3, 4]


def test_steps_that_are_off_policy_are_told_where_no_ratio_corrects_for_them(copy):
    told = "of 4 steps over this buffer only the first is on-policy"
    sizes = {"batch_acc": 1, "train_batch_size": len(rows(copy, "buffers/round-1")) // 4}
    assert told in succeed(copy, "optimize@1", loss="rloo", **sizes)
    assert "on-policy" not in succeed(copy, "optimize@1", loss="grpo", **sizes)
    one = sizes | {"batch_acc": 4}
    assert "on-policy" not in succeed(copy, "optimize@1", loss="rloo", **one)


def test_a_critic_that_starts_from_the_policy_expects_0_and_then_learns(copy):
    succeed(copy, "score@1", critic="policy")
    for row in rows(copy, "buffers/round-1"):
        assert row["values_old"] == [0.0] * len(row["completion_ids"])
    for stage in ("optimize@1", "rollout@2", "score@2"):
        succeed(copy, stage, loss="ppo", critic="policy")
    assert any(any(row["values_old"]) for row in rows(copy, "buffers/round-2"))


def test_ppo_trains_a_critic_that_the_next_round_goes_on_with(copy):
    knobs = {"loss": "ppo", "ppo_epochs": 2}
    succeed(copy, "optimize@1", **knobs)
    critic = copy / "models" / "policy" / "1" / "trainer" / "critic"
    assert (critic / "model.safetensors").is_file()
    assert figures(copy, "optimize/1")["value_loss"] > 0
    assert figures(copy, "optimize/1")["epochs"] == 2
    for stage in ("rollout@2", "score@2", "optimize@2"):
        succeed(copy, stage, **knobs)
    values = [row["values_old"] for row in rows(copy, "buffers/round-2")]
    assert all(len(value) > 0 for value in values)
    again = copy / "models" / "policy" / "2" / "trainer" / "critic" / "model.safetensors"
    assert again.read_bytes() != (critic / "model.safetensors").read_bytes()


def test_an_evaluation_has_one_greedy_answer_and_the_sampled_ones_of_each_prompt(finished):
    found = rows(finished, "evaluations/sft")
    assert len(found) == 6 * 3
    assert [row["greedy"] for row in found[:3]] == [True, False, False]
    assert [row["sample"] for row in found[:3]] == [0, 0, 1]
    numbers = figures(finished, "evaluate/sft")
    sampled = [row for row in found if not row["greedy"]]
    accuracy = sum(row["correct"] for row in sampled) / len(sampled)
    assert numbers["accuracy_sampled"] == pytest.approx(accuracy)
    for row in found:
        assert row["correct"] == (row["completion"].strip() == row["answer"])


def test_every_policy_is_asked_the_same_questions_with_the_same_draws(finished, copy):
    shutil.copytree(copy / "models" / "sft", copy / "models" / "twin")
    options = {"--policy": "models/twin", "--out": "data/evaluations/again.parquet"}
    succeed(copy, "evaluate@1", options | {"--figures": "data/figures/again.json"})
    assert rows(copy, "evaluations/again") == rows(finished, "evaluations/sft")


def test_the_report_has_a_line_for_every_round_and_for_the_sft_policy(finished):
    table = json.loads((finished / "plots" / "rounds.json").read_text())
    assert [row["round"] for row in table] == [0, 1, 2]
    for row in table[1:]:
        k = row["round"]
        assert row["reward"] == figures(finished, f"score/{k}")["reward"]
        found = figures(finished, f"evaluate/{k}")["accuracy_sampled"]
        assert row["accuracy_sampled"] == found
        answers = [a for a in rows(finished, f"evaluations/round-{k}") if not a["greedy"]]
        right = {a["prompt_index"] for a in answers if a["correct"]}
        assert row["accuracy_best"] == len(right) / 6
    assert table[0]["reward"] is None  # DVC would draw an empty field of a CSV as 0
    assert len(curve(finished / "plots" / "steps.csv")) == 4
    metrics = json.loads((finished / "metrics" / "round-2.json").read_text())
    assert metrics["reward"] == figures(finished, "score/2")["reward"]
    summary = json.loads((finished / "metrics" / "summary.json").read_text())
    gain = table[2]["accuracy_sampled"] - table[0]["accuracy_sampled"]
    assert summary["accuracy_gain"] == gain and summary["final_reward"] == metrics["reward"]
    assert set(os.listdir(finished / "metrics")) == {
        "training.json",
        "summary.json",
        *(f"round-{k}.json" for k in (0, 1, 2)),
    }


def test_the_page_shows_every_round_its_groups_and_the_knobs(finished):
    text = (finished / "reports" / "index.html").read_text(encoding="utf-8")
    assert os.listdir(finished / "reports") == ["index.html"]
    for number, start in SMALL["rounds"].items():
        assert f'<summary>Round {number} <span class="soft">{start}</span>' in text
    assert "<code>sft.train_batch_size</code><span>8</span>" in text
    assert str(finished) not in text and str(ROOT) not in text
    answers = rows(finished, "evaluations/round-2")
    assert any(visible(row["completion"], 160) in html.unescape(text) for row in answers)


def test_a_branch_and_a_run_without_reference_or_reward_model_have_a_page(copy):
    knobs = {
        "rounds": {"1": "models/sft", "2": "models/sft"},
        "beta": 0,
        "critic": None,
        "rewards__reward_model": None,
    }
    for k in (1, 2):
        for stage in ("score", "optimize", "evaluate"):
            options = {"--policy": "models/sft"} if stage != "evaluate" else {}
            succeed(copy, f"{stage}@{k}", options, **knobs)
    succeed(copy, "report", **knobs)
    text = (copy / "reports" / "index.html").read_text(encoding="utf-8")
    assert "KL to sampler" in text and "Reward model&#39;s score" not in text


def test_trackers_see_a_training_and_change_no_byte_of_it(finished, copy, monkeypatch):
    monkeypatch.setenv(TRACK, "tensorboard")
    for stage in ("train_sft", "train_rm", "optimize@1"):
        succeed(copy, stage)
    for path in ("models/sft", "models/rm", "models/policy/1", "data/curves", "data/figures"):
        for file in files(copy / path):
            assert file.read_bytes() == (finished / file.relative_to(copy)).read_bytes(), file
    runs = sorted(path.name.rsplit("-", 2)[0] for path in (copy / "runs").iterdir())
    assert runs == ["optimize-1", "train_rm", "train_sft"]


def test_an_unknown_tracker_stops_a_training_before_it_begins(copy, monkeypatch):
    monkeypatch.setenv(TRACK, "notebook")
    for stage in ("train_sft", "train_rm", "optimize@1"):
        assert f"{TRACK}: found 'notebook'" in refuse(copy, stage)


def test_the_report_goes_by_the_rounds_and_not_by_the_files_that_lie_about(copy):
    rounds = {"2": "models/sft"}
    succeed(copy, "report", rounds=rounds)
    table = json.loads((copy / "plots" / "rounds.json").read_text())
    assert [row["round"] for row in table] == [0, 2]
    names = ("round-0", "round-2", "summary", "training")
    assert sorted(os.listdir(copy / "metrics")) == [f"{name}.json" for name in names]
    message = refuse(copy, "report", rounds={"1": "models/sft", "3": "models/policy/1"})
    assert "data/figures/evaluate/3.json: missing" in message


def test_the_order_of_rounds_in_the_params_changes_nothing(copy, monkeypatch):
    before = (copy / "reports" / "index.html").read_bytes()
    backwards = dict(reversed(SMALL["rounds"].items()))
    load = params.load
    monkeypatch.setattr(
        params, "load", lambda knobs: load(knobs).model_copy(update={"rounds": backwards})
    )
    succeed(copy, "report")
    assert (copy / "reports" / "index.html").read_bytes() == before


def test_a_report_of_answers_that_nothing_could_check_has_no_accuracy(copy):
    prompts = lines(copy / "data" / "task" / "heldout.jsonl")
    open_questions = copy / "data" / "source" / "open.jsonl"
    text = "".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in prompts)
    open_questions.write_text(text)
    knobs = {"evaluate__dataset": "data/source/open.jsonl", "evaluate__split": "train"}
    for stage in ("evaluate_sft", "evaluate@1", "evaluate@2"):
        succeed(copy, stage, **knobs)
    assert figures(copy, "evaluate/2")["accuracy_sampled"] is None
    succeed(copy, "report", **knobs)
    table = json.loads((copy / "plots" / "rounds.json").read_text())
    assert table[-1]["accuracy_sampled"] is None and table[-1]["accuracy_best"] is None


@pytest.mark.parametrize("stage", ORDER)
def test_a_stage_run_again_writes_the_same_bytes(finished, copy, stage):
    _, options = command_line(stage)
    outputs = [copy / path for path in options.values() if (copy / path).exists()]
    before = {p: p.read_bytes() for path in outputs for p in files(path)}
    succeed(copy, stage)
    assert {p: p.read_bytes() for path in outputs for p in files(path)} == before
    assert not list(copy.rglob(".*.partial"))


def files(path):
    return [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.is_file()]


# Sampling knobs.


@pytest.mark.parametrize(
    "knobs",
    [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}, {"top_p": 0.9, "top_k": 20, "min_p": 0.01}],
    ids=["top_p", "top_k", "min_p", "all"],
)
def test_a_narrowed_rollout_samples_other_text_and_keeps_whole_log_probs(finished, copy, knobs):
    succeed(copy, "rollout@1", **knobs)
    found = rows(copy, "rollouts/round-1")
    before = rows(finished, "rollouts/round-1")
    assert [r["completion_ids"] for r in found] != [r["completion_ids"] for r in before]
    succeed(copy, "score@1", **knobs)
    for row in rows(copy, "buffers/round-1"):
        assert row["log_probs_ref"] == pytest.approx(row["log_probs_old"], abs=1e-5)


def test_the_temperature_of_sampling_is_that_of_every_log_prob(copy):
    for stage in ("rollout@1", "score@1", "optimize@1"):
        succeed(copy, stage, temperature=0.7, train_batch_size=64)
    for row in rows(copy, "buffers/round-1"):
        assert row["log_probs_ref"] == pytest.approx(row["log_probs_old"], abs=1e-5)
    for row in rows(copy, "updates/round-1"):
        assert row["ratio_mean"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_the_batch_size_changes_no_sample(finished, copy, size):
    succeed(copy, "rollout@1", rollout_batch_size=size)
    found, before = rows(copy, "rollouts/round-1"), rows(finished, "rollouts/round-1")
    for row, other in zip(found, before, strict=True):
        assert row["completion_ids"] == other["completion_ids"]
        assert row["log_probs_old"] == pytest.approx(other["log_probs_old"], abs=1e-5)


def test_all_groups_dropped_by_dynamic_sampling_is_a_clear_failure(copy):
    (copy / "data" / "source" / "always_wrong.py").write_text("def check(*_):\n    return 0.0\n")
    message = refuse(copy, "rollout@1", verifier="always_wrong:check", dynamic_sampling=2)
    assert "all 8 groups were dropped by dynamic_sampling" in message
    assert "raise dynamic_sampling or num_rollouts" in message
    assert not (copy / "data" / "rollouts" / "round-1.parquet").exists()


def prompts_with_answers(folder, answers):
    """The task's prompts, the first `answers` of them with their answers and no other."""
    path = folder / "data" / "source" / "some.jsonl"
    found = lines(folder / "data" / "task" / "prompts.jsonl")[:4]
    kept = [
        {"prompt": r["prompt"]} | ({"answer": "x"} if i < answers else {})
        for i, r in enumerate(found)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return {"prompts__dataset": "data/source/some.jsonl", "verifier": "always_right:check"}


ALWAYS_RIGHT = "def check(text, answer, entry):\n    return None if answer is None else 1.0\n"


@pytest.mark.parametrize(("answers", "accuracy"), [(2, 1.0), (0, None)])
def test_n21_accuracy_is_over_what_can_be_scored(copy, answers, accuracy):
    (copy / "data" / "source" / "always_right.py").write_text(ALWAYS_RIGHT)
    knobs = prompts_with_answers(copy, answers)
    succeed(copy, "rollout@1", **knobs)
    assert figures(copy, "rollout/1")["accuracy"] == accuracy
    asked = {f"evaluate__{key.partition('__')[2]}": knobs[key] for key in ("prompts__dataset",)}
    verifier = {"verifier": knobs["verifier"], "evaluate__split": "train"}
    succeed(copy, "evaluate@1", **asked, **verifier)
    for name in ("accuracy_sampled", "accuracy_greedy", "reward_correctness"):
        assert figures(copy, "evaluate/1")[name] == accuracy


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (0, "all 4 groups were dropped by dynamic_sampling: their prompts have no answer that the"),
        (
            3,
            "1 have no answer that the verifier can check; expected prompts with answers; of the"
            " other 3 the completions are all right or all wrong; raise dynamic_sampling",
        ),
    ],
)
def test_n21_groups_that_nothing_can_score_are_not_called_right_or_wrong(copy, answers, expected):
    (copy / "data" / "source" / "always_right.py").write_text(ALWAYS_RIGHT)
    message = refuse(copy, "rollout@1", dynamic_sampling=1, **prompts_with_answers(copy, answers))
    assert expected in message
    assert (answers == 0) == ("all right or all wrong" not in message)


def test_n21_groups_without_any_reward_count_in_no_share(copy):
    """Of four groups one has no reward, one is all alike, two have spread."""

    def change(row):
        if row["group"] < 2:
            return {"reward": None if row["group"] == 0 else 0.5}
        return {"reward": float(row["sample"])}

    rewritten(copy, change)
    succeed(copy, "optimize@1")
    assert figures(copy, "optimize/1")["groups_without_spread"] == pytest.approx(1 / 3)


FIRST_SAMPLE_WINS = """
seen = {}

def check(text, answer, entry):
    count = seen[answer] = seen.get(answer, 0) + 1
    return float(count == 1 and answer[0] < "m")
"""


def test_a_short_buffer_says_so(copy):
    (copy / "data" / "source" / "first_wins.py").write_text(FIRST_SAMPLE_WINS)
    knobs = {"verifier": "first_wins:check", "dynamic_sampling": 1}
    output = succeed(copy, "rollout@1", **knobs)
    found = figures(copy, "rollout/1")
    assert found["groups_tried"] == 4 and 0 < found["groups_kept"] < 4
    assert found["groups_kept"] + found["groups_dropped"] == 4
    assert f"short buffer: {found['groups_kept']} of 4 groups after 4 tries" in output
    kept = rows(copy, "rollouts/round-1")
    assert len(kept) == 2 * found["groups_kept"]
    assert [row["group"] for row in kept] == [g for g in range(found["groups_kept"]) for _ in "ab"]
    succeed(copy, "score@1", **knobs)
    succeed(copy, "optimize@1", **knobs)


# Verifiers of one's own.


def test_greedy_answers_come_first_and_have_figures_of_their_own(copy):
    text = FIRST_SAMPLE_WINS.replace(' and answer[0] < "m"', "")
    (copy / "data" / "source" / "first_of_all.py").write_text(text)
    succeed(copy, "evaluate@1", verifier="first_of_all:check")
    found = figures(copy, "evaluate/1")
    assert (found["accuracy_greedy"], found["accuracy_sampled"]) == (1.0, 0.0)


def test_a_verifier_may_lie_under_data_source(copy):
    module = copy / "data" / "source" / "half_right.py"
    module.write_text("def check(text, answer, entry):\n    return len(answer) / 6\n")
    knobs = {"verifier": "half_right:check"}
    succeed(copy, "rollout@1", **knobs)
    assert {row["reward_correctness"] for row in rows(copy, "rollouts/round-1")} == {0.5}
    succeed(copy, "evaluate@1", **knobs)
    assert figures(copy, "evaluate/1")["reward_correctness"] == 0.5
    assert figures(copy, "evaluate/1")["accuracy_sampled"] == 0


@pytest.mark.parametrize("stage", ["rollout@1", "evaluate@1"])
def test_a_verifier_that_raises_stops_the_stage_with_the_row(copy, stage):
    module = copy / "data" / "source" / f"raises_in_{stage.partition('@')[0]}.py"
    module.write_text("def check(text, answer, entry):\n    raise KeyError('gold')\n")
    message = refuse(copy, stage, verifier=f"{module.stem}:check")
    assert f"the verifier '{module.stem}:check' raised KeyError('gold')" in message
    assert "prompt " in message


@pytest.mark.parametrize("stage", ["rollout@1", "evaluate@1"])
def test_a_verifier_that_gives_nan_stops_the_stage_with_the_row(copy, stage):
    module = copy / "data" / "source" / f"nan_in_{stage.partition('@')[0]}.py"
    module.write_text("def check(text, answer, entry):\n    return float('nan')\n")
    message = refuse(copy, stage, verifier=f"{module.stem}:check")
    assert "the score is nan, expected a finite number or None" in message
    assert "prompt " in message


@pytest.mark.parametrize(
    ("verifier", "expected"),
    [
        ("nowhere:check", "verifier: found 'nowhere:check', but neither data/source nor Python"),
        ("rules:chek", "verifier: found 'rules:chek', but module 'rules' defines no 'chek'"),
        ("broken:check", "verifier: found 'broken:check', but module 'broken' is no Python"),
        ("exakt", "verifier: found 'exakt'"),
        ("regex", "verifier_pattern: found None, expected a pattern with one group"),
    ],
)
def test_a_verifier_that_is_not_there_stops_the_first_stage(tmp_path, verifier, expected):
    source = tmp_path / "data" / "source"
    source.mkdir(parents=True)
    (source / "rules.py").write_text("raise SystemError('imported')\ndef check(t, a, e): pass\n")
    (source / "broken.py").write_text("def check(:")
    assert f"params.yaml: {expected}" in refuse(tmp_path, "prepare_task", verifier=verifier)


@pytest.mark.parametrize("stage", ["train_sft", "score@1"])
def test_a_model_with_nan_weights_is_refused_by_the_name_of_the_weight(copy, stage):
    folder = copy / "models" / ("base" if stage == "train_sft" else "rm")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight" if stage == "train_sft" else "score.weight"][..., 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "weight holds NaN or infinite weights, expected finite ones" in refuse(copy, stage)


def test_a_broken_format_pattern_stops_before_the_model_loads(copy):
    shutil.rmtree(copy / "models" / "sft")
    message = refuse(copy, "rollout@1", format_pattern="(")
    assert "params.yaml: format_pattern" in message


def test_an_overlong_buffer_above_the_cap_is_refused(copy):
    message = refuse(copy, "rollout@1", overlong_buffer=7)
    assert "params.yaml: overlong_buffer: found 7, expected at most max_new_tokens (6)" in message


# Missing and foreign input.

INPUTS = [
    ("tokenize_sft", "--task", "no such file"),
    ("tokenize_sft", "--base", "no tokenizer_config.json"),
    ("train_sft", "--data", "missing; expected a Parquet table"),
    ("train_sft", "--base", "no config.json"),
    ("tokenize_preferences", "--task", "no such file"),
    ("tokenize_preferences", "--base", "no tokenizer_config.json"),
    ("split_preferences", "--pairs", "missing; expected a Parquet table"),
    ("train_rm", "--train", "missing; expected a Parquet table"),
    ("train_rm", "--validation", "missing; expected a Parquet table"),
    ("train_rm", "--sft", "no config.json"),
    ("evaluate_sft", "--policy", "no tokenizer_config.json"),
    ("evaluate_sft", "--task", "no such file"),
    ("rollout@1", "--policy", "no tokenizer_config.json"),
    ("rollout@1", "--task", "no such file"),
    ("score@1", "--rollouts", "missing; expected a Parquet table"),
    ("score@1", "--reward-model", "no config.json"),
    ("score@1", "--reference", "no config.json"),
    ("optimize@1", "--buffer", "missing; expected a Parquet table"),
    ("optimize@1", "--policy", "no config.json"),
    ("report", "--figures", "missing; expected a stage's figures"),
    ("report", "--curves", "missing; expected the curve of a stage"),
]


@pytest.mark.parametrize(("stage", "option", "expected"), INPUTS)
def test_a_missing_input_is_named_with_what_was_expected(copy, stage, option, expected):
    _, options = command_line(stage)
    ending = Path(options[option]).suffix
    message = refuse(copy, stage, {option: f"data/not/there{ending}"})
    assert f"data/not/there{ending}" in message or "data/not/there/" in message
    assert expected in message


FOREIGN = [
    ("tokenize_sft", "--task", "data/preferences/pairs.parquet", "pairs.parquet"),
    ("tokenize_preferences", "--task", "data/task/sft.jsonl", "data/task/sft.jsonl"),
    ("rollout@1", "--task", "data/sft.parquet", "data/sft.parquet"),
    ("train_sft", "--data", "data/preferences/pairs.parquet", "column 'input_ids' is missing"),
    ("train_sft", "--data", "data/task/sft.jsonl", "not a readable Parquet file"),
    ("train_sft", "--base", "models/rm", "expected a causal language model"),
    ("train_rm", "--train", "data/sft.parquet", "column 'prompt_ids' is missing"),
    ("split_preferences", "--pairs", "data/sft.parquet", "column 'prompt_ids' is missing"),
    ("score@1", "--rollouts", "data/sft.parquet", "column 'round' is missing"),
    ("score@1", "--rollouts", "data/buffers/round-1.parquet", "unexpected columns"),
    ("score@1", "--reward-model", "models/sft", "no weight 'score.weight'"),
    ("score@1", "--reference", "models/rm", "expected a causal language model"),
    ("optimize@1", "--buffer", "data/rollouts/round-1.parquet", "'reward_model' is missing"),
    ("optimize@1", "--policy", "models/rm", "expected a causal language model"),
    ("report", "--figures", "data/curves", "evaluate/sft.json: missing"),
]


@pytest.mark.parametrize(("stage", "option", "path", "expected"), FOREIGN)
def test_a_foreign_input_is_named_with_what_was_expected(copy, stage, option, path, expected):
    message = refuse(copy, stage, {option: path})
    assert path in message and expected in message


@pytest.mark.parametrize("stage", [stage for stage in ORDER if stage != "prepare_task"])
def test_a_bad_knob_stops_every_stage_before_it_reads_anything(tmp_path, stage):
    message = refuse(tmp_path, stage, lam=2.0)
    assert "params.yaml: lam: found 2.0; Input should be less than or equal to 1" in message


def test_a_base_model_that_dvc_does_not_see_change_is_told(copy):
    (copy / "models" / "source").mkdir()
    (copy / "models" / "source" / "link").symlink_to(copy / "models" / "sft")
    for source in ("models/sft", "models/source/link"):
        output = succeed(copy, "prepare_model", {"--out": "models/again"}, model__source=source)
        assert f"model.source: {source!r} lies outside models/source" in output


def test_a_model_folder_of_pickles_is_refused(copy):
    folder = copy / "models" / "sft"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    message = refuse(copy, "rollout@1")
    assert "models/sft: found pytorch_model.bin, and pickles are never read" in message


MODELS_READ = {
    "tokenize_sft": "models/base",
    "train_sft": "models/base",
    "tokenize_preferences": "models/base",
    "train_rm": "models/sft",
    "evaluate_sft": "models/sft",
    "rollout@1": "models/sft",
    "score@1": "models/rm",
    "score@2": "models/sft",
    "optimize@1": "models/sft",
}


@pytest.mark.parametrize("stage", MODELS_READ)
def test_pickles_and_code_in_the_folder_of_a_stage_are_refused(copy, stage):
    folder = copy / MODELS_READ[stage]
    (folder / "optimizer.pt").write_bytes(b"\x80\x04.")
    message = refuse(copy, stage)
    assert f"{MODELS_READ[stage]}: found optimizer.pt, and pickles are never read" in message
    (folder / "optimizer.pt").unlink()
    bring_code(folder, copy / "ran")
    message = refuse(copy, stage)
    assert f"{MODELS_READ[stage]}: found {', '.join(CODE)}: code" in message
    assert "model.trust_remote_code: true would run the code" in message
    assert not (copy / "ran").exists()


def test_a_brought_model_with_pickles_is_refused_or_taken_as_the_knob_says(copy):
    source, options = copy / "models" / "source" / "mine", {"--out": "models/again"}
    shutil.copytree(copy / "models" / "sft", source)
    (source / "training_args.bin").write_bytes(b"\x80\x04.")
    knobs = {"model__source": "models/source/mine"}
    message = refuse(copy, "prepare_model", options, **knobs)
    assert "models/source/mine: found training_args.bin, and pickles are never read" in message
    assert "model.ignore_pickles: true would accept the folder" in message
    assert not (copy / "models" / "again").exists()
    succeed(copy, "prepare_model", options, **knobs, model__ignore_pickles=True)
    assert not (copy / "models" / "again" / "training_args.bin").exists()


@pytest.mark.usefixtures("modules_cache")
@pytest.mark.parametrize("critic", ["policy", "reward_model"])
def test_an_architecture_of_ones_own_goes_through_every_stage(copy, critic):
    source, marker = copy / "models" / "source" / "odd", copy / "ran"
    shutil.copytree(copy / "models" / "base", source)
    bring_code(source, marker)
    knobs = {"model__source": "models/source/odd", "loss": "ppo", "critic": critic}
    assert "model.trust_remote_code: true" in refuse(copy, "prepare_model", **knobs)
    assert not marker.exists()
    for stage in ORDER[1:]:
        succeed(copy, stage, **knobs, model__trust_remote_code=True)
    for folder in ("base", "sft", "rm", "policy/2", "policy/2/trainer/critic"):
        config = json.loads((copy / "models" / folder / "config.json").read_text())
        scores = folder in ("rm", "policy/2/trainer/critic")
        kind = "SequenceClassification" if scores else "CausalLM"
        assert config["architectures"] == [f"OddFor{kind}"]
        for name in CODE:
            code = (copy / "models" / folder / name).read_bytes()
            assert code == (source / name).read_bytes()


def test_an_unknown_task_or_option_of_it_is_named(tmp_path):
    message = refuse(tmp_path, "prepare_task", task__name="spell_bakward")
    assert "params.yaml: task.name: found 'spell_bakward', expected one of" in message
    message = refuse(tmp_path, "prepare_task", task__config={"min_word_length": 3})
    assert "params.yaml: task.config: spell_backward refuses it" in message
    assert not (tmp_path / "data" / "task").exists()


def test_a_device_that_is_absent_is_named(copy):
    if not torch.cuda.is_available():
        assert "params.yaml: device: found 'cuda'" in refuse(copy, "rollout@1", device="cuda")


def test_a_cap_that_leaves_no_room_for_a_prompt_is_named(copy):
    message = refuse(copy, "rollout@1", max_new_tokens=96)
    assert "params.yaml: max_new_tokens: found 96, but the model has only 96 positions" in message


def test_rows_that_are_dropped_are_counted_by_reason_and_printed(copy):
    path = copy / "data" / "source" / "mixed.jsonl"
    good = (copy / "data" / "task" / "sft.jsonl").read_text().splitlines()[:3]
    bad = json.dumps({"messages": [{"role": "user", "content": "no answer"}]})
    path.write_text("\n".join([*good, bad, bad]) + "\n")
    output = succeed(copy, "tokenize_sft", sft__dataset="data/source/mixed.jsonl")
    found = figures(copy, "tokenize_sft")
    assert (found["rows"], found["kept"], found["dropped"]) == (5, 3, 2)
    assert sum(found["dropped_by_reason"].values()) == 2
    assert "data/source/mixed.jsonl: dropped 2 rows: " in output and "(first: row 4)" in output
    path.write_text(bad + "\n")
    message = refuse(copy, "tokenize_sft", sft__dataset="data/source/mixed.jsonl")
    assert "no row was kept of 1" in message


SOURCES = ("sft", "preferences", "prompts", "evaluate")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"nothing": "known"}', "no {kind} format fits the columns [nothing]"),
        ('{"prompt": " ", "completion": "a", "chosen": "a", "rejected": "b"}', "no usable row"),
        ('{"prompt": ', "1: broken JSON"),
        ("", "is empty"),
    ],
)
def test_datasets_that_no_stage_can_read_are_found_before_anything_trains(copy, line, reason):
    (copy / "data" / "source" / "odd.jsonl").write_text(line and line + "\n")
    knobs = {f"{section}__dataset": "data/source/odd.jsonl" for section in SOURCES}
    told = refuse(copy, "prepare_task", **knobs).splitlines()
    assert told[0] == "Error: stage prepare_task: bad datasets"
    for section, text in zip(SOURCES, told[1:5], strict=True):
        kind = {"evaluate": "prompts"}.get(section, section)
        assert text.startswith(f"  {section}: data/source/odd.jsonl:")
        assert reason.format(kind=kind) in text


@pytest.mark.parametrize("knob", ["name", "revision", "split"])
def test_a_knob_of_hub_datasets_is_refused_for_a_file_before_anything_trains(copy, knob):
    shutil.copy(copy / "data/task/prompts.jsonl", copy / "data/source/mine.jsonl")
    given = {"evaluate__dataset": "data/source/mine.jsonl", f"evaluate__{knob}": "dev"}
    message = refuse(copy, "prepare_task", **given)
    assert "\n  evaluate: data/source/mine.jsonl: " in message and "'dev'" in message


def test_datasets_that_can_be_read_leave_the_task_as_it_was(copy):
    before = {path: path.read_bytes() for path in (copy / "data" / "task").iterdir()}
    for name in ("sft", "preferences", "prompts"):
        shutil.copy(copy / "data" / "task" / f"{name}.jsonl", copy / "data" / "source")
    names = {"evaluate": "prompts"}
    given = {f"{s}__dataset": f"data/source/{names.get(s, s)}.jsonl" for s in SOURCES}
    output = succeed(copy, "prepare_task", **given)
    assert output.count(": rows in format") == 4
    assert before == {path: path.read_bytes() for path in (copy / "data" / "task").iterdir()}


def test_a_template_that_takes_no_notice_of_tools_is_said_once_with_the_rows(copy):
    tools = [{"type": "function", "function": {"name": "f"}}]
    for stage, kind, knob in (
        ("tokenize_sft", "sft", "sft__dataset"),
        ("tokenize_preferences", "preferences", "preferences__dataset"),
        ("rollout@1", "prompts", "prompts__dataset"),
    ):
        path = copy / "data" / "source" / f"{kind}.jsonl"
        lines = (copy / "data" / "task" / f"{kind}.jsonl").read_text().splitlines()[:40]
        told = [json.dumps(json.loads(line) | {"tools": tools}) for line in lines[:4]]
        path.write_text("\n".join([*told, *lines[4:]]) + "\n")
        output = succeed(copy, stage, **{knob: f"data/source/{kind}.jsonl"})
        found = figures(copy, stage.replace("@", "/"))
        assert found.get("prompts", found)["tools_unseen"] == 4
        assert output.count("takes no notice of the tools of 4 rows") == 1


def test_a_call_that_the_template_leaves_out_drops_the_row_in_its_stage(copy):
    path = copy / "data" / "source" / "calls.jsonl"
    good = (copy / "data" / "task" / "sft.jsonl").read_text().splitlines()[0]
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    turns = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "seen"}]
    answered = [*turns, {"role": "assistant", "content": "a"}]
    path.write_text("\n".join([good, json.dumps({"messages": answered})]) + "\n")
    succeed(copy, "tokenize_sft", sft__dataset="data/source/calls.jsonl")
    found = figures(copy, "tokenize_sft")
    assert found["dropped_by_reason"] == {"the chat template does not show tool calls": 1}
    assert (found["rows"], found["kept"]) == (2, 1)


# Numbers that are not finite.

# At this rate one step takes the weights so far that the next loss overflows.
EXPLODING = {"sft__lr": 1e30, "rm__lr": 1e30, "lr": 1e30, "lr_critic": 1e30}
EXPLODING |= {"sft__warmup_steps": 0, "rm__warmup_steps": 0, "warmup_steps": 0}
TRAINED = {"train_sft": "models/sft", "train_rm": "models/rm", "optimize@1": "models/policy/1"}


@pytest.mark.parametrize("stage", TRAINED)
def test_a_loss_that_is_not_finite_ends_with_exit_code_1_and_no_model(copy, stage):
    output = copy / TRAINED[stage]
    shutil.rmtree(output)
    message = refuse(copy, stage, **EXPLODING)
    assert "is nan; nonfinite: stop. Nothing was saved" in message or "is inf; nonf" in message
    assert not output.exists() and not list(output.parent.glob(".*"))


@pytest.mark.parametrize("stage", TRAINED)
def test_a_loss_that_is_not_finite_may_be_left_out_and_is_counted(copy, stage):
    succeed(copy, stage, nonfinite="skip", **EXPLODING)
    name = stage.replace("@", "/")
    assert figures(copy, name)["skipped"] >= 1
    weights = load_file(copy / TRAINED[stage] / "model.safetensors")
    assert all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize("stage", TRAINED)
def test_a_start_without_a_tokenizer_is_told_before_anything_trains(copy, stage):
    start = copy / "models" / ("base" if stage == "train_sft" else "sft")
    (start / "tokenizer.json").unlink()
    (copy / "data" / "curves").rename(copy / "data" / "before")
    message = refuse(copy, stage)
    assert f"models/{start.name}: no tokenizer.json; expected a model folder" in message
    assert not (copy / "data" / "curves").exists()


@pytest.mark.parametrize("stage", TRAINED)
def test_a_model_of_nan_is_never_saved_even_where_every_loss_is_left_out(copy, stage):
    output = copy / TRAINED[stage]
    shutil.rmtree(output)
    start = copy / "models" / ("base" if stage == "train_sft" else "sft")
    weights = load_file(start / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.nan)
    save_file(weights, start / "model.safetensors", {"format": "pt"})
    refuse(copy, stage, nonfinite="skip")
    assert not output.exists() and not list(output.parent.glob(".*"))


def test_a_buffer_that_makes_the_loss_infinite_ends_with_the_row_and_no_model(copy):
    """The reference finds a token sure that the policy does not: k3 overflows."""
    shutil.rmtree(copy / "models" / "policy" / "1")

    def change(row):
        chosen = (row["group"], row["sample"]) == (2, 1)
        return {"log_probs_ref": [0.0 if chosen else -1e6] * len(row["log_probs_ref"])}

    rewritten(copy, change)
    policy = copy / "models" / "sft" / "model.safetensors"
    weights = load_file(policy)
    weights["model.norm.weight"] *= 1e4  # sampled tokens at less than e^-88
    save_file(weights, policy, {"format": "pt"})
    message = refuse(copy, "optimize@1")
    assert "group 2, sample 1: the loss is inf; nonfinite: stop. Nothing was saved" in message
    assert not (copy / "models" / "policy" / "1").exists()


EDITS = {
    "optimize@1": ("data/buffers/round-1.parquet", "data/buffers/round-1.parquet: its metadata"),
    "score@1": ("data/rollouts/round-1.parquet", "data/rollouts/round-1.parquet: its metadata"),
}


@pytest.mark.parametrize("stage", EDITS)
def test_n17_a_table_that_lost_its_metadata_is_refused_before_a_model_loads(copy, stage):
    path, expected = EDITS[stage]
    pq.write_table(pq.read_table(copy / path).slice(0, 4), copy / path)
    shutil.rmtree(copy / "models")
    message = refuse(copy, stage)
    assert f"{expected} lost 'provenance' with 'prompt_cursor'" in message


def edited(folder, name, schema, row_number, **changes):
    """A table with some columns of one row changed; its metadata stays."""
    path = folder / "data" / f"{name}.parquet"
    made, found = tables.read_provenance(path), rows(folder, name)
    found[row_number] |= changes
    tables.write_table(path, schema, found, made)


WRONG = [
    ("optimize@1", "buffers/round-1", {"log_probs_ref": [-1.0] * 99}, "'log_probs_ref' has 99"),
    ("optimize@1", "buffers/round-1", {"log_probs_old": None}, "'log_probs_old' holds nan"),
    ("optimize@1", "buffers/round-1", {"prompt_ids": [9999]}, "holds the id 9999, but models/sft"),
    ("score@1", "rollouts/round-1", {"prompt_ids": [9999]}, "holds the id 9999, but models/rm"),
    ("score@1", "rollouts/round-1", {"prompt_ids": []}, "'prompt_ids' is empty"),
    ("train_rm", "preferences/train", {"chosen_ids": []}, "'chosen_ids' is empty"),
    ("train_rm", "preferences/validation", {"rejected_ids": [9999]}, "holds the id 9999"),
    ("train_sft", "sft", {"input_ids": [1, 9999], "labels": [1, 2]}, "holds the id 9999"),
    ("train_sft", "sft", {"labels": [1]}, "'labels' has 1 entries"),
    ("split_preferences", "preferences/pairs", {"chosen_ids": []}, "'chosen_ids' is empty"),
]
SCHEMAS = {"buffers": tables.BUFFERS, "rollouts": tables.ROLLOUTS, "sft": tables.SFT}


@pytest.mark.parametrize(("stage", "name", "changes", "expected"), WRONG)
def test_n17_numbers_that_no_stage_wrote_are_refused_by_file_and_row(
    copy, stage, name, changes, expected
):
    schema = SCHEMAS.get(name.partition("/")[0], tables.PAIRS)
    if changes == {"log_probs_old": None}:
        length = len(rows(copy, name)[3]["log_probs_old"])
        changes = {"log_probs_old": [float("nan")] * length}
    edited(copy, name, schema, 3, **changes)
    message = refuse(copy, stage)
    assert f"data/{name}.parquet: row 3: " in message and expected in message


def test_a_rollout_without_rows_is_refused(copy):
    path = copy / "data" / "rollouts" / "round-1.parquet"
    tables.write_table(path, tables.ROLLOUTS, [], tables.read_provenance(path))
    assert "round-1.parquet: no rows" in refuse(copy, "score@1")


def test_an_old_policy_stays_where_its_update_fails(copy):
    before = files(copy / "models" / "policy" / "1")
    contents = [path.read_bytes() for path in before]
    table = (copy / "data" / "updates" / "round-1.parquet").read_bytes()
    refuse(copy, "optimize@1", **EXPLODING)
    assert files(copy / "models" / "policy" / "1") == before
    assert [path.read_bytes() for path in before] == contents
    assert (copy / "data" / "updates" / "round-1.parquet").read_bytes() == table


# What a buffer must bring.


def test_a_buffer_without_reference_or_values_is_refused_where_they_are_needed(copy):
    succeed(copy, "score@1", beta=0.0, critic=None)
    message = refuse(copy, "optimize@1")
    assert "column 'log_probs_ref' is null, but beta is 0.01" in message
    message = refuse(copy, "optimize@1", beta=0.0, loss="ppo")
    assert "column 'values_old' is null" in message


def rewritten(folder, change):
    path = folder / "data" / "buffers" / "round-1.parquet"
    made = tables.read_provenance(path)
    found = [row | change(row) for row in rows(folder, "buffers/round-1")]
    tables.write_table(path, tables.BUFFERS, found, made)


def test_an_unscorable_completion_counts_nowhere_and_is_counted(copy):
    rewritten(copy, lambda row: {"reward": None} if row["group"] == 1 else {})
    succeed(copy, "optimize@1")
    assert figures(copy, "optimize/1")["unscorable"] == 2
    updates = rows(copy, "updates/round-1")
    assert [row["used"] for row in updates] == [row["group"] != 1 for row in updates]
    assert [row["reward_shaped"] is None for row in updates] == [r["group"] == 1 for r in updates]
    assert all(set(row["advantage"]) == {0.0} for row in updates if not row["used"])


def test_a_buffer_without_any_reward_or_row_is_a_clear_failure(copy):
    rewritten(copy, lambda row: {"reward": None})
    assert "no completion has a reward" in refuse(copy, "optimize@1")
    path = copy / "data" / "buffers" / "round-1.parquet"
    tables.write_table(path, tables.BUFFERS, [], tables.read_provenance(path))
    assert "no rows; expected" in refuse(copy, "optimize@1")


def test_equal_rewards_give_advantages_of_exactly_0(copy):
    rewritten(copy, lambda row: {"reward": 0.1})
    succeed(copy, "optimize@1")
    assert {value for row in rows(copy, "updates/round-1") for value in row["advantage"]} == {0.0}
    assert figures(copy, "optimize/1")["groups_without_spread"] == 1


# What comes from outside: a disk that is full, text of any kind.


@contextmanager
def files_of_at_most(size):
    """As on a full disk: writing more into a file fails (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def tree(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("stage", ORDER)
def test_a_full_disk_is_named_with_the_output_and_nothing_is_lost(copy, stage):
    write(copy / "params.yaml", small_params())
    before = tree(copy)
    message = refuse(copy, stage, around=files_of_at_most(64))
    # optimize and the trainers lay out their table in a temporary file first
    outputs = [path for option, path in command_line(stage)[1].items() if option in WRITES]
    assert "File too large: '" in message
    assert any(f"{path}'" in message for path in [*outputs, "rows.arrow"])
    assert tree(copy) == before


WRITES = ("--out", "--figures", "--train", "--validation", "--updates", "--curve", "--metrics")

HOSTILE = '\'; touch pwned; "$(touch pwned)" `touch pwned` & <script>alert(1)</script> \x1b[2J\r\n'
NAME = "data/source/a b;$(touch pwned)'\"<b>\nError: x.jsonl"


def test_text_and_file_names_of_any_kind_do_no_harm(tmp_path):
    (tmp_path / "data" / "source").mkdir(parents=True)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    row = {
        "prompt": HOSTILE + "{n}",
        "completion": HOSTILE,
        "chosen": HOSTILE + "yes",
        "rejected": HOSTILE + "no",
        "answer": HOSTILE,
    }
    kinds = {
        "sft": ("prompt", "completion"),
        "preferences": ("prompt", "chosen", "rejected"),
        "prompts": ("prompt", "answer"),
        "evaluate": ("prompt", "answer"),
    }
    knobs = {"model__max_positions": 512, "verifier": "exact", "evaluate__split": "train"}
    for section, columns in kinds.items():
        path = tmp_path / NAME.replace("x.", f"{section}.")
        many = [{c: row[c].replace("{n}", str(n)) for c in columns} for n in range(12)]
        path.write_text("".join(json.dumps(line) + "\n" for line in [*many, {"odd": HOSTILE}]))
        knobs[f"{section}__dataset"] = str(path.relative_to(tmp_path))
    for stage in ORDER:
        output = succeed(tmp_path, stage, **knobs)
        assert not [line for line in output.splitlines() if line.startswith("Error")], output
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", output), repr(output)
    assert not list(tmp_path.rglob("pwned"))
    asked = rows(tmp_path, "evaluations/round-2")
    assert {HOSTILE in one["prompt"] for one in asked} == {True}
    assert "<script>alert" not in (tmp_path / "reports" / "index.html").read_text()
    for table in [*(tmp_path / "plots").glob("*.csv"), *(tmp_path / "metrics").glob("*")]:
        assert "touch" not in table.read_text()


@pytest.mark.parametrize("loss", sorted(OBJECTIVES))
def test_tables_have_one_schema_whatever_the_objective(finished, copy, loss):
    rewards = {"correctness": 1.0, "format": None, "length": None, "reward_model": None}
    if OBJECTIVES[loss].pairs:
        rewards["reward_model"] = 1.0  # this policy gets nothing right: rewards all alike
    succeed(copy, "score@1", loss=loss, rewards=rewards)
    succeed(copy, "optimize@1", loss=loss, rewards=rewards)
    for table in ("data/buffers/round-1.parquet", "data/updates/round-1.parquet"):
        assert pq.read_schema(copy / table).equals(pq.read_schema(finished / table))


def test_the_number_of_files_does_not_grow_with_the_rows(finished, tmp_path):
    (tmp_path / "data" / "source").mkdir(parents=True)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    knobs = {"task__sft_rows": 120, "task__preference_rows": 120, "task__prompt_rows": 60}
    knobs |= {"task__heldout_rows": 60, "prompts_per_step": 40, "num_rollouts": 4}
    knobs["task__config"] = {"min_word_len": 3, "max_word_len": 8}
    for stage in ORDER:
        succeed(tmp_path, stage, **knobs)
    names = [{str(p.relative_to(root)) for p in tree(root)} for root in (finished, tmp_path)]
    assert names[0] == names[1]
