"""Work by several processes: the order of the batches, errors, and no process left behind."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import count, islice

import psutil
import pytest

from stages.base.errors import InputError
from stages.rows import workers
from stages.rows.workers import in_order
from tests.helpers.tiny import ROOT


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(workers, "_cores", lambda: 2)


def slow_first(batch: list[int]) -> tuple[int, list[int]]:
    time.sleep(0.2 if batch[0] == 2 else 0)
    return os.getpid(), [10 * number for number in batch]


def refuse(row: int, batch: list[int]) -> list[int]:
    if row in batch:
        raise InputError(f"rows.jsonl: row {row}: odd")
    return batch


def test_results_come_in_the_order_of_the_batches_whoever_is_done_first():
    results = list(in_order(slow_first, [[i, i + 1] for i in range(0, 20, 2)]))
    assert [numbers for _, numbers in results] == [[10 * i, 10 * i + 10] for i in range(0, 20, 2)]
    processes = [process for process, _ in results]
    assert processes[0] == os.getpid() and os.getpid() not in processes[1:]
    assert len(set(processes[1:])) == 2


@pytest.mark.parametrize("batches", [[], [[1, 2]]])
def test_up_to_one_batch_starts_no_process(batches):
    results = list(in_order(slow_first, batches))
    assert [process for process, _ in results] == [os.getpid()] * len(batches)


def test_batches_are_read_only_a_little_ahead():
    read = []

    def endless():
        for number in count():
            read.append(number)
            yield [number]

    assert len(list(islice(in_order(slow_first, endless()), 3))) == 3
    assert len(read) <= 1 + 3 + 2 * 2


def test_an_error_of_a_batch_comes_where_its_result_would():
    found = in_order(partial(refuse, 5), [[3], [4], [5], [6]])
    assert [next(found), next(found)] == [[3], [4]]
    with pytest.raises(InputError, match=r"rows.jsonl: row 5: odd") as error:
        next(found)
    assert error.value.advice


ENDLESS = """
from itertools import repeat
from stages.rows import workers
workers._cores = lambda: 2
for result in workers.in_order(abs, repeat(1)):
    print(result, flush=True)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent's end"
)
def test_no_process_outlives_one_that_is_killed():
    command = [sys.executable, "-c", ENDLESS]
    stage = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    for _ in range(3):
        stage.stdout.readline()
    children = psutil.Process(stage.pid).children(recursive=True)
    assert len(children) == 2
    stage.send_signal(signal.SIGKILL)
    stage.wait()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert len(gone) == 2 and not alive
