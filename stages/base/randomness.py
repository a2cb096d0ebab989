"""Every random stream has a name, (seed, stage, round, purpose, ...); no two names share a stream.

Streams are derived, not carried along: a round that starts from a saved policy continues exactly
where one long run would be, and logging or progress bars draw from none of them.
"""

import hashlib
import random

import torch


def derive(seed: int, *names: object) -> int:
    """(seed, names) -> an integer in [0, 2^63), by SHA-256 of their text."""
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: object) -> torch.Generator:
    """A CPU generator for the stream of that name."""
    return torch.Generator().manual_seed(derive(seed, *names))


def python_random(seed: int, *names: object) -> random.Random:
    """The standard library's generator for the stream of that name."""
    return random.Random(derive(seed, *names))


def seed_everything(seed: int, *names: object) -> None:
    """Seed the global generators, from which new weights and dropout draw."""
    from accelerate.utils import set_seed

    set_seed(derive(seed, *names) % 2**32)


def shuffled(count: int, seed: int, *names: object) -> list[int]:
    """A permutation of range(count) by the stream of that name."""
    return torch.randperm(count, generator=generator(seed, *names)).tolist()
