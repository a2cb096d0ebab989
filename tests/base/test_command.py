"""Around every stage: one line for bad input, an end when its parent ends, silence in logs."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from textwrap import dedent

import click
import pytest
import torch
from click.testing import CliRunner

from stages.base import command
from stages.base.command import Stage, progress, say
from stages.base.errors import InputError, MissingFile
from stages.training.steps import NonFinite
from tests.helpers.tiny import ROOT, plain


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
        "Next: mend that, then `dvc repro`: stages that ended well are not run again\n"
    )


def test_n07_a_file_that_was_not_fetched_names_the_command_that_fetches_it(outcome):
    result = outcome(MissingFile("data/figures/evaluate/sft.json", "a stage's figures as JSON"))
    assert result.exit_code == 1
    head, advice = result.output.splitlines()
    assert head.endswith(
        "data/figures/evaluate/sft.json: missing; expected a stage's figures as JSON"
    )
    assert advice.startswith("Next: `dvc repro --pull` fetches")


def test_a_loss_that_is_not_finite_has_advice_of_its_own(outcome):
    result = outcome(NonFinite("the loss is nan"))
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "Error: stage rollout: the loss is nan",
        f"Next: {NonFinite.advice}",
    ]
    assert "lr" in NonFinite.advice


def test_a_full_accelerator_names_the_knobs_that_make_batches_smaller(outcome):
    result = outcome(torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"))
    assert result.exit_code == 1
    error, advice = result.output.splitlines()
    assert error == "Error: stage rollout: CUDA out of memory."
    assert advice.startswith("Next: ")
    knobs = plain(ROOT / "params.yaml")
    for name in ("train_batch_size", "batch_acc", "rollout_batch_size", "score_batch_size"):
        assert name in advice and name in knobs
    assert "evaluate.batch_size" in advice and "batch_size" in knobs["evaluate"]


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
    lines = result.output.splitlines()
    assert len(lines) == 2 and error.strerror in lines[0] and lines[1].startswith("Next: ")
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
    for bar in (progress(iter([1, 2]), "rollout", 2), progress([], "none")):
        for _ in bar:
            bar.tell(5, loss=0.5, reward=None)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_progress_bar_tells_the_rate_figures_so_far_and_time_left(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    bar = progress(iter(range(4)), "rollout 1", 4)
    bar.ncols, bar.dynamic_ncols, bar.mininterval, bar.smoothing = 120, None, 0, 0
    for index in bar:
        bar.start_t -= 10  # as if ten seconds went by
        bar.tell(100, reward=index / 4, kl=None)
    seen = screen.getvalue()
    assert re.search(r"rollout 1: +50%.* 2/4 \[00:20<00:[12]\d,.*tokens/s=10, reward=0.25\]", seen)
    assert "kl" not in seen


STAGE = """
    import os, sys, time
    import click
    from stages.base.command import Stage

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
    monkeypatch.setattr(command.os, "getppid", lambda: 1)
    monkeypatch.setattr(command.ctypes, "CDLL", lambda *a, **k: Library())
    with pytest.raises(SystemExit):
        command.stop_with_parent()


class Library:
    def prctl(self, *arguments):
        return 0
