"""Sampling by vLLM: the protocol with stand-ins for it, and the real engine where there is one."""

import copy
import math
import os
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest
import torch
from transformers import LlamaForCausalLM

from stages.base.environment import VLLM, engine_variables, vllm
from stages.base.errors import InputError
from stages.base.knobs import Lora
from stages.base.randomness import derive
from stages.models.adapters import adapter_weights, add_adapters, save_adapters
from stages.rollouts.engine import Engine, Prompt
from stages.rollouts.sampling import Sampling
from stages.rollouts.vllm_client import Engines, Server, VllmSampler, check_rows, reach
from tests.helpers import fake_vllm
from tests.helpers.models import VOCABULARY, llama, llama_config, plain_log_probs, saved

IDS = [[3, 9, 27, 33], [7], [3, 9], [40, 41]]
PROMPTS = [Prompt(i, ids, f"prompt {i}", None, None) for i, ids in enumerate(IDS)]
STOPS = (11, 12, 13)
EVENLY = -math.log(VOCABULARY)
OPTIONS = {
    "model": "models/sft",
    "adapter": None,
    "device": "cpu",
    "dtype": "float32",
    "positions": 32,
    "trust": False,
}


def sampler(where: str, policy=None, options=OPTIONS, **changes) -> VllmSampler:
    values = {
        "where": where,
        "options": options,
        "threads": 1,
        "policy": policy or fake_vllm.uniform_policy(),
        "sampling": Sampling(1.0, 1.0, 0, 0.0, 6, STOPS),
        "num_rollouts": 3,
        "seed": 42,
        "precision": "float32",
    }
    return VllmSampler(**values | changes)


def ids_of(groups) -> list[list[list[int]]]:
    return [[completion.ids for completion in group] for group in groups]


@pytest.fixture
def python(tmp_path):
    return fake_vllm.interpreter(tmp_path)


@contextmanager
def engine_or_server(kind, python):
    if kind == "engine":
        yield python
    else:
        with fake_vllm.server() as made:
            yield made.address


@pytest.mark.parametrize("kind", ["engine", "server"])
def test_completions_have_the_log_probs_of_the_policy_and_those_of_the_sampler(kind, python):
    policy = fake_vllm.uniform_policy()
    with engine_or_server(kind, python) as where, sampler(where, policy) as made:
        groups = made(PROMPTS, 1, range(4))
    assert [len(group) for group in groups] == [3] * 4
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for row in group:
            plain = plain_log_probs(policy, prompt.ids, row.ids).tolist()
            assert row.log_probs == pytest.approx(plain, abs=1e-6)
            assert row.log_probs_sampler == [EVENLY] * len(row.ids)
            ends = [place for place, id in enumerate(row.ids) if id in STOPS]
            assert ends == ([len(row.ids) - 1] if row.finished else [])
            assert row.finished or len(row.ids) == 6
    assert {row.finished for group in groups for row in group} == {True, False}


def test_log_probs_are_stated_at_the_sampling_temperature(python):
    policy, sampling = llama(), Sampling(1.7, 1.0, 0, 0.0, 6, STOPS)
    made = sampler(python, policy, sampling=sampling)
    made.source = reach(python, OPTIONS, 1, policy.device)
    with made:
        (group,) = made(PROMPTS[:1], 1, range(1))
    for row in group:
        plain = plain_log_probs(policy, IDS[0], row.ids, 1.7).tolist()
        assert row.log_probs == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("kind", ["engine", "server"])
def test_a_row_depends_on_seed_round_position_and_number_and_on_nothing_before(kind, python):
    with engine_or_server(kind, python) as where:
        with sampler(where) as made:
            first, second = ids_of(made(PROMPTS, 1, range(4))), ids_of(made(PROMPTS, 2, range(4)))
            assert ids_of(made(PROMPTS, 1, range(4))) == first
        with sampler(where) as made:
            assert ids_of(made(PROMPTS[2:], 1, range(2, 4))) == first[2:]
        with sampler(where, seed=43) as made:
            other = ids_of(made(PROMPTS, 1, range(4)))
        with sampler(where) as made:
            moved = ids_of(made(PROMPTS, 1, range(1, 5)))
    rows = [tuple(ids) for kind in (first, second, other, moved) for group in kind for ids in group]
    assert len(set(rows)) >= len(rows) - 3  # rows of one id may be alike


def test_engines_share_rows_in_slices_and_give_them_back_in_order(python):
    numbers = list(range(7))
    asked = {"prompts": [[n + 1] for n in numbers], "seeds": numbers}
    asked |= {"temperature": 1.0, "tokens": 6, "stops": STOPS}
    found = []
    for count in (1, 2, 3, 9):
        engines = Engines(python, OPTIONS, [engine_variables(1, None)] * count)
        found.append(engines.rows(asked))
        engines.close()
        assert all(process.returncode == 0 for process, _ in engines.started)
    assert len(found[0]) == 7 and all(rows == found[0] for rows in found)


def test_nothing_starts_before_rows_are_asked_for_and_nothing_goes_on_after(python):
    with sampler(python) as made:
        assert made.source is None
        made(PROMPTS, 1, range(4))
        (process, _) = made.source.started[0]
        assert process.poll() is None
    assert process.poll() == 0


def test_what_a_library_prints_is_no_answer(python, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "stray")
    with sampler(python) as made:
        assert len(made(PROMPTS, 1, range(4))) == 4


@pytest.mark.parametrize(
    "fault, expected",
    [
        ("start", "vLLM failed: ValueError: cannot serve models/sft"),
        ("die", "vLLM failed: it ended with exit code 3"),
    ],
)
def test_an_engine_that_fails_says_why_in_one_line(fault, expected, python, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_VLLM", fault)
    with pytest.raises(InputError) as caught, sampler(python) as made:
        made(PROMPTS, 1, range(4))
    assert str(caught.value) == f"{VLLM}: {python}: {expected}"
    if fault == "die":
        assert "the reason stands here" in capsys.readouterr().err


def test_an_interpreter_that_is_not_there_is_named():
    with pytest.raises(InputError, match="nowhere/python: No such file.*make vllm"):
        sampler("nowhere/python")(PROMPTS, 1, range(4))


@pytest.mark.parametrize("kind", ["engine", "server"])
def test_an_engine_that_serves_another_policy_is_refused(kind, python):
    with engine_or_server(kind, python) as where, sampler(where, llama()) as made:
        with pytest.raises(InputError, match="nats a token off those of models/sft, expected at m"):
            made(PROMPTS, 1, range(4))


def test_how_far_off_an_engine_may_be_goes_by_the_precision(python, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "unlike")  # by 1 nat a token
    monkeypatch.setattr("stages.rollouts.vllm_client.SAME", {"float32": 0.9, "bf16": 1.1})
    with sampler(python, precision="bf16") as made:
        assert len(made(PROMPTS, 1, range(4))) == 4
    with pytest.raises(InputError, match="1 nats a token off"), sampler(python) as made:
        made(PROMPTS, 1, range(4))


GOOD = {"ids": [5, 6, 11], "log_probs": [-1.0, 0.0, -0.5], "finished": True}


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"ids": [], "log_probs": []}, "row 1: found 0 ids, expected 1 to 6"),
        ({"ids": [5] * 7}, "row 1: found 7 ids, expected 1 to 6"),
        ({"log_probs": [-1.0]}, "row 1: found 1 log-probs, expected 3, one for each id"),
        ({"ids": [5, 48, 11]}, "row 1: found ids up to 48, expected ids from 0 to 47"),
        ({"log_probs": [-1.0, None, 0.0]}, "expected finite numbers, 0 or below"),
        ({"log_probs": [-1.0, -math.inf, 0.0]}, "expected finite numbers, 0 or below"),
        ({"log_probs": [-1.0, 0.5, 0.0]}, "expected finite numbers, 0 or below"),
        ({"finished": False}, "stop ids at [2], finished False"),
        ({"ids": [5, 11, 11]}, "stop ids at [1, 2], finished True"),
        ({"ids": [5, 6, 7]}, "stop ids at [], finished True"),  # an end that is not in the row
        ({"ids": [5, 6, 7], "finished": False}, "at the end alone, or 6 ids"),  # cut short
    ],
)
def test_a_row_that_was_not_asked_for_is_refused(change, expected):
    asked = {"tokens": 6, "stops": STOPS}
    check_rows("there", [GOOD, GOOD], 2, asked, VOCABULARY)
    with pytest.raises(InputError) as caught:
        check_rows("there", [GOOD, GOOD | change], 2, asked, VOCABULARY)
    assert expected in str(caught.value) and str(caught.value).startswith(f"{VLLM}: there: ")


def test_a_row_too_few_is_refused():
    with pytest.raises(InputError, match="there: answer: found 1 rows, expected 2"):
        check_rows("there", [GOOD], 2, {"tokens": 6, "stops": STOPS}, VOCABULARY)


def test_a_server_is_asked_for_each_row_by_itself_with_nothing_left_to_its_defaults():
    with fake_vllm.server() as made, sampler(made.address + "/v1/") as client:
        client(PROMPTS, 3, range(4))
    rows = made.asked[len(PROMPTS) :]  # the first ones try out whom it serves
    wanted = [
        (ids, derive(42, "rollout", 3, "vllm", position, number))
        for position, ids in enumerate(IDS)
        for number in range(3)
    ]
    assert sorted((row["prompt"], row["seed"]) for row in rows) == sorted(wanted)
    for row in rows:
        assert (row["model"], row["max_tokens"], row["temperature"]) == ("policy", 6, 1.0)
        assert (row["top_p"], row["top_k"], row["min_p"]) == (1.0, 0, 0.0)
        assert row["stop_token_ids"] == list(STOPS) and row["ignore_eos"]
        assert row["logprobs"] == 0 and row["return_token_ids"]


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"token_ids": None}, "no token_ids or logprobs in a choice"),
        ({"logprobs": None}, "no token_ids or logprobs in a choice"),
        ({"finish_reason": "stop", "token_ids": [5] * 6}, "finished True"),
        ({"status": 400}, "/v1/models: 400"),
    ],
)
def test_a_server_that_gives_something_else_is_refused_in_one_line(change, expected):
    with fake_vllm.server(**change) as made:
        with pytest.raises(InputError) as caught:
            sampler(made.address)(PROMPTS, 1, range(4))
    assert expected in str(caught.value) and made.address in str(caught.value)


def test_a_server_that_is_not_there_is_named():
    with fake_vllm.server() as made:
        pass
    with pytest.raises(
        InputError, match=f"{made.address}/v1/models: .*refused.*expected an OpenAI"
    ):
        Server(made.address)


def test_dynamic_sampling_goes_on_with_whole_batches(python):
    """Of 4 prompts two have groups that are all alike; two more are drawn for them."""

    def rewards(prompt, text, ids):
        score = float(len(text) % 2) if prompt.index % 2 else 0.0
        return {"reward_correctness": score, "reward_format": None, "reward_length": None}

    with sampler(python) as made:
        engine = Engine(
            policy=made.policy,
            decode=lambda ids: "x" * sum(ids),
            sampling=made.sampling,
            num_rollouts=3,
            batch_size=6,
            rewards=rewards,
            seed=42,
            sampler=made,
        )
        rows = list(engine.rows(PROMPTS, 1, 0, 2, 6))
    assert engine.counts.dropped > 0 and engine.counts.kept == 2
    assert all(row["log_probs_sampler"] == [EVENLY] * len(row["completion_ids"]) for row in rows)


def test_without_the_variable_one_line_says_what_it_holds(monkeypatch):
    monkeypatch.delenv(VLLM, raising=False)
    with pytest.raises(
        InputError, match="RLHF_VLLM: not set, but the knob sampler is vllm; expect"
    ):
        vllm()
    monkeypatch.setenv(VLLM, " there/bin/python ")
    assert vllm() == "there/bin/python"


def test_an_engine_sees_one_gpu_and_is_no_process_of_a_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = engine_variables(3, 1)
    assert found["CUDA_VISIBLE_DEVICES"] == "1" and found["OMP_NUM_THREADS"] == "3"
    assert not {"RANK", "MASTER_PORT"} & set(found)
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert engine_variables(1, 1)["CUDA_VISIBLE_DEVICES"] == "6"
    assert engine_variables(1, None)["CUDA_VISIBLE_DEVICES"] == "4,6"


# The real engine: `RLHF_VLLM=.venv-vllm/bin/python pytest -m vllm`.

REAL = os.environ.get(VLLM, "")
real = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not shutil.which(REAL), reason=f"{VLLM} names no interpreter; `make vllm` makes one"
    ),
]


def marked(test):
    for mark in real:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory):
    """A policy in a folder, with heads of a size that vLLM has."""
    config = llama_config(vocabulary=320)
    config.update({"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 4})
    torch.manual_seed(0)
    policy = LlamaForCausalLM(config).eval()
    return saved(tmp_path_factory.mktemp("policy") / "policy", policy), policy


@marked
def test_the_real_engine_samples_from_the_policy_and_the_same_rows_each_time(policy_folder):
    folder, policy = policy_folder
    options = OPTIONS | {"model": str(folder)}
    sampling = Sampling(0.7, 1.0, 0, 0.0, 12, STOPS)
    found = []
    for order in ((1, 2), (2, 1)):
        with sampler(REAL, policy, options, sampling=sampling, num_rollouts=8) as made:
            found.append({number: made(PROMPTS, number, range(4)) for number in order})
    assert found[0] == found[1]
    assert ids_of(found[0][1]) != ids_of(found[0][2])
    for group in found[0][1]:
        for row in group:
            assert row.log_probs_sampler == pytest.approx(row.log_probs, abs=1e-3)


@marked
def test_the_real_engine_serves_adapters_over_their_base(policy_folder, tmp_path):
    folder, policy = policy_folder
    policy = copy.deepcopy(policy)
    torch.manual_seed(0)
    lora = Lora(rank=4, alpha=8, dropout=0.0, targets="all-linear")
    add_adapters(policy, folder, lora)
    for weight in adapter_weights(policy).values():
        torch.nn.init.normal_(weight, std=0.3)
    save_adapters(tmp_path, policy)
    adapter = {"folder": str(tmp_path), "rank": 4}
    with sampler(REAL, policy, OPTIONS | {"model": str(folder), "adapter": adapter}) as made:
        groups = made(PROMPTS, 1, range(4))
    for row in (row for group in groups for row in group):
        assert row.log_probs_sampler == pytest.approx(row.log_probs, abs=1e-3)


@marked
def test_the_real_server_samples_from_the_policy(policy_folder, tmp_path):
    folder, policy = policy_folder
    port, log = "18765", (tmp_path / "log").open("w+")
    words = ["--model", str(folder), "--port", port, "--dtype", "float32", "--max-model-len", "64"]
    words += ["--logprobs-mode", "processed_logprobs", "--enforce-eager"]
    words += ["--no-enable-chunked-prefill"]
    environment = engine_variables(1, None) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    command = [REAL, "-m", "vllm.entrypoints.openai.api_server", *words]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                Server(f"http://127.0.0.1:{port}")
                break
            except InputError:
                log.seek(0)
                assert process.poll() is None and time.monotonic() < deadline, log.read()[-3000:]
                time.sleep(1)
        sampling = Sampling(0.7, 1.0, 0, 0.0, 12, STOPS)
        with sampler(f"http://127.0.0.1:{port}", policy, sampling=sampling) as made:
            groups = made(PROMPTS, 1, range(4))
        for row in (row for group in groups for row in group):
            assert row.log_probs_sampler == pytest.approx(row.log_probs, abs=1e-3)
    finally:
        process.terminate()
        process.wait(timeout=60)
        log.close()
