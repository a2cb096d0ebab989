"""Stage `prepare_model`: bring the base model into one form, whatever it was.

Reads   models/source, where model.source lies in it
Knobs   model, seed
Writes  models/base: a Hugging Face folder in float32 with a fast tokenizer, a pad token (none that
        ends a turn, where there is another), and every stop token named

The default is a small random Llama over bytes; a hub id, a local folder or a GGUF file do as well.
Under models/source they are a dependency; elsewhere they could change unseen, and a line says so.
"""

from pathlib import Path

import click
import torch

from stages.base import params
from stages.base.clones import bring_sources
from stages.base.command import Stage, paths, say
from stages.base.files import replacing
from stages.base.randomness import seed_everything
from stages.knobs.prepare_model import Knobs
from stages.models import tiny
from stages.models.checkpoints import save_model
from stages.sources.published import load_foreign
from stages.text.chat import stop_token_ids


@click.command(cls=Stage)
@paths("--source", "--out")
def prepare_model(source: Path, out: Path) -> None:
    """Make or fetch the base model."""
    bring_sources(params.SOURCE, source)
    knobs = params.load(Knobs)
    model, tokenizer = make_tiny(knobs) if knobs.model.source == "tiny" else fetch(knobs, source)
    set_padding(tokenizer)
    stops = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    model.generation_config.eos_token_id = stops
    with replacing(out, folder=True) as folder:
        save_model(folder, model, tokenizer)
    figures = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(tokenizer),
        "stop_tokens": " ".join(tokenizer.convert_ids_to_tokens(stops)),
    }
    say(figures, model=knobs.model.source)


def make_tiny(knobs: Knobs):
    """A random model and its byte tokenizer."""
    model = knobs.model
    tokenizer = tiny.byte_tokenizer(model.max_positions)
    seed_everything(knobs.seed, "prepare_model")
    return tiny.random_llama(
        tokenizer,
        model.hidden_size,
        model.intermediate_size,
        model.layers,
        model.heads,
        model.max_positions,
        model.init_std,
        model.dropout,
    ), tokenizer


def fetch(knobs: Knobs, folder: Path):
    """Model and tokenizer from a hub id, a folder or a GGUF file; those in `folder` DVC watches."""
    source = Path(knobs.model.source)
    place = (source if source.is_dir() else source.parent).resolve()
    if source.exists() and folder.resolve() not in [place, *place.parents]:
        click.echo(
            f"model.source: {knobs.model.source!r} lies outside {folder}, where DVC does not see it"
            " change: put it there, or run `dvc repro --force prepare_model` after a change"
        )
    model, tokenizer = load_foreign(
        knobs.model.source,
        knobs.model.revision,
        knobs.model.trust_remote_code,
        knobs.model.ignore_pickles,
    )
    return model.to(torch.float32), tokenizer


def set_padding(tokenizer) -> None:
    """Pad with a token that ends no turn, where the tokenizer has a special one to spare.

    No stage here looks for pad ids, but transformers' own classifiers do: with pad = EOS they would
    score a row at the token before its EOS.
    """
    ends = stop_token_ids(tokenizer, None)
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in ends:
        return
    special = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    spare = [i for i in special if i not in (*ends, tokenizer.bos_token_id)]
    index = tokenizer.unk_token_id if tokenizer.unk_token_id in spare else min(spare, default=None)
    tokenizer.pad_token = (
        tokenizer.eos_token if index is None else tokenizer.convert_ids_to_tokens(index)
    )


if __name__ == "__main__":
    prepare_model()
