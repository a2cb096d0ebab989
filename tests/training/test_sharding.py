"""Sharded models: each process keeps a part, and trains, saves and writes as one process does."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.base.environment import SAVE_MINUTES
from stages.base.scratch import Work
from stages.models import processes
from stages.models.checkpoints import save_model
from stages.models.sharding import gather, idle_pass, own_part, run, shard
from stages.models.trainer_state import load_optimizer, save_optimizer
from stages.training.saving import Saver
from stages.training.sft import micro_batch_loss
from stages.training.steps import adamw
from tests.helpers.models import byte_tokenizer, gpt2, llama, weights_of
from tests.helpers.together import far_off, together
from tests.training.test_processes import RECIPE, SAME, fit, sft_rows

FIVE = replace(RECIPE, epochs=1)  # the last of its steps has one row: a process has none
CPU = torch.device("cpu")


def trained(model, sharded: bool) -> tuple[list[dict], dict]:
    if sharded:
        shard(model, CPU)
    records = list(fit(model, FIVE).steps())
    gather(model)
    return records, weights_of(model)


def parts() -> tuple[float, type, type]:
    """Share of a model's numbers that this process holds; its class while and after."""
    model = llama()
    whole = sum(weight.numel() for weight in model.parameters())
    kind = type(model)
    shard(model, CPU)
    held = sum(own_part(weight).numel() for weight in model.parameters()) / whole
    gather(model)
    return held, kind is type(model), sum(weight.numel() for weight in model.parameters()) / whole


def idle() -> float:
    """The gradient where one process has two rows and the other none, beside that of the rows."""
    model, rows = llama(), sft_rows()[:2]
    micro_batch_loss(model, rows, 7).backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model = llama()
    shard(model, CPU)
    work = lambda: micro_batch_loss(model, rows, 7)  # noqa: E731
    (idle_pass(model) if processes.number() else run(model, work)).backward()
    return far_off(expected, {n: w.grad.full_tensor() for n, w in model.named_parameters()})


def optimizer_file(folder) -> bool:
    """Whether moments that were read from a file are written as they were, bit for bit."""
    model = llama()
    optimizer = adamw(model, 1e-2, 0.0)
    for _ in range(2):
        micro_batch_loss(model, sft_rows()[:3], 5).backward()
        optimizer.step()
    one, other = folder / f"{processes.number()}.one", folder / f"{processes.number()}.other"
    save_optimizer(one, optimizer, model)
    shard(model, CPU)
    optimizer = adamw(model, 1e-2, 0.0)
    load_optimizer(one, optimizer, model)
    gather(model, optimizer)
    if processes.number():
        return True
    save_optimizer(other, optimizer, model)
    return one.read_bytes() == other.read_bytes()


def cut_off(cut: bool) -> tuple[list[dict], dict]:
    """A sharded training with dropout, cut off after three steps and gone on with, or not."""
    work = Work("train_sft", [], {"cut": cut})

    def start():
        model = gpt2(dropout=0.3)
        shard(model, CPU)
        return model

    if cut:
        for number, _ in enumerate(fit(start(), FIVE).steps(Saver(work))):
            if number == 3:
                break
    model, saver = start(), Saver(work)
    records = list(fit(model, FIVE).steps(saver))
    if not processes.number():
        saver.done()
    gather(model)
    processes.gathered("done")
    return records, weights_of(model)


def read_back(folder) -> float:
    """How far a sharded model's folder is from what was trained; 0 in all but the first process."""
    tokenizer = byte_tokenizer()
    model = llama(vocabulary=len(tokenizer))
    shard(model, CPU)
    list(fit(model, replace(FIVE, train_batch_size=41)).steps())
    gather(model)
    if processes.number():
        return 0.0
    (folder / "model").mkdir()
    save_model(folder / "model", model, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    assert type(loaded) is type(model)
    return far_off(weights_of(model), weights_of(loaded))


def everything(folder) -> dict:
    """All of the above in one start of the processes."""
    found = {"trained": trained(llama(), True), "parts": parts(), "idle": idle()}
    found |= {"file": optimizer_file(folder), "read back": read_back(folder)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv(SAVE_MINUTES, "0.0000001")
        found |= {"whole": cut_off(False), "cut": cut_off(True)}
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    return together(2, everything, tmp_path_factory.mktemp("sharded"))


def test_five_sharded_steps_are_those_of_one_process(two):
    records, weights = trained(llama(), False)
    assert len(records) == 5
    for part in two:
        for record, other in zip(records, part["trained"][0], strict=True):
            assert other == pytest.approx(record, rel=1e-5)
    assert far_off(weights, two[0]["trained"][1]) < SAME


def test_each_process_holds_its_part_and_the_first_one_gathers_a_plain_model(two):
    for part, left in zip(two, (1.0, 0.0), strict=True):
        held, plain, gathered = part["parts"]
        assert 0.4 < held < 0.6
        assert plain and gathered == left


def test_a_process_without_a_row_adds_nothing_to_the_gradient(two):
    for part in two:
        assert part["idle"] < SAME


def test_the_optimizers_file_is_that_of_one_process(two):
    assert all(part["file"] for part in two)


def test_transformers_reads_the_folder_bit_for_bit(two):
    assert two[0]["read back"] == 0


def test_a_sharded_training_that_is_cut_off_goes_on_to_the_same_bits(two):
    for part in two:
        assert part["cut"][0] == part["whole"][0]
    assert far_off(two[0]["whole"][1], two[0]["cut"][1]) == 0
