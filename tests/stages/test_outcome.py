"""A reward model of kind outcome, through files: what it learns, what it shows, what is refused."""

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from stages.base import command
from stages.base.environment import SAVE_MINUTES, SCRATCH
from stages.base.tables import BUFFERS, LABELLED, PAIRS, ROLLOUTS, write_table
from stages.base.tokenizers import load_tokenizer
from stages.models.checkpoints import load_scorer
from stages.models.scorers import scores
from stages.reward.labelled import open_completions
from stages.tokenize_labelled import tokenize_labelled
from stages.train_rm import outcome_loss, train_rm
from stages.training import saving
from tests.helpers.cuts import Cut, cutting
from tests.helpers.models import (
    buffer_row,
    byte_tokenizer,
    llama,
    llama_scorer,
    random_ids,
    saved,
    weights_of,
)
from tests.helpers.tiny import small_params, write
from tests.pipeline.running import content

RIGHT, WRONG = 7, 9  # the last token of a right, and of a wrong completion
CHANGES = {"rm__epochs": 8, "rm__train_batch_size": 4, "rm__lr": 5e-3, "rm__warmup_steps": 0}


def completion_rows(prompts: int = 12, samples: int = 4, **more) -> list[dict]:
    """Groups of two right and two wrong completions, which their last token gives away."""
    policy, rows = llama(), []
    for group in range(prompts):
        prompt, *starts = random_ids(group, 4, *[1 + (group + i) % 3 for i in range(samples)])
        for sample, start in enumerate(starts):
            right = sample % 2 == 0
            ids = [*start, RIGHT if right else WRONG]
            told = {"reward_correctness": 1.0 if right else 0.4} | more
            row = buffer_row(policy, prompt, ids, group=group, sample=sample, **told)
            rows.append(row)
    return rows


def as_rollouts(rows: list[dict]) -> list[dict]:
    return [{name: row[name] for name in ROLLOUTS.names} for row in rows]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with params.yaml, models/sft, held-out pairs and the rollouts of a round."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "stop_with_parent", lambda: None)
    threads = torch.get_num_threads()
    (tmp_path / "data" / "source").mkdir(parents=True)
    saved(tmp_path / "models" / "sft", llama(vocabulary=len(byte_tokenizer())))
    pairs = []
    for i in range(6):
        prompt, answer = random_ids(500 + i, 4, 2)
        sides = {"chosen_ids": [*answer, RIGHT], "rejected_ids": [*answer, WRONG]}
        pairs.append({"prompt_ids": prompt, "margin": 0.0} | sides)
    write_table(tmp_path / "validation.parquet", PAIRS, pairs, {})
    write_table(tmp_path / "rollouts.parquet", ROLLOUTS, as_rollouts(completion_rows()), {})
    set_knobs()
    yield tmp_path
    torch.set_num_threads(threads)


def set_knobs(**changes) -> None:
    write(Path("params.yaml"), small_params(**CHANGES | changes))


def train(out: str = "rm", table: str = "rollouts.parquet", kind: str = "outcome"):
    words = f"--kind {kind} --train {table} --validation validation.parquet --sft models/sft"
    words += f" --out models/{out} --curve {out}.csv --figures {out}.json"
    return CliRunner().invoke(train_rm, words.split())


def figures(name: str = "rm") -> dict:
    return json.loads(open(f"{name}.json").read())


@pytest.mark.parametrize("target", ["every_token", "last_token"])
def test_it_learns_which_completions_are_right_and_ranks_pairs_by_it(project, target):
    set_knobs(rm__target=target, rm__epochs=16)
    result = train()
    assert result.exit_code == 0, result.output
    found = figures()
    for name in ("outcome_auc", "outcome_ranking", "outcome_best"):
        assert found[name] == 1, found
    assert found["outcome_accuracy"] >= 0.75
    assert found["validation_accuracy"] == 1 and found["validation_pairs"] == 6
    # 12 prompts, 15 % of them held out, of 4 completions each, half of which are right.
    assert found["outcome_completions"] == 8 and found["outcome_right"] == 0.5
    assert found["steps"] == 16 * 10
    header, first, *_ = open("rm.csv").read().splitlines()
    step = dict(zip(header.split(","), first.split(","), strict=True))
    if target == "every_token":
        assert float(step["tokens"]) > 4
    else:
        assert float(step["completions"]) == 4  # those of a step, however long they are
    # What `score` reads: a logit above 0 where the completion is right.
    scorer = load_scorer(project / "models" / "rm", "sdpa", torch.device("cpu"))
    rows = completion_rows()
    ids = ([row[name] for row in rows] for name in ("prompt_ids", "completion_ids"))
    with torch.no_grad():
        given = scores(scorer, *ids)
    right = torch.tensor([row["reward_correctness"] == 1 for row in rows])
    assert ((given > 0) == right).float().mean() > 0.9


def test_two_runs_give_the_same_bytes_and_another_seed_does_not(project):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        set_knobs(seed=seed, rm__epochs=1)
        assert train(name).exit_code == 0
    a, b, c = ((project / "models" / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b != c
    assert figures("a") == figures("b")


@pytest.mark.parametrize("target", ["every_token", "last_token"])
def test_a_training_cut_off_goes_on_and_ends_at_the_bytes_of_an_undisturbed_one(
    project, monkeypatch, target
):
    set_knobs(rm__target=target, rm__epochs=1)
    monkeypatch.setenv(SAVE_MINUTES, "0.0000001")
    monkeypatch.delenv(SCRATCH, raising=False)
    assert train("whole").exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_state", cutting(4))
        assert isinstance(train("cut").exception, Cut)
    result = train("cut")
    assert "train_rm: goes on after step 4 (" in result.output, result.output
    assert content(project / "models" / "cut") == content(project / "models" / "whole")
    for ending in ("csv", "json"):
        cut, whole = (project / f"{name}.{ending}" for name in ("cut", "whole"))
        assert cut.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("target", ["every_token", "last_token"])
def test_micro_batches_change_no_gradient(target):
    rows = [
        {"prompt_ids": row["prompt_ids"], "completion_ids": row["completion_ids"], "label": i % 2}
        for i, row in enumerate(completion_rows(2))
    ]
    count = sum(len(r["completion_ids"]) for r in rows) if target == "every_token" else len(rows)

    def gradients(batches):
        scorer = llama_scorer()
        for batch in batches:
            outcome_loss(scorer, batch, count, target, []).backward()
        return [parameter.grad for parameter in scorer.parameters()]

    whole, parts = gradients([rows]), gradients([rows[:1], rows[1:5], rows[5:]])
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_over_all_tokens_of_plain_passes():
    scorer, right = llama_scorer(), []
    rows = [
        {"prompt_ids": [1, 2, 3], "completion_ids": [4, 5], "label": 1},
        {"prompt_ids": [3, 1], "completion_ids": [6, 2, 8, 5], "label": 0},
    ]
    found = outcome_loss(scorer, rows, 6, "every_token", right)
    total = agrees = 0.0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
            states = scorer.model(input_ids=ids).last_hidden_state
            for logit in scorer.score(states)[0, len(row["prompt_ids"]) :, 0].tolist():
                signed = logit if row["label"] else -logit
                total += math.log(1 + math.exp(-signed))
                agrees += signed > 0
    assert found.item() == pytest.approx(total / 6, rel=1e-5)
    assert right == [agrees]


def test_held_out_prompts_are_whole_and_the_same_for_the_same_seed(project):
    def split(seed):
        with open_completions(project / "rollouts.parquet", 0.3, seed) as sides:
            return [{tuple(side[i]["prompt_ids"]) for i in range(len(side))} for side in sides]

    train_side, held_out = split(1)
    assert not train_side & held_out and len(train_side) + len(held_out) == 12
    assert len(held_out) == 4 and split(1)[1] == held_out != split(2)[1]


def test_a_completion_that_was_not_scored_is_left_out(project):
    rows = as_rollouts(completion_rows())
    for row in rows[:4]:
        row["reward_correctness"] = None
    write_table(project / "some.parquet", ROLLOUTS, rows, {})
    with open_completions(project / "some.parquet", 0.5, 1) as sides:
        assert sum(map(len, sides)) == len(rows) - 4


def test_of_a_buffer_the_score_that_stands_in_it_is_compared(project):
    """A rival that ranks every second prompt the wrong way round."""
    rows = completion_rows()
    for row in rows:
        right = row["reward_correctness"] == 1
        row["reward_model"] = float(right == (row["group"] % 2 == 0))
    write_table(project / "buffer.parquet", BUFFERS, rows, {})
    set_knobs(rm__held_out_share=0.99)
    assert train(table="buffer.parquet").exit_code == 0
    found = figures()
    held_out = found["outcome_completions"] // 4
    assert held_out == 11
    assert found["buffer_ranking"] == found["buffer_best"]
    assert found["buffer_ranking"] in (pytest.approx(5 / 11), pytest.approx(6 / 11))
    assert found["buffer_auc"] == pytest.approx(found["buffer_ranking"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward_correctness": None}, "no row has a 'reward_correctness'"),
        ({"reward_correctness": 1.0}, "every completion is right; expected right and wrong ones"),
        ({"reward_correctness": 0.5}, "every completion is wrong; expected right and wrong ones"),
        ({"prompt_ids": [1, 2]}, "all completions have one prompt; expected at least two prompts"),
        (
            {"completion_ids": [9999], "log_probs_old": [-1.0]},
            "holds the id 9999, but models/sft knows",
        ),
    ],
)
def test_completions_of_which_nothing_can_be_learned_are_refused(project, change, message):
    rows = [row | change for row in as_rollouts(completion_rows())]
    write_table(project / "bad.parquet", ROLLOUTS, rows, {})
    refused(train(table="bad.parquet"), f"bad.parquet: {message}")


def refused(result, message: str) -> None:
    assert result.exit_code == 1 and "Traceback" not in result.output
    lines = [line for line in result.output.splitlines() if line.startswith("Error: stage ")]
    assert len(lines) == 1 and all(part in lines[0] for part in message.split(": ")), lines


def test_a_label_that_is_neither_0_nor_1_is_named_by_its_row(project):
    rows = [{"prompt_ids": [i], "completion_ids": [1], "label": float(i)} for i in range(3)]
    write_table(project / "bad.parquet", LABELLED, rows, {})
    refused(train(table="bad.parquet"), "bad.parquet: row 2: 'label' holds 2.0, expected 0 or 1")


def test_a_table_of_another_kind_is_refused(project):
    message = "validation.parquet: its columns are ['prompt_ids', 'chosen_ids'"
    refused(train(table="validation.parquet"), message)
    result = train(kind="bradley_terry")
    refused(result, "rollouts.parquet: column 'chosen_ids' is missing")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rm__kind": "outcome"}, "kind outcome expects a table such as data/rollouts/round-1"),
        ({"rm__data": "data/rollouts/round-1.parquet"}, "kind bradley_terry expects data/pref"),
        (
            {"rm__kind": "outcome", "rm__data": "data/rollouts/round-9.parquet"},
            "rm.data is 'data/rollouts/round-9.parquet', but rounds has no '9'",
        ),
        (
            {"reward_models": {"o": {"kind": "outcome", "data": "data/labelled/x.parquet"}}},
            "reward_models.o.data is 'data/labelled/x.parquet', but labelled has no 'x'",
        ),
        ({"reward_models": {"o": {"kind": "outcome", "data": "x.csv"}}}, "data is 'x.csv'"),
        ({"reward_models": {"o": {"kind": "orm", "data": "x.csv"}}}, "'bradley_terry' or 'outc"),
        ({"reward_models": {"1": {"kind": "outcome", "data": "x"}}}, "reward_models: found '1'"),
        ({"best_of_n": {"o": "models/reward/o"}}, "is 'models/reward/o'; expected models/rm"),
        ({"best_of_n": {"1": "models/rm"}}, "best_of_n: found '1'"),
        ({"labelled": {"x": "elsewhere.jsonl"}}, "expected a file under data/source"),
        ({"labelled": {"1": "data/source/x.jsonl"}}, "key '1' is no name"),
    ],
)
def test_knobs_that_do_not_fit_are_told_before_anything_runs(project, changes, message):
    set_knobs(**changes)
    result = train("never")
    assert result.exit_code == 1 and message in result.output, result.output
    assert not (project / "models" / "never").exists()


def labelled(project, lines: list[dict]):
    file = project / "data" / "source" / "mine.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = "--rows data/source/mine.jsonl --base models/sft --out mine.parquet"
    return CliRunner().invoke(tokenize_labelled, [*words.split(), "--figures", "mine.json"])


LINES = [
    {"prompt": "say a", "completion": "a", "label": True},
    {"prompt": "say a", "completion": "b", "label": False},
    {"prompt": "say b", "completion": "b", "label": True},
    {"prompt": "say c", "completion": "", "label": False},
]


def test_labelled_rows_of_a_file_become_ids_and_train_a_model(project):
    result = labelled(project, LINES)
    assert result.exit_code == 0, result.output
    table = pq.read_table(project / "mine.parquet").to_pylist()
    tokenizer = load_tokenizer(project / "models" / "sft")
    assert [row["label"] for row in table] == [1, 0, 1]
    for row, line in zip(table, LINES, strict=False):
        turns = [
            {"role": "user", "content": line["prompt"]},
            {"role": "assistant", "content": line["completion"]},
        ]
        opened = tokenizer.apply_chat_template(
            turns[:1], add_generation_prompt=True, return_dict=False
        )
        assert row["prompt_ids"] == opened
        assert (
            tokenizer.decode(row["completion_ids"], skip_special_tokens=True) == line["completion"]
        )
    found = figures("mine")
    assert found["kept"] == 3 and found["dropped"] == 1 and found["right"] == 2
    before = weights_of(llama(vocabulary=len(tokenizer)))
    assert train(table="mine.parquet").exit_code == 0
    after = load_file(project / "models" / "rm" / "model.safetensors")
    assert any(not torch.equal(after[name], w) for name, w in before.items() if name in after)


@pytest.mark.parametrize("value", [0.5, 2, -1])
def test_a_file_with_another_label_is_refused_by_row(project, value):
    rows = [line | {"label": int(line["label"])} for line in LINES]
    assert labelled(project, rows).exit_code == 0
    message = f"data/source/mine.jsonl: row 5: label is {value!r}, expected 0 or 1, false or true"
    refused(labelled(project, [*rows, LINES[0] | {"label": value}]), message)
