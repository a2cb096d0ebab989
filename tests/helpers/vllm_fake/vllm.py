"""What vllm_engine.py uses of vLLM, over a policy that finds all ids equally likely.

FAKE_VLLM plants a fault: `start`, `die`, `stray` (a line on stdout that is no answer), `unlike`.
"""

import json
import math
import os
import random
from pathlib import Path
from types import SimpleNamespace

__version__ = "fake"
VOCABULARY = 48  # of a model that is no folder
FAULT = os.environ.get("FAKE_VLLM")


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, **options):
        if FAULT == "start":
            raise ValueError(f"cannot serve {options['model']}\nand much more")
        self.remembers, config = False, Path(options["model"], "config.json")
        self.size = json.loads(config.read_text())["vocab_size"] if config.exists() else VOCABULARY
        assert options["skip_tokenizer_init"] and options["enforce_eager"]
        assert options["logprobs_mode"] == "processed_logprobs"

    def reset_prefix_cache(self):
        self.remembers = False

    def generate(self, prompts, params, use_tqdm, lora_request):
        assert not self.remembers and not use_tqdm
        self.remembers = True
        if FAULT == "die":
            print("the reason stands here", flush=True)
            os._exit(3)
        if FAULT == "stray":
            print("INFO a library talks", flush=True)
        pairs = zip(prompts, params, strict=True)
        return [
            SimpleNamespace(outputs=[row(p["prompt_token_ids"], asked, self.size)])
            for p, asked in pairs
        ]


def row(prompt: list[int], asked: SamplingParams, size: int) -> SimpleNamespace:
    """Ids by the seed and the prompt alone, up to a stop id or the cap."""
    assert asked.logprobs == 0 and asked.ignore_eos and not asked.detokenize
    draw, ids = random.Random(f"{asked.seed} {prompt}"), []
    while len(ids) < asked.max_tokens and not set(ids) & set(asked.stop_token_ids):
        ids.append(draw.randrange(size))
    log_prob = -math.log(size) - (FAULT == "unlike")
    found = [{id: SimpleNamespace(logprob=log_prob)} for id in ids]
    reason = "stop" if ids[-1] in asked.stop_token_ids else "length"
    return SimpleNamespace(token_ids=tuple(ids), logprobs=found, finish_reason=reason)
