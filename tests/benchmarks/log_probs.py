"""Seconds and memory of log-probs, entropy and gradients of many tokens, whole and by pieces.

    python -m tests.benchmarks.log_probs --way pieces
    python -m tests.benchmarks.log_probs --way whole

4,096 tokens, 576 wide, a vocabulary of 49,152 (SmolLM2's head), forwards and backwards. `mb` is the
peak above what stood in memory before.
"""

import argparse
import json
import resource
import time

import torch
from torch import nn
from transformers import PretrainedConfig

from stages.models import log_probs


class Head(nn.Module):
    """What head_log_probs asks of a language model."""

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.config = PretrainedConfig(vocab_size=vocabulary)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=["whole", "pieces"], required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.way == "whole":
        log_probs.PIECE = args.tokens * args.vocabulary
    model = Head(args.width, args.vocabulary)
    hidden = torch.randn(args.tokens, args.width, requires_grad=True)
    ids = torch.randint(args.vocabulary, (args.tokens,))
    before, began = peak_mb(), time.perf_counter()
    found, _ = log_probs.head_log_probs(model, hidden, ids, 1.0, entropy=True)
    found.sum().backward()
    seconds, mb = time.perf_counter() - began, peak_mb() - before
    print(json.dumps({"way": args.way, "seconds": round(seconds, 2), "mb": round(mb)}))


if __name__ == "__main__":
    main()
