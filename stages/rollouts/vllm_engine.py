"""One vLLM engine behind a pipe: `python vllm_engine.py`, run by an interpreter that has vLLM.

That is another environment than the pipeline's, so this file imports the standard library and vllm
alone. Each line in and each line out is one JSON object. First how to start, then calls:

    {"model", "adapter", "device", "dtype", "positions", "trust"}  ->  {"version"}
    {"prompts", "seeds", "temperature", "tokens", "stops"}         ->  {"rows"}, one for each prompt

`prompts` are lists of ids, `seeds` a whole number each, `tokens` the cap on new tokens, `stops` the
ids that end a row. A row is {"ids", "log_probs", "finished"}: every id that was sampled, the end's
too, its log-prob in nats at that temperature, and whether an end came. Where a call fails, the
answer is {"error": one line}. The engine ends with its stdin.
"""

import ctypes
import json
import os
import signal
import sys
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # room for adapters that vLLM can be asked for


def main() -> None:
    """Answer line by line until there are none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the stage
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    engine = None
    for line in sys.stdin:
        try:
            if engine is None:
                engine, found = start(json.loads(line))
            else:
                found = {"rows": engine.rows(json.loads(line))}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}".strip().partition("\n")[0]}
        print(json.dumps(found), file=answers, flush=True)


def start(options: dict) -> tuple["Engine", dict]:
    """Load the model; a policy that is an adapter is served over its base as it is."""
    import vllm

    adapter = options["adapter"]
    llm = vllm.LLM(
        model=options["model"],
        dtype=options["dtype"],
        max_model_len=options["positions"],
        trust_remote_code=options["trust"],
        skip_tokenizer_init=True,  # ids in, ids out
        generation_config="vllm",  # sampling defaults of the folder stay unread
        logprobs_mode="processed_logprobs",  # of the logits over the temperature
        enforce_eager=True,
        disable_log_stats=True,
        enable_lora=adapter is not None,
        max_lora_rank=next(r for r in RANKS if adapter is None or r >= adapter["rank"]),
        **of_device(options["device"]),
    )
    request = None
    if adapter is not None:
        from vllm.lora.request import LoRARequest

        request = LoRARequest("policy", 1, adapter["folder"])
    return Engine(llm, request), {"version": vllm.__version__}


def of_device(device: str) -> dict:
    """Of a GPU, on which the policy may lie too, most of what is free; else 1 GiB for keys and
    values, unless VLLM_CPU_KVCACHE_SPACE says otherwise.

    On a processor a prompt that is read in parts would set back its generator, which fails there.
    """
    if device != "cuda":
        return {"kv_cache_memory_bytes": 2**30, "enable_chunked_prefill": False}
    import torch

    free, total = torch.cuda.mem_get_info()
    return {"gpu_memory_utilization": round(0.8 * free / total, 3)}


@dataclass(frozen=True)
class Engine:
    """vLLM with a model in it, and the adapter that requests go through, if there is one."""

    llm: object
    adapter: object

    def rows(self, asked: dict) -> list[dict]:
        """A row for each prompt.

        Each request draws from its own seed, and what the engine remembers of earlier prompts is
        forgotten first: the same call gives the same rows whatever was asked before.
        """
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        requests = [
            SamplingParams(
                temperature=asked["temperature"],
                max_tokens=asked["tokens"],
                seed=seed,
                logprobs=0,  # the sampled id's alone
                ignore_eos=True,  # what ends a row is said here
                stop_token_ids=asked["stops"],
                detokenize=False,
            )
            for seed in asked["seeds"]
        ]
        found = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in asked["prompts"]],
            requests,
            use_tqdm=False,
            lora_request=self.adapter,
        )
        return [_row(output.outputs[0]) for output in found]


def _row(output) -> dict:
    ids = list(output.token_ids)
    log_probs = [found[id].logprob for id, found in zip(ids, output.logprobs, strict=True)]
    return {"ids": ids, "log_probs": log_probs, "finished": output.finish_reason == "stop"}


if __name__ == "__main__":
    main()
