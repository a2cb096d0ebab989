"""Around every stage: one line for bad input, an end when its parent ends, silence in logs."""

import os
import signal
import subprocess
import sys
import time
from textwrap import dedent

import click
import pytest
from click.testing import CliRunner

from stages.core.errors import InputError
from stages.store.common import command
from stages.store.common.command import Stage, progress, say
from tests.tiny import ROOT


@pytest.fixture
def outcome(monkeypatch):
    """What a stage raises -> how its command ends."""
    monkeypatch.setattr(command, "stop_with_parent", lambda: None)

    def run(error):
        @click.command("rollout", cls=Stage)
        def stage():
            if error is not None:
                raise error

        return CliRunner().invoke(stage)

    return run


def test_a_stage_that_ends_well_ends_with_0(outcome):
    assert outcome(None).exit_code == 0


def test_bad_input_ends_in_one_line_and_exit_code_1(outcome):
    result = outcome(InputError("data/x.parquet: column 'ids' is missing, expected list"))
    assert result.exit_code == 1
    assert result.output == (
        "Error: stage rollout: data/x.parquet: column 'ids' is missing, expected list\n"
    )


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "models/sft/config.json"),
        PermissionError(13, "Permission denied", "models/sft"),
        OSError(28, "No space left on device", "data/sft.parquet"),
        OSError(28, "Error writing bytes to file"),
    ],
)
def test_a_file_that_cannot_be_read_or_written_ends_in_one_line(outcome, error):
    result = outcome(error)
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1 and error.strerror in result.output
    assert error.filename is None or error.filename in result.output


@pytest.mark.parametrize("error", [ValueError("a fault"), KeyError("x"), OSError("no errno")])
def test_a_fault_of_the_code_keeps_its_traceback(outcome, error):
    result = outcome(error)
    assert result.exit_code == 1 and result.exception is error


def test_figures_are_one_line_without_nested_or_undefined_ones(capsys):
    say({"loss": 0.123456, "rows": 3, "dropped_by_reason": {"x": 1}, "kl": None}, round=2)
    assert capsys.readouterr().out == "round 2  loss 0.1235  rows 3\n"


def test_a_progress_bar_is_silent_where_stderr_is_no_terminal(capsys):
    assert list(progress(iter([1, 2]), "rollout", 2)) == [1, 2]
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


STAGE = """
    import os, sys, time
    import click
    from stages.store.common.command import Stage

    @click.command(cls=Stage)
    def stage():
        print(os.getpid(), flush=True)
        time.sleep(60)

    stage()
"""
PARENT = """
    import subprocess, sys
    subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_stage_ends_when_the_process_that_started_it_is_killed(sign):
    parent = subprocess.Popen(
        [sys.executable, "-c", dedent(PARENT), dedent(STAGE)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    stage = int(parent.stdout.readline())
    try:
        assert alive(stage)
        parent.send_signal(sign)
        parent.wait(10)
        deadline = time.monotonic() + 10
        while alive(stage) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(stage)
    finally:
        parent.stdout.close()
        if alive(stage):
            os.kill(stage, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_stage_whose_parent_has_already_ended_does_not_start(monkeypatch):
    parents = iter([100, 1])
    monkeypatch.setattr(command.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(command.ctypes, "CDLL", lambda *a, **k: Library())
    with pytest.raises(SystemExit):
        command.stop_with_parent()


class Library:
    def prctl(self, *arguments):
        return 0
