"""Several processes train what one trains: weights, figures, gradients, saved states."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from stages.base.environment import SAVE_MINUTES
from stages.base.scratch import Work
from stages.models import processes
from stages.training.batching import dealt, neighbours
from stages.training.saving import Saver
from stages.training.sft import micro_batch_loss, predicted
from stages.training.steps import NonFinite, adamw, update
from stages.training.supervised import Fit, Recipe
from stages.training.tracking import tracking
from tests.helpers.models import cpu_accelerator, gpt2, llama, random_ids, weights_of
from tests.helpers.together import far_off, together

RECIPE = Recipe(
    stage="train_sft",
    seed=3,
    epochs=20,
    train_batch_size=5,
    batch_acc=2,
    drop_last=False,
    lr=1e-3,
    warmup_steps=10,
    weight_decay=0.01,
    max_norm=1.0,
    nonfinite="stop",
    train_max_tokens=None,
)
SAME = 5e-7  # relative: the order of sums apart


def sft_rows() -> list[dict]:
    """41 rows: the last step of an epoch has one row, so that others have nothing to do."""
    ids = random_ids(1, *(3 + i % 5 for i in range(41)))
    return [{"input_ids": row, "labels": [-100, *row[1:]]} for row in ids]


def fit(model, recipe: Recipe = RECIPE, loss_of=None) -> Fit:
    rows = sft_rows()
    seen = []

    def loss(batch, divisor):
        seen.append(len(batch))
        return micro_batch_loss(model, batch, divisor)

    def rows_of_step(divisor):
        count = processes.total(sum(seen))
        seen.clear()
        return {"rows": count}

    lengths = [len(row["input_ids"]) for row in rows]
    count = lambda batch: sum(predicted(row["labels"]) for row in batch)  # noqa: E731
    parts = (cpu_accelerator(), model, rows, lengths, recipe, loss_of or loss, count, "tokens")
    return Fit(*parts, rows_of_step)


def sft() -> tuple[list[dict], dict]:
    model = llama()
    return list(fit(model).steps()), weights_of(model)


def skipping(bad: tuple[int, ...]) -> tuple[list[int], dict]:
    """One step a row; the losses of `bad` rows are NaN, wherever they are met."""
    model, rows = llama(), sft_rows()
    odd = [rows[i]["input_ids"] for i in bad]

    def loss_of(batch, divisor):
        loss = micro_batch_loss(model, batch, divisor)
        return loss * torch.nan if any(row["input_ids"] in odd for row in batch) else loss

    recipe = replace(RECIPE, epochs=1, nonfinite="skip")
    records = list(fit(model, recipe, loss_of).steps())
    return [record["skipped"] for record in records], weights_of(model)


def dropout_draws() -> list[float]:
    """What a model in training mode would draw first, as the loop seeds it."""
    drawn = []

    def loss_of(batch, divisor):
        drawn.append(torch.rand(()).item())
        return torch.zeros((), requires_grad=True)

    next(fit(llama(), loss_of=loss_of).steps())
    return drawn


def idle_gradients() -> list:
    """Of three weights the first has a gradient everywhere, the second in process 1, none else."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    weights[0].grad = torch.full((2,), 1.0 + processes.number())
    if processes.number() == 1:
        weights[1].grad = torch.full((2,), 5.0)
    processes.sum_gradients(weights)
    return [None if weight.grad is None else weight.grad.tolist() for weight in weights]


def stopping() -> str:
    """What the process that meets a NaN raises; the others are told in `update`'s collectives."""
    model, losses = llama(), [torch.tensor(torch.nan if processes.number() else 1.0)]
    try:
        update(cpu_accelerator(), model, adamw(model, 1.0, 0.0), losses, 1.0, 1.0, "stop")
    except NonFinite as error:
        return str(error)
    except processes.Lost:
        return "lost"


def in_two_buckets() -> list:
    processes.BUCKET = 24
    weights = [torch.nn.Parameter(torch.zeros(n)) for n in (5, 1, 9, 2)]
    for place, weight in enumerate(weights):
        weight.grad = torch.full((len(weight),), float(10**place))
    sizes = [[len(p) for p in bucket] for bucket in processes._buckets(weights)]
    processes.sum_gradients(weights)
    return [sizes, [weight.grad.unique().item() for weight in weights]]


def told() -> dict:
    """Of a number and a flag that only process 1 has."""
    own = processes.number() == 1
    return {
        "total": processes.total(2.5 if own else 1.0),
        "everywhere": [processes.everywhere(True), processes.everywhere(not own)],
        "gathered": processes.gathered(("from", processes.number())),
    }


def written(folder: str) -> None:
    with tracking("train", {}, folder / "curve.csv") as log:
        log({"step": 1, "process": processes.number()})


def saved_states(folder: str, cut: bool) -> tuple[list[dict], dict]:
    """A training with dropout, cut off after three steps and gone on with, or not cut off."""
    recipe, work = replace(RECIPE, epochs=1), Work("train_sft", [], {"count": processes.count()})
    if cut:
        for number, _ in enumerate(fit(gpt2(dropout=0.3), recipe).steps(Saver(work))):
            if number == 3:  # the state after three steps was saved by now
                break
    model, saver = gpt2(dropout=0.3), Saver(work)
    records = list(fit(model, recipe).steps(saver))
    if not processes.number():
        saver.done()
    return records, weights_of(model)


def everything(folder) -> dict:
    """All of the above in one start of the processes."""
    found = {"sft": sft(), "skip": skipping((0, 7)), "draws": dropout_draws()}
    found |= {"idle": idle_gradients(), "buckets": in_two_buckets(), "told": told()}
    written(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv(SAVE_MINUTES, "0.0000001")
        found |= {"whole": saved_states(folder, False), "cut": saved_states(folder, True)}
    return found | {"stop": stopping()}


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("two")
    found = together(2, everything, folder)
    return [part | {"folder": folder} for part in found]


def same_training(one: tuple[list[dict], dict], found: list[tuple[list[dict], dict]]) -> None:
    records, weights = one
    for others, other_weights in found:
        assert far_off(weights, other_weights) < SAME
        assert len(others) == len(records) == 100
        for record, other in zip(records, others, strict=True):
            assert other == pytest.approx(record, rel=1e-5)
    assert all(far_off(found[0][1], other) == 0 for _, other in found)


def test_a_hundred_steps_of_two_processes_are_those_of_one(two):
    same_training(sft(), [part["sft"] for part in two])


@pytest.mark.slow
def test_a_hundred_steps_of_three_processes_are_those_of_one():
    same_training(sft(), together(3, sft))


def test_a_micro_batch_that_is_not_finite_somewhere_is_skipped_everywhere(two):
    skipped, weights = skipping((0, 7))
    assert sum(skipped) == 2
    for part in two:
        others, other_weights = part["skip"]
        assert others == skipped
        assert far_off(weights, other_weights) < SAME


def test_the_process_that_meets_a_nan_says_so_and_the_others_do_not(two):
    assert two[0]["stop"] == "lost"
    assert two[1]["stop"] == "the loss is nan; nonfinite: stop. Nothing was saved"


def test_each_process_has_its_own_stream_of_dropout_the_first_that_of_a_single_one(two):
    draws = [part["draws"] for part in two]
    assert draws[0][0] == dropout_draws()[0] != draws[1][0]


def test_a_weight_without_a_gradient_anywhere_keeps_none(two):
    for part in two:
        assert part["idle"] == [[3.0, 3.0], [5.0, 5.0], None]


def test_gradients_travel_in_buckets(two):
    for part in two:
        assert part["buckets"] == [[[5, 1], [9], [2]], [2.0, 20.0, 200.0, 2000.0]]


def test_numbers_flags_and_values_reach_every_process(two):
    for part in two:
        assert part["told"]["total"] == 3.5
        assert part["told"]["everywhere"] == [True, False]
        assert part["told"]["gathered"] == [("from", 0), ("from", 1)]


def test_a_single_process_gets_back_what_it_says():
    assert processes.total(2.5) == 2.5 and processes.everywhere(True)
    assert not processes.everywhere(False)
    assert processes.gathered("x") == ["x"]


def test_the_first_process_alone_writes_the_curve(two):
    assert (two[0]["folder"] / "curve.csv").read_text() == "step,process\n1,0\n"


def test_a_training_of_two_processes_that_is_cut_off_goes_on_to_the_same_bits(two):
    for part in two:
        assert part["cut"][0] == part["whole"][0]
        assert far_off(part["whole"][1], part["cut"][1]) == 0
    assert not list(two[0]["folder"].glob(".scratch/*"))


# Who takes which rows.


@pytest.mark.parametrize("deal", [dealt, lambda rows, *who: rows[neighbours(len(rows), *who)]])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_row_of_a_micro_batch_has_one_process(deal, count):
    for size in range(8):
        rows = list(range(size))
        parts = [deal(rows, number, count) for number in range(count)]
        assert sorted(row for part in parts for row in part) == rows
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_rows_by_length_are_dealt_in_turn_and_prompts_stay_together():
    assert [dealt([5, 6, 7, 8, 9], n, 2) for n in (0, 1)] == [[5, 7, 9], [6, 8]]
    assert [neighbours(5, n, 2) for n in (0, 1)] == [slice(0, 2), slice(2, 5)]


def test_pairs_are_not_torn_apart():
    parts = partial(neighbours, 10, count=3, unit=2)
    assert [parts(number=n) for n in range(3)] == [slice(0, 2), slice(2, 6), slice(6, 10)]
