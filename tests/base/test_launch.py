"""Who starts the processes of a stage, who of them speaks, and how a stage of several ends."""

import os
import signal

import click
import pytest
import torch
from click.testing import CliRunner

from stages.base import command, launch
from stages.base.command import SharedStage, Stage, launched
from stages.base.environment import LAUNCH
from stages.base.errors import BadKnob, Ended, InputError, Lost
from tests.helpers.together import free_port

VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", LAUNCH)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(command, "stop_with_parent", lambda: None)


def run(kind: type[Stage], words: list[str], work=lambda number: None):
    """A stage of a kind, as its script makes one: `--number` is its one option."""

    @click.command(cls=kind)
    @click.option("--number", type=int)
    def train_it(number):
        work(number)

    return CliRunner().invoke(train_it, words)


def test_a_single_process_is_not_launched():
    assert not launch.launch("train_sft", [], 1, 1)


@pytest.mark.parametrize("started", ["1", "3"])
def test_a_launcher_that_started_another_number_than_the_knob_is_refused(monkeypatch, started):
    monkeypatch.setenv("WORLD_SIZE", started)
    with pytest.raises(BadKnob, match=f"processes: found 2, but a launcher started {started};"):
        launch.launch("train_sft", [], 2, 1)


def test_a_process_of_the_right_number_goes_on_itself(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not launch.launch("train_sft", [], 2, 1)


def test_a_world_size_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(InputError, match="WORLD_SIZE: found 'two', expected a number"):
        launch.launch("train_sft", [], 2, 1)


def test_the_processes_run_the_command_line_of_the_stage(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "run_elastic", lambda *found: started.append(found))
    done = []
    run(SharedStage, ["--number", "7"], lambda number: done.append(launched(3, 1)))
    assert started == [(["-m", "stages.train_it", "--number", "7"], 3)] and done == [True]


def test_the_variable_replaces_the_launcher_and_is_told_the_same_command(monkeypatch):
    class Replaced(Exception):
        pass

    def execute(file, words):
        raise Replaced(file, words)

    monkeypatch.setattr(os, "execvp", execute)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setenv(LAUNCH, "srun --nodes=2 torchrun --rdzv-id='a b'")
    result = run(SharedStage, ["--number", "7"], lambda number: launched(16, 1))
    words = ["srun", "--nodes=2", "torchrun", "--rdzv-id=a b", "-m", "stages.train_it"]
    assert result.exception.args == ("srun", [*words, "--number", "7"])


def test_a_launcher_that_is_not_there_is_told_in_one_line(monkeypatch):
    monkeypatch.setenv(LAUNCH, "no-such-launcher --nodes=2")
    result = run(SharedStage, [], lambda number: launched(2, 1))
    assert result.exit_code == 1
    said = f"Error: stage train_it: {LAUNCH}: found 'no-such-launcher', expected a command"
    assert said in result.output


def test_a_stage_that_shares_no_work_refuses_several_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    result = run(Stage, [], lambda number: pytest.fail("it ran"))
    assert result.exit_code == 1
    assert "Error: stage train_it: found 2 processes, expected one" in result.output


def fails(error: BaseException):
    def work(number):
        raise error

    return work


def test_an_error_is_told_by_the_process_that_met_it_first(monkeypatch):
    """The store is the launcher's, and lives as long as it."""
    store = torch.distributed.TCPStore("127.0.0.1", free_port(), is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    results = [run(SharedStage, [], fails(InputError("a row is empty"))) for _ in range(2)]
    assert [result.exit_code for result in results] == [1, 1]
    assert results[0].output.startswith("Error: stage train_it: a row is empty\n")
    assert results[1].output == ""
    result = run(SharedStage, [], fails(ZeroDivisionError()))
    assert isinstance(result.exception, SystemExit) and not result.output


def test_without_the_launchers_store_the_first_process_tells_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, told in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        result = run(SharedStage, [], fails(InputError("a row is empty")))
        assert result.exit_code == 1 and ("a row is empty" in result.output) == told


def test_a_process_that_lost_another_ends_without_a_word():
    result = run(SharedStage, [], fails(Lost("connection closed by peer")))
    assert result.exit_code == launch.LOST and not result.output


def test_a_stage_of_several_processes_ends_as_they_did():
    killed = launch.end_of({1: -signal.SIGKILL, 0: launch.LOST}, 2)
    assert isinstance(killed, Ended) and str(killed) == "process 1 of 2 was ended by SIGKILL"
    said = launch.end_of({0: 1, 1: -signal.SIGTERM, 2: launch.LOST}, 3)
    assert isinstance(said, SystemExit) and said.code == 1
    lost = launch.end_of({0: launch.LOST, 1: -signal.SIGTERM}, 2)
    assert isinstance(lost, Ended) and str(lost) == "the 2 processes lost each other"


def test_processes_that_are_not_the_first_print_errors_alone(monkeypatch):
    for rank, told in (("0", "figures\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert run(SharedStage, [], lambda number: click.echo("figures")).output == told
