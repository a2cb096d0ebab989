"""How much memory a model takes in each stage, and which knobs fit a card:

    python tools/memory.py models/base 24 80

The folder holds the model's config.json, params.yaml the knobs, and the numbers are cards in GB, of
10^9 bytes. What is counted, and what was measured beside it: docs/memory.md.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
PIECE = 4 << 24  # bytes of a piece of the logits (stages/models/log_probs.py)
PIECES = 5  # copies of it that stand at once, at most
GROWTH = 1.25  # of a cache, which keeps room behind what it holds (stages/rollouts/cache.py)
LOGITS = 28  # bytes of a row's logits in sampling, each copy counted
USED = 0.9  # of a card; the rest goes to the library and to gaps between tensors


@dataclass(frozen=True)
class Shape:
    """A decoder with gated feed-forward layers, as Llama, Mistral and Qwen have them."""

    layers: int
    hidden: int
    inner: int  # of the feed-forward layers
    queries: int  # of all query heads together
    keys: int  # of all key heads together
    vocabulary: int
    tied: bool

    @property
    def parameters(self) -> int:
        """Without biases: a thousandth of the weights."""
        layer = 2 * self.hidden * (self.queries + self.keys) + 3 * self.hidden * self.inner
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (layer + 2 * self.hidden) + embeddings + self.hidden

    def kept(self, bf16: bool, recomputed: bool) -> int:
        """Bytes that a training pass keeps of one token for its backward pass.

        Layers that are computed anew keep what they were given, and one at a time the rest.
        """
        parts = (self.hidden, self.inner, self.queries, self.keys)
        each = (26, 8, 4, 4) if bf16 else (24, 16, 8, 8)
        layer = sum(bytes_ * part for bytes_, part in zip(each, parts, strict=True))
        return 4 * self.hidden * self.layers + layer if recomputed else layer * self.layers

    def cache(self, bf16: bool) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.keys * (2 if bf16 else 4)


def shape_of(config: dict) -> Shape:
    """Fields of a config.json -> `Shape`; SystemExit for a model of another kind."""
    config = config.get("text_config") or config
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        width = config.get("head_dim") or hidden // heads
        return Shape(
            config["num_hidden_layers"],
            hidden,
            config["intermediate_size"],
            heads * width,
            (config.get("num_key_value_heads") or heads) * width,
            config["vocab_size"],
            config.get("tie_word_embeddings", False),
        )
    except KeyError as field:
        raise SystemExit(f"config.json: no field {field}, expected a model like Llama") from None


@dataclass(frozen=True)
class Need:
    """Bytes of a stage: what it takes however few tokens it reads, and for each token more."""

    fixed: float
    token: float

    def of(self, tokens: int) -> float:
        return self.fixed + tokens * self.token

    def tokens(self, card: float) -> int:
        """Most tokens that a card of so many bytes has room for; below 1: none."""
        return int((USED * card - self.fixed) / self.token)


def training(shape: Shape, knobs: dict) -> Need:
    """A training stage, of one model: weights, gradient and two moments in float32."""
    bf16 = knobs["precision"] == "bf16"
    cast = 2 if bf16 else 0  # autocast keeps a copy of the weights
    head = 4 * shape.vocabulary * shape.hidden  # its gradient, before it is added up
    fixed = (16 + cast) * shape.parameters + head + PIECES * PIECE
    return Need(fixed, shape.kept(bf16, knobs["gradient_checkpointing"]))


def decoding(shape: Shape, knobs: dict) -> Need:
    """`rollout` and `evaluate`: weights, the cache, and the logits of a row's next token."""
    bf16 = knobs["precision"] == "bf16"
    longest = knobs["prompts"]["max_length"] + knobs["max_new_tokens"]
    logits = LOGITS * shape.vocabulary / longest  # a token's share of its row's
    return Need((2 if bf16 else 4) * shape.parameters, GROWTH * shape.cache(bf16) + logits)


def report(shape: Shape, knobs: dict, cards: list[float]) -> str:
    """A line for each stage: what the knobs come to, and the most tokens for each card."""
    row = knobs["prompts"]["max_length"] + knobs["max_new_tokens"]
    batches = {
        "optimize": (training, "train_max_tokens", knobs["train_batch_size"] * row),
        "train_sft": (
            training,
            "train_max_tokens",
            knobs["sft"]["train_batch_size"] * knobs["sft"]["max_length"],
        ),
        "rollout": (decoding, "forward_max_tokens", knobs["rollout_batch_size"] * row),
    }
    lines = [f"{shape.parameters / 1e9:.2f}B parameters"]
    for stage, (need_of, knob, tokens) in batches.items():
        need, limit = need_of(shape, knobs), knobs[knob]
        tokens = tokens if limit is None else min(tokens, max(limit, row))
        line = f"{stage:10}{tokens:>10,} tokens a pass: {need.of(tokens) / 1e9:.1f} GB"
        for card in cards:
            most = need.tokens(card * 1e9)
            fits = f"{knob} up to {most:,}" if most >= row else f"a row of {row:,} does not fit"
            line += f"; {card:g} GB: {fits}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    config = json.loads((Path(sys.argv[1]) / "config.json").read_text(encoding="utf-8"))
    knobs = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    print(report(shape_of(config), knobs, [float(word) for word in sys.argv[2:]]))


if __name__ == "__main__":
    main()
