"""Every architecture comes out right, or `prepare_model` refuses it: the matrix of docs/models.md.

Each tiny random model goes through the stages. What they wrote is held against transformers' own
forward passes over single rows, unpadded and without a cache, and against its `generate`.
"""

import re
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.base.tokenizers import load_tokenizer
from stages.models.checkpoints import load_scorer
from tests.helpers.architectures import ARCHITECTURES, seeded
from tests.helpers.models import byte_tokenizer, plain_log_probs
from tests.helpers.stage import refuse, succeed
from tests.helpers.tiny import ROOT

TOLERANCE = 1e-4
TELLING = ("Mistral", "Mpt", "Qwen3Next", "Lfm2")
SMALL = {
    # words of unequal length, so that prompts are padded
    "task__config": {"min_word_len": 3, "max_word_len": 8},
    "task__sft_rows": 8,
    "task__preference_rows": 10,
    "task__prompt_rows": 6,
    "task__heldout_rows": 3,
    "model__source": "models/source/m",
    "temperature": 0.7,
    "critic": "policy",
    "prompts_per_step": 5,
    "train_batch_size": 10,
    "evaluate__samples": 1,
    "sft__lr": 1e-2,
}


def matrix() -> dict[str, tuple[str, str, str]]:
    """The table of docs/models.md: architecture -> (rows, attention, why)."""
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \| (.*?) *\|$", text, re.MULTILINE)
    return {name: tuple(rest) for name, *rest in cells}


WANTED = matrix()
REFUSED = [name for name, (rows, *_) in WANTED.items() if rows == "refused"]
RIGHT = [name for name in WANTED if name not in REFUSED]
EAGER = [name for name in RIGHT if WANTED[name][1] == "eager"]


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory):
    """A folder with the task's rows, tokenized: the tokenizer is the same for all."""
    folder = tmp_path_factory.mktemp("tokenized")
    (folder / "data" / "source").mkdir(parents=True)
    bring(folder, "Llama")
    stages = ("prepare_task", "prepare_model", "tokenize_sft", "tokenize_preferences")
    for stage in (*stages, "split_preferences"):
        succeed(folder, stage, **SMALL)
    shutil.rmtree(folder / "models")
    return folder


def bring(folder, name: str, **more):
    """Put a random model of an architecture where model.source of SMALL looks."""
    source, tokenizer = folder / "models" / "source" / "m", byte_tokenizer()
    # More than the tokenizer has: some classes of tokenizers add a token of their own.
    model = seeded(name, len(tokenizer) + 8, **more)
    model.generation_config.pad_token_id = None
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)


def test_the_page_lists_each_architecture_of_the_matrix():
    assert list(WANTED) == list(ARCHITECTURES) and len(WANTED) >= 30


def going(name: str):
    marks = () if name in TELLING else pytest.mark.slow
    return pytest.param(name, id=name, marks=marks)


@pytest.mark.parametrize("name", [going(name) for name in RIGHT])
def test_an_accepted_architecture_is_right_through_all_stages(name, tokenized, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(tokenized, folder)
    bring(folder, name)
    knobs = SMALL | {"attention": WANTED[name][1]}
    output = succeed(folder, "prepare_model", **knobs)
    assert f"rows {WANTED[name][0]}" in output
    for stage in ("train_sft", "train_rm", "rollout@1", "score@1", "optimize@1", "evaluate_sft"):
        succeed(folder, stage, **knobs)
    policy = plain(folder / "models" / "sft", knobs["attention"])
    check_buffer(folder, policy, knobs["attention"])
    check_greedy(folder, policy)
    assert plain(folder / "models" / "policy" / "1", knobs["attention"]).config.rlhf_route


def plain(folder, attention: str):
    """The folder as transformers alone loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    return model.float().eval()


def table(folder, name: str) -> list[dict]:
    return pq.read_table(folder / "data" / f"{name}.parquet").to_pylist()


@torch.no_grad()
def check_buffer(folder, policy, attention: str) -> None:
    """Log-probs, scores and first ratios of a round are those of plain passes over each row."""
    scorer = load_scorer(folder / "models" / "rm", attention, torch.device("cpu"))
    rows, updates = table(folder, "buffers/round-1"), table(folder, "updates/round-1")
    assert len({len(row["prompt_ids"]) for row in rows}) > 1
    for row, update in zip(rows, updates, strict=True):
        prompt, answer = row["prompt_ids"], row["completion_ids"]
        wanted = plain_log_probs(policy, prompt, answer, SMALL["temperature"])
        for column in ("log_probs_old", "log_probs_ref"):
            assert (torch.tensor(row[column]) - wanted).abs().max() < TOLERANCE, column
        hidden = scorer.base_model(torch.tensor([prompt + answer]), use_cache=False)[0][0, -1]
        assert scorer.score.bias is None
        score = float(scorer.score.weight[0] @ hidden)
        assert row["reward_model"] == pytest.approx(score, abs=TOLERANCE)
        assert update["ratio_max"] == pytest.approx(1.0, abs=TOLERANCE)


@torch.no_grad()
def check_greedy(folder, policy) -> None:
    """Greedy answers are those that `generate` gives to each prompt on its own."""
    tokenizer = load_tokenizer(folder / "models" / "sft")
    for row in table(folder, "evaluations/sft"):
        if row["greedy"]:
            ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            found = policy.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=6)
            assert found[0, len(ids) :].tolist() == row["completion_ids"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_architecture_is_refused_by_prepare_model_in_one_line(name, tokenized, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(tokenized, folder)
    bring(folder, name)
    message = refuse(folder, "prepare_model", **SMALL, attention=WANTED[name][1])
    assert "params.yaml: model.source: " in message and WANTED[name][2] in message
    assert not (folder / "models" / "base").exists()


@pytest.mark.parametrize("name", EAGER)
def test_an_attention_that_a_model_lacks_is_named_with_the_one_that_works(
    name, tokenized, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(tokenized, folder)
    bring(folder, name)
    message = refuse(folder, "prepare_model", **SMALL, attention="sdpa")
    assert "params.yaml: attention: found 'sdpa', but " in message
    assert "eager runs with every model" in message
