"""Merge a folder of adapters into a whole model: `python -m stages.merge models/policy/6 OUT`.

No stage: `dvc repro` neither runs it nor knows its output. Each adapter is added to a copy of the
weights that it stands beside; the base stays as it is. What it writes loads without peft, and
rounds off the sum of both: log-probs differ by rounding.
"""

from pathlib import Path

import click
import torch

from stages.base.bases import base_of
from stages.base.errors import InputError
from stages.base.files import replacing
from stages.base.spelling import spelled_out
from stages.base.tokenizers import load_tokenizer
from stages.models.adapters import merge
from stages.models.checkpoints import load_policy, load_scorer, save_model


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--scorer", is_flag=True, help="A reward model or critic, with its head.")
@click.option("--trust-remote-code", "trust", is_flag=True, help="Run code that the base brings.")
def merge_adapters(folder: Path, out: Path, scorer: bool, trust: bool) -> None:
    """Write FOLDER's base with its adapters added as a whole model into OUT."""
    try:
        if out.exists():
            raise InputError(f"{out}: is there already; expected a new folder")
        if base_of(folder) == folder:
            raise InputError(f"{folder}: no adapter_config.json; expected a folder of adapters")
        load = load_scorer if scorer else load_policy
        model = load(folder, "eager", torch.device("cpu"), trust)
        merge(model)
        with replacing(out, folder=True) as temporary:
            save_model(temporary, model, load_tokenizer(folder, trust))
    except InputError as error:
        raise click.ClickException(spelled_out(str(error))) from error
    click.echo(f"{out}: {base_of(folder)} with the adapters of {folder}")


if __name__ == "__main__":
    merge_adapters()
