"""Letters: G samples of a prompt, T the cap. Draws are seeded, so no test here flickers.

Where a distribution is tested, a fault-free sampler with other draws would fail with the odds
named.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stages.models import packing
from stages.models.packing import packed
from stages.rollouts import sampling as module
from stages.rollouts.sampling import Sampling, sample, uniforms
from tests.helpers.models import (
    POLICIES,
    gpt2,
    llama,
    plain_log_probs,
    plain_logits,
    random_ids,
    sliding_mistral,
)

each_model = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
PROMPTS = [[3, 9, 27, 33, 1, 8, 14, 5, 40], [7], [3, 9, 27], [3, 9, 27, 2]]
ODDS = 1e-4


def settings(**options) -> Sampling:
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return Sampling(**{**plain, "max_new_tokens": 12, "stop_ids": (), **options})


def draws(prompts: int, group: int, cap: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(prompts, group, cap, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def generated(model, prompts, stops, cap) -> list[list[int]]:
    """What transformers' own greedy generation gives, cut after the first stop token."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=cap,
        eos_token_id=list(stops) or None,
        pad_token_id=0,
    )[:, width:].tolist()
    rows = []
    for row in out:
        ends = [t for t, token in enumerate(row) if token in stops]
        rows.append(row[: ends[0] + 1] if ends else row)
    return rows


def chi_square_odds(counts: Counter, probabilities: dict, total: int) -> float:
    """Odds of counts at least so far from their expectation, were the probabilities true."""
    assert set(counts) <= set(probabilities)
    statistic = sum(
        (counts[key] - total * p) ** 2 / (total * p) for key, p in probabilities.items()
    )
    half = torch.tensor([(len(probabilities) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


@each_model
def test_greedy_is_transformers_generate_token_by_token(make):
    model = make()
    wanted = generated(model, PROMPTS, (), 12)
    got = sample(model, PROMPTS, None, settings())
    assert [row.ids for row in got] == wanted
    assert not any(row.finished for row in got)


@each_model
def test_greedy_ends_each_row_at_its_first_stop_token_and_keeps_it(make):
    model = make()
    endless = generated(model, PROMPTS, (), 12)
    stops = (endless[0][3], endless[1][6], 47)
    wanted = generated(model, PROMPTS, stops, 12)
    got = sample(model, PROMPTS, None, settings(stop_ids=stops))
    assert [row.ids for row in got] == wanted
    assert [row.finished for row in got] == [row[-1] in stops for row in wanted]
    assert got[0].finished and len(got[0].ids) <= 4


@each_model
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.7, "top_k": 5},
        {"temperature": 0.8, "min_p": 0.1},
        {"temperature": 0.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_log_probs_are_the_full_softmax_at_the_temperature_whatever_narrows_the_support(
    make, options
):
    model, chosen = make(), settings(**options, stop_ids=(11, 12))
    rows = sample(model, PROMPTS, draws(4, 3, 12), chosen)
    for number, row in enumerate(rows):
        wanted = plain_log_probs(model, PROMPTS[number // 3], row.ids, chosen.temperature)
        assert len(row.log_probs) == len(row.ids)
        torch.testing.assert_close(torch.tensor(row.log_probs), wanted, rtol=0, atol=1e-5)


def test_greedy_log_probs_are_those_at_temperature_one():
    model = llama()
    for prompt, row in zip(
        PROMPTS, sample(model, PROMPTS, None, settings(temperature=0.3)), strict=True
    ):
        wanted = plain_log_probs(model, prompt, row.ids, 1.0)
        torch.testing.assert_close(torch.tensor(row.log_probs), wanted, rtol=0, atol=1e-5)


def test_a_half_precision_policy_is_sampled_and_scored_by_the_float32_softmax_of_its_logits():
    model = llama(vocabulary=3000).to(torch.bfloat16)
    prompt, uniform = [3, 9, 27], draws(1, 64, 1)
    rows = sample(model, [prompt], uniform, settings(temperature=0.6, max_new_tokens=1))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
    assert logits.dtype == torch.bfloat16
    wanted = torch.log_softmax(logits.float() / 0.6, -1)
    cumulative = wanted.exp().tolist()
    for row, draw in zip(rows, uniform.flatten().tolist(), strict=True):
        assert row.log_probs[0] == pytest.approx(wanted[row.ids[0]].item(), abs=1e-5)
        below = sum(cumulative[: row.ids[0]])  # the draw falls on this very token
        assert below - 1e-5 <= draw <= below + cumulative[row.ids[0]] + 1e-5


@each_model
def test_samples_do_not_depend_on_batch_mates_or_batch_size(make):
    model, options = make(), settings(temperature=1.2, stop_ids=(11, 12, 13))
    prompts = [*PROMPTS, *random_ids(5, 15, 1, 6)]
    streams = draws(len(prompts), 3, 12)
    together = sample(model, prompts, streams, options)
    assert len({row.finished for row in together}) == 2
    for start, size in ((0, 1), (1, 2), (3, 4)):
        part = sample(model, prompts[start : start + size], streams[start : start + size], options)
        for got, wanted in zip(part, together[3 * start : 3 * (start + size)], strict=True):
            assert got.ids == wanted.ids and got.finished == wanted.finished
            assert got.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)


def test_dropout_of_the_config_is_off_so_that_sampling_twice_is_equal():
    model, streams = gpt2(dropout=0.5), draws(4, 3, 12)
    first, second = (sample(model, PROMPTS, streams, settings()) for _ in range(2))
    assert first == second


def test_a_policy_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="training mode"):
        sample(gpt2().train(), PROMPTS, draws(4, 1, 12), settings())


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_two_sampled_tokens_follow_the_softmax(temperature):
    """False alarm: 1 in 10,000 for other draws."""
    model, prompt, total = llama(vocabulary=5), [3, 1, 4], 20_000
    rows = sample(
        model,
        [prompt],
        draws(1, total, 2),
        settings(temperature=temperature, max_new_tokens=2),
    )
    with torch.no_grad():
        first = torch.softmax(plain_logits(model, prompt, [0])[0] / temperature, -1).tolist()
        joint = {}
        for a in range(5):
            after = torch.softmax(plain_logits(model, [*prompt, a], [0])[0] / temperature, -1)
            joint |= {(a, b): first[a] * after[b].item() for b in range(5)}
    assert min(joint.values()) * total > 5
    counts = Counter(tuple(row.ids) for row in rows)
    assert chi_square_odds(counts, joint, total) > ODDS


def top_k_support(probabilities: list[float], k: int) -> set[int]:
    return set(sorted(range(len(probabilities)), key=lambda i: -probabilities[i])[:k])


def top_p_support(probabilities: list[float], p: float) -> set[int]:
    kept, mass = set(), 0.0
    for token in sorted(range(len(probabilities)), key=lambda i: -probabilities[i]):
        if mass >= p:
            break
        kept.add(token)
        mass += probabilities[token]
    return kept


def min_p_support(probabilities: list[float], share: float) -> set[int]:
    return {i for i, p in enumerate(probabilities) if p >= share * max(probabilities)}


NARROWINGS = {
    "top_k": ({"top_k": 3}, lambda p: top_k_support(p, 3)),
    "top_p": ({"top_p": 0.7}, lambda p: top_p_support(p, 0.7)),
    "min_p": ({"min_p": 0.3}, lambda p: min_p_support(p, 0.3)),
    "top_k and min_p": (
        {"top_k": 4, "min_p": 0.2},
        lambda p: top_k_support(p, 4) & min_p_support(p, 0.2),
    ),
}


@pytest.mark.parametrize("options, support", NARROWINGS.values(), ids=NARROWINGS)
def test_narrowed_sampling_stays_in_its_support_and_keeps_its_proportions(options, support):
    """False alarm: 1 in 10,000 for other draws."""
    model, prompt, total = llama(vocabulary=12), [3, 1, 4], 20_000
    with torch.no_grad():
        whole = torch.softmax(plain_logits(model, prompt, [0])[0] / 0.8, -1).tolist()
    kept = support(whole)
    assert 1 < len(kept) < 12
    mass = sum(whole[token] for token in kept)
    rows = sample(
        model,
        [prompt],
        draws(1, total, 1),
        settings(temperature=0.8, max_new_tokens=1, **options),
    )
    counts = Counter(row.ids[0] for row in rows)
    assert chi_square_odds(counts, {token: whole[token] / mass for token in kept}, total) > ODDS


@pytest.mark.parametrize("options, support", NARROWINGS.values(), ids=NARROWINGS)
def test_the_smallest_and_the_largest_draw_fall_inside_the_support(options, support):
    model, prompt = llama(vocabulary=12), [3, 1, 4]
    with torch.no_grad():
        whole = torch.softmax(plain_logits(model, prompt, [0])[0] / 0.8, -1).tolist()
    extremes = torch.tensor([[[0.0], [1 - 2.0**-24]]])
    rows = sample(model, [prompt], extremes, settings(temperature=0.8, max_new_tokens=1, **options))
    kept = support(whole)
    assert [row.ids[0] for row in rows] == [min(kept), max(kept)]


def test_a_one_token_answer_is_kept_with_its_stop_token():
    model = llama()
    stop = generated(model, PROMPTS[:1], (), 1)[0][0]
    rows = sample(model, PROMPTS, None, settings(stop_ids=(stop,)))
    assert rows[0].ids == [stop] and rows[0].finished and len(rows[0].log_probs) == 1


def test_when_every_row_stops_at_once_all_have_one_token():
    model, everything = llama(), tuple(range(48))
    rows = sample(model, PROMPTS, draws(4, 2, 12), settings(stop_ids=everything))
    assert [len(row.ids) for row in rows] == [1] * 8
    assert all(row.finished for row in rows)


def test_a_cap_of_one_gives_one_token_finished_only_by_a_stop():
    model = llama()
    free = sample(model, PROMPTS, draws(4, 4, 1), settings(max_new_tokens=1))
    assert [len(row.ids) for row in free] == [1] * 16
    assert not any(row.finished for row in free)
    stop = free[0].ids[0]
    rows = sample(model, PROMPTS, draws(4, 4, 1), settings(max_new_tokens=1, stop_ids=(stop,)))
    assert [row.finished for row in rows] == [row.ids == [stop] for row in free]


def test_a_row_is_finished_by_a_stop_in_its_last_place_and_not_by_the_cap():
    model = llama()
    endless = generated(model, PROMPTS[:1], (), 12)[0]
    place = max(t for t in range(12) if endless.index(endless[t]) == t)
    stop = endless[place]
    at_cap = sample(model, PROMPTS[:1], None, settings(max_new_tokens=place + 1, stop_ids=(stop,)))[
        0
    ]
    assert at_cap.ids == endless[: place + 1] and at_cap.finished
    cut = sample(model, PROMPTS[:1], None, settings(max_new_tokens=place, stop_ids=(stop,)))[0]
    assert cut.ids == endless[:place] and not cut.finished


@pytest.mark.parametrize("share", [0.0, 2.0], ids=["dropped at once", "never dropped"])
@each_model
def test_dropping_finished_rows_changes_nothing(make, share, monkeypatch):
    model, options = make(), settings(temperature=1.3, stop_ids=(11, 12, 13, 14))
    streams = draws(4, 6, 12)
    wanted = sample(model, PROMPTS, streams, options)
    assert len({len(row.ids) for row in wanted}) > 3
    monkeypatch.setattr(module, "DROP_SHARE", share)
    for got, row in zip(sample(model, PROMPTS, streams, options), wanted, strict=True):
        assert got.ids == row.ids and got.finished == row.finished
        assert got.log_probs == pytest.approx(row.log_probs, abs=1e-5)


@each_model
def test_rows_that_stay_after_their_end_change_nothing(make, monkeypatch):
    model, options = make(), settings(temperature=1.3, stop_ids=(0, 11, 12, 13, 14))
    streams = draws(4, 6, 12)
    wanted = sample(model, PROMPTS, streams, options)
    assert len({len(row.ids) for row in wanted}) > 3
    monkeypatch.setitem(module.ASKED_EVERY, "cpu", 5)
    for got, row in zip(sample(model, PROMPTS, streams, options), wanted, strict=True):
        assert got.ids == row.ids and got.finished == row.finished
        assert got.log_probs == pytest.approx(row.log_probs, abs=1e-5)


class Waits(TorchDispatchMode):
    """Counts the operations whose result the host must read, so that a GPU could not run ahead."""

    NAMES = ("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        by_mask = any(i is not None and i.dtype == torch.bool for i in indices)
        if by_mask or name in self.NAMES:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}], ids=str)
@pytest.mark.parametrize("even", [True, False], ids=["prompts of one length", "padded"])
def test_the_host_waits_once_a_check_and_once_a_token_where_prompts_are_padded(
    even, options, monkeypatch
):
    model, prompts = llama(), [[3, 9, 27], [7, 1, 4] if even else [7]]
    found = []
    for cap in (17, 33):  # nothing ends: the rows stay as they are
        monkeypatch.setitem(module.ASKED_EVERY, "cpu", 8)
        with Waits() as waits:
            sample(model, prompts, draws(2, 3, cap), settings(max_new_tokens=cap, **options))
        found.append(waits.found.total())
    assert found[1] - found[0] == 16 / 8 + (0 if even else 16)


def test_packed_weights_sample_the_same_tokens_and_log_probs_to_rounding(monkeypatch):
    monkeypatch.setattr(packing, "PACKING_PAYS", 1)
    model, options, streams = llama(tied=False), settings(stop_ids=(11, 12)), draws(4, 6, 12)
    wanted = sample(model, PROMPTS, streams, options)
    with packed(model):
        got = sample(model, PROMPTS, streams, options)
    for row, plain in zip(got, wanted, strict=True):
        assert row.ids == plain.ids
        assert row.log_probs == pytest.approx(plain.log_probs, abs=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("even", [True, False], ids=["prompts of one length", "padded"])
def test_on_a_gpu_the_log_probs_are_those_of_a_full_pass_and_the_host_seldom_waits(even):
    model = llama().to("cuda")
    prompts = [[3, 9, 27], [7, 1, 4] if even else [7]]
    sample(model, prompts, draws(2, 3, 4), settings(max_new_tokens=4))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as waits:
            rows = sample(model, prompts, draws(2, 3, 64), settings(max_new_tokens=64))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) <= 64 / 8 + 16 + (0 if even else 64)
    for number, row in enumerate(rows):
        wanted = plain_log_probs(model.cpu(), prompts[number // 3], row.ids, 1.0)
        torch.testing.assert_close(torch.tensor(row.log_probs), wanted, rtol=0, atol=1e-4)


def test_greedy_with_a_sliding_window_is_transformers_generate():
    model = sliding_mistral()
    got = sample(model, PROMPTS, None, settings())
    for prompt, row in zip(PROMPTS, got, strict=True):
        assert row.ids == generated(model, [prompt], (), 12)[0]
        wanted = plain_log_probs(model, prompt, row.ids)
        torch.testing.assert_close(torch.tensor(row.log_probs), wanted, rtol=0, atol=1e-5)


def test_each_stream_of_draws_has_its_own_name():
    shape = (3, 4)
    first = uniforms(42, "rollout", 1, 0, shape)
    assert first.shape == shape and (first >= 0).all() and (first < 1).all()
    assert torch.equal(first, uniforms(42, "rollout", 1, 0, shape))
    for other in ((43, "rollout", 1, 0), (42, "evaluate", 1, 0), (42, "rollout", 2, 0)):
        assert not torch.equal(first, uniforms(*other, shape))
    assert not torch.equal(first, uniforms(42, "rollout", 1, 1, shape))
