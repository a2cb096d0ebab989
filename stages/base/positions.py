"""How long a row a model takes, by its config alone: a stage that only tokenizes loads no model."""

from pathlib import Path

import click
from transformers import AutoConfig, PretrainedConfig

# What configs call it; transformers answers to the first name for n_positions too.
NAMES = ("max_position_embeddings", "max_seq_len")


def positions_of(config: PretrainedConfig) -> int | None:
    """Most tokens of a row; None where the config names no limit.

    A limit for every model that states one: learned positions end there with an error, rotary ones
    go on untrained.
    """
    config = config.get_text_config()
    stated = (getattr(config, name, None) for name in NAMES)
    return next((most for most in stated if isinstance(most, int) and most > 0), None)


def longest_row(folder: Path, max_length: int, knob: str, trust: bool = False) -> int:
    """`max_length`, or the positions of a model folder where those are fewer, which is printed."""
    most = positions_of(AutoConfig.from_pretrained(folder, trust_remote_code=trust))
    if most is None or most >= max_length:
        return max_length
    click.echo(f"{knob}: {max_length}, but {folder} has {most} positions: rows are cut there")
    return most
