"""Sampling by vLLM: engines behind pipes that a stage starts, or a server that runs already.

vLLM wants other packages than training, so it lives in an environment of its own. Prompt ids go
there, sampled ids and their log-probs come back, never text. `log_probs_old` are not taken from
there: the policy states them anew by the one log-prob rule, and `optimize` corrects for the
difference (rl/correction.py).

Letters: U prompts, G completions of each, N = U * G rows, T completion tokens.
"""

import json
import math
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib import error, request

import click
import torch
from transformers import PreTrainedModel

from stages.base.chunks import chunks
from stages.base.environment import VLLM, engine_variables
from stages.base.errors import InputError
from stages.base.randomness import derive
from stages.models.compute import vocabulary_of
from stages.models.scorers import by_parts, reference_log_probs
from stages.rollouts import vllm_engine
from stages.rollouts.engine import Prompt
from stages.rollouts.sampling import Completion, Sampling

# Tokens, padding included, of a forward pass that states log-probs, where no knob says how many.
TOKENS = 2**15
# Mean of |log old - log sampler|, in nats a token, up to which an engine serves the same policy.
# Seen: 1e-5 in float32, 0.05 in bf16 (SmolLM2); policies of two rounds are 0.1 apart.
SAME = {"float32": 0.01, "bf16": 0.25}
TRIED = 8  # prompts, and tokens of each, that are asked for before anything else
LINE = 300  # characters of a line that is shown of what an engine printed
PATIENCE = 3600  # seconds for one answer of a server
AT_ONCE = 256  # requests to a server
ROUNDING = 1e-3  # of a log-prob, which lies above 0 by rounding alone


@dataclass
class VllmSampler:
    """Takes the place of our own sampling in an `Engine`; a context that ends what it started.

    `where` is the interpreter of vLLM's environment or the address of a server, `options` what
    engines start with. Nothing starts before the first rows are asked for.
    """

    where: str
    options: dict
    threads: int
    policy: PreTrainedModel
    sampling: Sampling
    num_rollouts: int
    seed: int
    precision: str
    source: "Engines | Server | None" = field(default=None, init=False)

    def __enter__(self) -> "VllmSampler":
        return self

    def __exit__(self, *_) -> None:
        if self.source is not None:
            self.source.close()

    def __call__(
        self, prompts: Sequence[Prompt], round_number: int, positions: Sequence[int]
    ) -> list[list[Completion]]:
        """(U prompts at U positions of the order) -> U lists of G completions.

        Each row has a seed of its own by round, position and number, as each of our own draws has.
        """
        if self.source is None:
            self.source = connect(self.where, self.options, self.threads, self.policy.device)
            self.check_policy([prompt.ids for prompt in prompts[:TRIED]])
        numbers = range(self.num_rollouts)
        ids = [prompt.ids for prompt in prompts for _ in numbers]
        names = [("rollout", round_number, "vllm", p, n) for p in positions for n in numbers]
        found = self.rows(ids, [derive(self.seed, *name) for name in names], self.sampling)
        return list(chunks(found, self.num_rollouts))

    def check_policy(self, prompts: Sequence[list[int]]) -> None:
        """Raise InputError where a few log-probs are not those of the policy."""
        cap = min(TRIED, self.sampling.max_new_tokens)
        found = self.rows(prompts, list(range(len(prompts))), self.sampling, cap)
        gaps = [
            abs(old - sampler)
            for row in found
            for old, sampler in zip(row.log_probs, row.log_probs_sampler, strict=True)
        ]
        gap, most = sum(gaps) / len(gaps), SAME[self.precision]
        if not gap <= most:
            raise InputError(
                f"{VLLM}: {self.where} gives log-probs that are {gap:.2g} nats a token off those of"
                f" {self.options['model']}, expected at most {most}: another policy, dtype or"
                " --logprobs-mode than processed_logprobs"
            )

    def rows(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        cap: int | None = None,
    ) -> list[Completion]:
        """(N prompts), (N seeds) -> N completions, with log-probs of policy and sampler."""
        cap = cap or sampling.max_new_tokens
        asked = {"temperature": sampling.temperature, "tokens": cap, "stops": sampling.stop_ids}
        rows = self.source.rows({"prompts": prompts, "seeds": seeds, **asked})
        check_rows(self.where, rows, len(prompts), asked, vocabulary_of(self.policy))
        old = log_probs_of(self.policy, prompts, rows, sampling)
        return [
            Completion(row["ids"], log_probs, row["finished"], row["log_probs"])
            for row, log_probs in zip(rows, old, strict=True)
        ]


def log_probs_of(
    policy: PreTrainedModel, prompts: Sequence[list[int]], rows: Sequence[dict], sampling: Sampling
) -> list[list[float]]:
    """(N prompts), (N rows) -> N lists: the policy's log-probs of their ids, by the one rule."""
    whole = [
        {"prompt_ids": prompt, "completion_ids": row["ids"]}
        for prompt, row in zip(prompts, rows, strict=True)
    ]

    def measure(part: Sequence[dict]) -> list[list]:
        return [reference_log_probs(policy, part, sampling.temperature)]

    return by_parts(measure, whole, sampling.max_tokens or TOKENS)[0]


def check_rows(where: str, rows: list[dict], count: int, asked: dict, vocabulary: int) -> None:
    """Raise InputError for rows that are not what was asked for: `count`, by cap and stop ids."""

    def refuse(place: object, found: object, expected: object) -> None:
        raise InputError(f"{VLLM}: {where}: {place}: found {found}, expected {expected}")

    if len(rows) != count:
        refuse("answer", f"{len(rows)} rows", count)
    for number, row in enumerate(rows):
        place, ids, log_probs = f"row {number}", row["ids"], row["log_probs"]
        if not 1 <= len(ids) <= asked["tokens"]:
            refuse(place, f"{len(ids)} ids", f"1 to {asked['tokens']}")
        if len(log_probs) != len(ids):
            refuse(place, f"{len(log_probs)} log-probs", f"{len(ids)}, one for each id")
        if not all(0 <= id < vocabulary for id in ids):
            refuse(place, f"ids up to {max(ids)}", f"ids from 0 to {vocabulary - 1}")
        if not all(x is not None and math.isfinite(x) and x <= ROUNDING for x in log_probs):
            refuse(place, f"log-probs {log_probs}", "finite numbers, 0 or below")
        ends = [place for place, id in enumerate(ids) if id in asked["stops"]]
        wanted = [len(ids) - 1] if row["finished"] else []
        if ends != wanted or not (row["finished"] or len(ids) == asked["tokens"]):
            refuse(
                place,
                f"{len(ids)} ids, stop ids at {ends}, finished {row['finished']}",
                f"a stop id of {list(asked['stops'])} at the end alone, or {asked['tokens']} ids",
            )


def connect(where: str, options: dict, threads: int, device: torch.device) -> "Engines | Server":
    """Start engines under the interpreter `where`, one a GPU, or reach the server at an address."""
    if where.startswith(("http://", "https://")):
        return Server(where)
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    environments = [engine_variables(threads, gpu) for gpu in range(count) or [None]]
    return Engines(where, options, environments)


class Engines:
    """Processes of vllm_engine.py, which share the rows of a call in slices, in their order."""

    def __init__(self, interpreter: str, options: dict, environments: Sequence[dict]):
        self.interpreter, self.started = interpreter, []
        try:
            for environment in environments:
                self.started.append(self._start(environment))
            versions = self._answers([options] * len(self.started))
        except BaseException:
            self.close()
            raise
        click.echo(f"vLLM {versions[0]['version']}, engines: {len(versions)}")

    def _start(self, environment: dict) -> tuple[subprocess.Popen, object]:
        log = tempfile.TemporaryFile("w+", errors="replace")
        command = [self.interpreter, "-I", str(Path(vllm_engine.__file__))]
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        try:
            return subprocess.Popen(command, env=environment, **pipe), log
        except OSError as problem:
            raise InputError(
                f"{VLLM}: {self.interpreter}: {problem.strerror}; expected the python of an"
                " environment that has vLLM (`make vllm`), or http://..."
            ) from problem

    def rows(self, asked: dict) -> list[dict]:
        """The rows of a call, in the order of its prompts."""
        size = math.ceil(len(asked["prompts"]) / len(self.started))
        parts = zip(chunks(asked["prompts"], size), chunks(asked["seeds"], size), strict=True)
        calls = [asked | {"prompts": prompts, "seeds": seeds} for prompts, seeds in parts]
        return [row for answer in self._answers(calls) for row in answer["rows"]]

    def _answers(self, lines: Sequence[dict]) -> list[dict]:
        """Ask as many engines as there are lines, all before the first one is heard."""
        engines = self.started[: len(lines)]
        for (process, log), line in zip(engines, lines, strict=True):
            try:
                print(json.dumps(line), file=process.stdin, flush=True)
            except BrokenPipeError:
                self._fail("it ended", log)
        return [self._answer(*engine) for engine in engines]

    def _answer(self, process: subprocess.Popen, log) -> dict:
        line = process.stdout.readline()
        if not line:
            self._fail(f"it ended with exit code {process.wait()}", log)
        found = json.loads(line)
        if "error" in found:
            self._fail(found["error"], log)
        return found

    def _fail(self, problem: str, log) -> None:
        log.seek(0)
        for line in log.read().splitlines()[-20:]:
            click.echo(line[:LINE], err=True)
        raise InputError(f"{VLLM}: {self.interpreter}: vLLM failed: {problem}")

    def close(self) -> None:
        """End the engines; one that does not listen is killed."""
        for process, log in self.started:
            process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
            log.close()


class Server:
    """An OpenAI-compatible server that takes prompts as ids and returns ids: vLLM's own."""

    def __init__(self, address: str):
        self.address = address.rstrip("/").removesuffix("/v1")
        models = self._ask("/v1/models")["data"]
        self.model = models[0]["id"]
        click.echo(f"vLLM server {self.address}, model {self.model}")

    def rows(self, asked: dict) -> list[dict]:
        """The rows of a call: one request for each, since a seed is a request's."""
        common = {
            "model": self.model,
            "temperature": asked["temperature"],
            "max_tokens": asked["tokens"],
            "stop_token_ids": list(asked["stops"]),
            "ignore_eos": True,  # what ends a row is said above
            "logprobs": 0,  # the sampled id's alone
            "return_token_ids": True,
            "skip_special_tokens": False,
            # Defaults that a model's folder may set on a server.
            **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
            **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
        }
        pairs = zip(asked["prompts"], asked["seeds"], strict=True)
        bodies = [common | {"prompt": list(ids), "seed": seed} for ids, seed in pairs]
        with ThreadPoolExecutor(min(AT_ONCE, len(bodies))) as pool:
            return list(pool.map(self._row, bodies))

    def _row(self, body: dict) -> dict:
        (choice,) = self._ask("/v1/completions", body)["choices"]
        if choice.get("token_ids") is None or choice.get("logprobs") is None:
            raise InputError(
                f"{VLLM}: {self.address}: no token_ids or logprobs in a choice; expected a server"
                " of vLLM 0.10.2 or later"
            )
        log_probs, finished = (
            choice["logprobs"]["token_logprobs"],
            choice["finish_reason"] == "stop",
        )
        return {"ids": choice["token_ids"], "log_probs": log_probs, "finished": finished}

    def _ask(self, path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        asked = request.Request(self.address + path, data, {"Content-Type": "application/json"})
        try:
            with request.urlopen(asked, timeout=PATIENCE) as answer:
                return json.load(answer)
        except error.HTTPError as problem:
            said = problem.read(300).decode(errors="replace")
            raise InputError(f"{VLLM}: {self.address}{path}: {problem.code} {said}") from problem
        except (OSError, ValueError) as problem:
            raise InputError(
                f"{VLLM}: {self.address}{path}: {problem}; expected an OpenAI-compatible server"
            ) from problem

    def close(self) -> None:
        """The server goes on: it was there before."""
