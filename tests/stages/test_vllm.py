"""Stage `rollout` with `sampler: vllm`: its table, its bytes, and what it refuses."""

import math

import pytest
import torch

from stages.base.environment import VLLM
from stages.base.tables import ROLLOUTS, iterate_rows, read_provenance
from tests.helpers import fake_vllm
from tests.helpers.models import byte_tokenizer, llama, saved
from tests.helpers.stage import figures, refuse, succeed

STOPS = 250  # ids from here on end an answer
TABLE = "data/rollouts/round-1.parquet"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A task and a policy that finds all ids equally likely, as the stand-in for vLLM does."""
    (tmp_path / "data" / "source").mkdir(parents=True)
    succeed(tmp_path, "prepare_task")
    tokenizer = byte_tokenizer()
    policy = llama(vocabulary=len(tokenizer), tied=False)
    torch.nn.init.zeros_(policy.lm_head.weight)
    policy.generation_config.eos_token_id = list(range(STOPS, len(tokenizer)))
    saved(tmp_path / "models" / "sft", policy, tokenizer)
    monkeypatch.setenv(VLLM, fake_vllm.interpreter(tmp_path))
    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path / "scratch"))
    return tmp_path


def test_a_rollout_by_vllm_has_both_log_probs_and_the_same_bytes_again(folder):
    assert "vLLM fake, engines: 1" in succeed(folder, "rollout@1", sampler="vllm")
    rows, size = list(iterate_rows(folder / TABLE, ROLLOUTS)), len(byte_tokenizer())
    assert len(rows) == 8 and {row["finished"] for row in rows} == {True, False}
    for row in rows:
        evenly = pytest.approx([-math.log(size)] * len(row["completion_ids"]), rel=1e-5)
        assert row["log_probs_sampler"] == evenly and row["log_probs_old"] == evenly
        assert row["finished"] == (row["completion_ids"][-1] >= STOPS)
    assert read_provenance(folder / TABLE)["sampler"] == "vllm"
    assert figures(folder, "rollout/1")["groups_kept"] == 4
    first = (folder / TABLE).read_bytes()
    succeed(folder, "rollout@1", sampler="vllm")
    assert (folder / TABLE).read_bytes() == first


def test_our_own_sampler_leaves_the_column_null_and_needs_no_vllm(folder, monkeypatch):
    monkeypatch.delenv(VLLM)
    succeed(folder, "rollout@1", sampler="own")
    rows = list(iterate_rows(folder / TABLE, ROLLOUTS))
    assert {row["log_probs_sampler"] for row in rows} == {None}
    assert "sampler" not in read_provenance(folder / TABLE)


def test_vllm_that_is_nowhere_stops_the_stage_in_one_line(folder, monkeypatch):
    monkeypatch.delenv(VLLM)
    assert "RLHF_VLLM: not set, but the knob sampler is vllm" in refuse(
        folder, "rollout@1", sampler="vllm"
    )
    assert not (folder / TABLE).exists()
