"""Stage `prepare_model`: bring the base model into one form, whatever it was.

Reads   models/source, where model.source lies in it
Knobs   model, seed, attention, max_new_tokens: what the model must be able to do is tried here, so
        that no later stage finds it out
Writes  models/base: a Hugging Face folder in float32 (or model.keep_weights) with a fast tokenizer,
        a pad token (none that ends a turn, where there is another), and every stop token named

The default is a small random Llama over bytes; a hub id, a local folder or a GGUF file do as well.
Under models/source they are a dependency; elsewhere they could change unseen, and a line says so.
"""

from pathlib import Path

import click
import torch

from stages.base import params
from stages.base.clones import bring_sources
from stages.base.command import Stage, paths, say
from stages.base.errors import BadKnob
from stages.base.files import replacing
from stages.base.metrics import read_json, write_json
from stages.base.positions import positions_of
from stages.base.randomness import seed_everything
from stages.knobs.prepare_model import Knobs
from stages.models.checkpoints import load_policy, save_model
from stages.models.forward import ROUTE, Route
from stages.models.heads import check_scorer
from stages.sources import tiny
from stages.sources.guard import find_route
from stages.sources.published import drop_balancing, load_foreign
from stages.text.chat import stop_token_ids
from stages.text.templates import record_template


@click.command(cls=Stage)
@paths("--source", "--out")
def prepare_model(source: Path, out: Path) -> None:
    """Make or fetch the base model."""
    bring_sources(params.SOURCE, source)
    knobs = params.load(Knobs)
    model, tokenizer = make_tiny(knobs) if knobs.model.source == "tiny" else fetch(knobs, source)
    record_template(tokenizer, knobs.model.date, knobs.model.template_options)
    set_padding(tokenizer)
    stops = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    model.generation_config.eos_token_id = stops
    check_fit(model, len(tokenizer), stops, knobs.max_new_tokens)
    with replacing(out, folder=True) as folder:
        save_model(folder, model, tokenizer, knobs.model.keep_weights)
        route = try_out(folder, knobs)
        config = read_json(folder / "config.json")
        write_json(folder / "config.json", config | {ROUTE: route})
    figures = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(tokenizer),
        "stop_tokens": " ".join(map(str, tokenizer.convert_ids_to_tokens(stops))),
        "rows": route,
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
    if line := drop_balancing(model.config):
        click.echo(line)
    return model.to(torch.float32), tokenizer


def check_fit(model, tokens: int, stops: list[int], max_new_tokens: int) -> None:
    """Raise BadKnob where the checkpoint is no decoder, or does not fit the knobs."""
    config = model.config
    # The decoder of such a model says False of itself once it is loaded; its class of config does
    # not.
    if config.is_encoder_decoder or getattr(type(config), "is_encoder_decoder", False):
        raise BadKnob(
            "model.source",
            f"{type(model).__name__} is the decoder of an encoder-decoder model, expected a model"
            " that is a decoder alone",
        )
    positions, size = positions_of(config), model.get_input_embeddings().num_embeddings
    if positions is not None and positions <= max_new_tokens:
        raise BadKnob(
            "max_new_tokens",
            f"found {max_new_tokens}, but the model has only {positions} positions",
        )
    if tokens > size:
        raise BadKnob(
            "model.source", f"the tokenizer has {tokens} tokens, but the model embeds only {size}"
        )
    if beyond := [stop for stop in stops if not 0 <= stop < size]:
        raise BadKnob("model.source", f"stop tokens {beyond}, but the model embeds only {size}")


def try_out(folder: Path, knobs: Knobs) -> Route:
    """Load a model as later stages do, and find the route of its rows; BadKnob if there is none."""
    trust = knobs.model.trust_remote_code
    # FlashAttention needs a GPU, which this stage does not.
    attention = None if knobs.attention == "flash_attention_2" else knobs.attention
    try:
        policy = load_policy(folder, attention, torch.device("cpu"), trust)
        check_scorer(policy.config)
        return find_route(policy)
    except (BadKnob, OSError, MemoryError):
        raise
    except Exception as error:  # nobody has thought of every architecture
        reason = str(error).removeprefix(f"{folder}: ").partition("\n")[0]
        raise BadKnob("model.source", f"{type_of(folder)}: {reason}") from error


def type_of(folder: Path) -> str:
    """What a folder's config.json calls its architecture, for a message."""
    return " ".join(read_json(folder / "config.json").get("architectures") or ["the model"])


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
