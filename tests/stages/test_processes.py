"""Training stages as DVC runs them, shared by several processes: results, errors and deaths."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from stages.base.environment import LAUNCH, SAVE_MINUTES
from stages.base.tables import BUFFERS, write_table
from stages.models.checkpoints import load_policy, save_model
from stages.models.compute import all_finite
from tests.helpers.models import buffer_row, byte_tokenizer, llama, llama_scorer, random_ids
from tests.helpers.tiny import ROOT
from tests.helpers.together import far_off, free_port
from tests.helpers.trainings import lay_out, set_knobs, words
from tests.pipeline.running import content

pytestmark = pytest.mark.slow
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), SAVE_MINUTES: "10"}
OPTIMIZE = "--round 1 --buffer data/buffer.parquet --policy models/base --reward-model models/rm"
SAME = 5e-7
MOMENTS = 5e-6


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Everything that the four training stages read.

    A Llama: GPT-2's key biases have no gradient but rounding, which Adam makes steps of.
    """
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    policy = llama(vocabulary=len(tokenizer))
    lay_out(tmp_path, policy)
    (tmp_path / "models" / "rm").mkdir()
    scorer = llama_scorer(vocabulary=len(tokenizer))
    save_model(tmp_path / "models" / "rm", scorer, tokenizer)
    rows = []
    for i in range(10):
        prompt, completion = random_ids(i // 2, 3, 1 + i % 4)
        figures = {"reward": float(i % 3), "values_old": [0.1 * i] * len(completion)}
        row = buffer_row(policy, prompt, completion, group=i // 2, sample=i % 2, **figures)
        rows.append(row | {"log_probs_ref": [p - 0.1 for p in row["log_probs_old"]]})
    write_table(tmp_path / "data" / "buffer.parquet", BUFFERS, rows, {"prompt_cursor": 5})
    return tmp_path


def command(stage: str, name: str) -> list[str]:
    """The command line of a stage, its outputs in a folder of that name."""
    options = words(stage, name) if stage != "optimize" else OPTIMIZE.split()
    if stage == "optimize":
        outputs = {"out": "model", "updates": "updates.parquet", "curve": "curve.csv"}
        outputs |= {"figures": "figures.json"}
        options += [word for k, v in outputs.items() for word in (f"--{k}", f"{name}/{v}")]
    return [sys.executable, "-m", f"stages.{stage}", *options]


def run(stage: str, name: str, **more) -> subprocess.CompletedProcess:
    environment = ENVIRONMENT | more
    return subprocess.run(command(stage, name), env=environment, text=True, capture_output=True)


LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": "all-linear"}
WAYS = {"one": {"processes": 1}, "two": {"processes": 2}, "parts": {"processes": 2, "shard": True}}


CASES = [
    *((stage, None) for stage in ("train_sft", "train_rm", "train_direct", "optimize")),
    *((stage, LORA) for stage in ("train_rm", "optimize")),
]


@pytest.mark.parametrize(
    ("stage", "lora"), CASES, ids=[f"{s}-{'adapters' if lora else 'whole'}" for s, lora in CASES]
)
def test_a_stage_of_two_processes_writes_what_one_writes(project, stage, lora):
    """Whether each holds the whole model or a part; moments too."""
    ways = [way for way in WAYS if way != "parts" or not lora or stage == "optimize"]
    for way in ways:
        knobs = {"loss": "ppo", "ppo_epochs": 2, "train_batch_size": 3, "rm__lr": 5e-4}
        knobs |= {f"{section}lora": lora for section in ("", "sft__", "rm__", "direct__")}
        set_knobs(project, **knobs | WAYS[way])
        done = run(stage, way)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 1 and not done.stderr
    one = project / "one"
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    for other in (project / way for way in ways[1:]):
        assert files == sorted(
            path.relative_to(other) for path in other.rglob("*") if path.is_file()
        )
        for file in files:
            if file.suffix == ".safetensors":
                tolerance = SAME if file.parent.name != "trainer" else MOMENTS
                assert far_off(load_file(one / file), load_file(other / file)) < tolerance, file
            if file.name == "config.json":
                assert (one / file).read_text() == (other / file).read_text()
        figures, others = (json.loads((f / "figures.json").read_text()) for f in (one, other))
        for key in figures.keys() - {"calibration", "gaps"}:
            assert others[key] == pytest.approx(figures[key], rel=1e-4, abs=1e-5), key
    assert not list(project.glob(".scratch/*"))


def test_the_same_number_of_processes_gives_the_same_bytes(project):
    set_knobs(project, processes=2)
    assert run("train_sft", "first").returncode == run("train_sft", "second").returncode == 0
    assert content(project / "first") == content(project / "second")


FAULTS = {
    "a knob": ({"sft__lr": -1.0}, "sft.lr: found -1.0"),
    # Loss or gradient: so large a rate leaves it to rounding which of them is no number first.
    "no finite step": ({"sft__lr": 1e30, "nonfinite": "stop"}, "is nan; nonfinite: stop"),
    "an input": ({}, "data/sft.parquet: not a readable Parquet file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_is_one_line_said_once(project, fault):
    changes, said = FAULTS[fault]
    set_knobs(project, processes=2, **changes)
    if not changes:
        (project / "data" / "sft.parquet").write_text("no table")
    done = run("train_sft", "out")
    assert done.returncode == 1
    assert done.stderr.count("Error: ") == 1 and "Traceback" not in done.stderr
    assert said in done.stderr and not list(project.glob("out/*"))


# Deaths.


class Running:
    """A stage of two processes that is in its training."""

    def __init__(self, folder: Path, line: list[str] | None = None, **more):
        line = line or command("train_sft", "cut")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(line, env=ENVIRONMENT | more, **pipes)
        curve = folder / "cut" / "curve.csv"
        while not (curve.exists() and curve.read_text().count("\n") > 3):
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        self.all = psutil.Process(self.process.pid).children(recursive=True)
        self.workers = [p for p in self.all if p.environ().get("RANK") in ("0", "1")]
        assert len(self.workers) == 2

    def ended(self) -> tuple[int, str]:
        """Exit code and what was said; nothing runs a few seconds after."""
        began = time.monotonic()
        _, said = self.process.communicate(timeout=60)
        while any(map(runs, self.all)):
            assert time.monotonic() - began < 20
            time.sleep(0.05)
        return self.process.returncode, said


def runs(process: psutil.Process) -> bool:
    """Whether it is there and is no zombie: an orphan's new parent may take its time."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def endless(project):
    set_knobs(project, processes=2, sft__epochs=2000)
    return project


def test_a_worker_that_is_killed_ends_the_stage_with_one_line(endless):
    for rank in ("1", "0"):
        running = Running(endless)
        next(p for p in running.workers if p.environ()["RANK"] == rank).kill()
        code, said = running.ended()
        assert code == 1 and said.count("Error: ") == 1 and "Traceback" not in said
        assert f"process {rank} of 2 was ended by SIGKILL" in said
        assert not (endless / "cut" / "model").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_state_and_the_same_command_goes_on_to_the_same_bytes(project, number):
    set_knobs(project, processes=2, sft__epochs=150)
    assert run("train_sft", "whole").returncode == 0
    running = Running(project)
    running.process.send_signal(number)
    code, said = running.ended()
    assert code == 128 + number and "Traceback" not in said
    assert not (project / "cut" / "model").exists()
    done = run("train_sft", "cut")
    assert done.returncode == 0 and done.stdout.count("goes on after step") == 1, done.stderr
    assert content(project / "cut") == content(project / "whole")


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_nothing_runs_on_where_what_started_the_stage_is_killed(endless):
    """As DVC does: a shell runs the command. And the stage itself may be killed."""
    line = " ".join(command("train_sft", "cut"))
    running = Running(endless, ["sh", "-c", f"{line}; true"])
    running.process.kill()
    running.ended()
    running = Running(endless)
    running.process.kill()
    running.ended()
    assert not (endless / "cut" / "model").exists()


# Several machines: two of torch's agents, each with a process of its own, share this folder.


def agents(port: int) -> list[str]:
    """torchrun for one of two nodes; the first that comes holds the rendezvous."""
    rendezvous = f"--rdzv-backend=c10d --rdzv-endpoint=localhost:{port} --rdzv-id=job"
    nodes = "--nnodes=2 --nproc-per-node=1 --local-addr=localhost --max-restarts=0"
    return f"{sys.executable} -m torch.distributed.run {nodes} {rendezvous}".split()


SRUN = """
import subprocess, sys

nodes = [subprocess.Popen(sys.argv[1:]) for _ in range(2)]
sys.exit(max(abs(node.wait()) for node in nodes))
"""


def test_two_nodes_that_share_a_file_system_train_as_one_machine(project):
    (project / "srun.py").write_text(SRUN)
    launcher = f"{sys.executable} srun.py {' '.join(agents(free_port()))}"
    set_knobs(project, processes=2)
    assert run("train_sft", "here").returncode == 0
    done = run("train_sft", "there", **{LAUNCH: launcher})
    assert done.returncode == 0, done.stderr
    assert content(project / "here") == content(project / "there")
    model = load_policy(project / "there" / "model", "sdpa", "cpu")
    assert all(map(all_finite, model.parameters()))


def test_a_launcher_of_another_number_is_refused_in_one_line(project):
    (project / "srun.py").write_text(SRUN)
    launcher = f"{sys.executable} srun.py {' '.join(agents(free_port()))}"
    set_knobs(project, processes=3)
    done = run("train_sft", "out", **{LAUNCH: launcher})
    assert done.returncode != 0
    assert done.stderr.count("Error: stage train_sft: params.yaml: processes: found 3") == 1
