"""Stage `split_preferences`: hold out some prompts for the validation of the reward model.

Reads   data/preferences/pairs.parquet, the tokenizer of models/base
Knobs   preferences.validation_share, seed, trust_remote_code
Writes  data/preferences/{train,validation}.parquet (base/tables.py: PAIRS), figures

All pairs of a prompt go to one side, chosen by a hash of the prompt's ids: reordering the rows, or
adding some, moves no other prompt. Prompts that differ in white space alone are one. Where chance
leaves one side without prompts, the one that came closest to it goes there.
"""

from pathlib import Path

import click

from stages.base import params
from stages.base.command import Stage, paths, say
from stages.base.contents import check_contents
from stages.base.errors import InputError
from stages.base.metrics import write_json
from stages.base.randomness import derive
from stages.base.tables import PAIRS, iterate_rows, read_provenance, write_table
from stages.base.tokenizers import load_tokenizer
from stages.knobs.split_preferences import Knobs


@click.command(cls=Stage)
@paths("--pairs", "--base", "--train", "--validation", "--figures")
def split_preferences(
    pairs: Path, base: Path, train: Path, validation: Path, figures: Path
) -> None:
    """Split pairs by prompt."""
    knobs = params.load(Knobs)
    check_contents(pairs, PAIRS)
    tokenizer = load_tokenizer(base, knobs.model.trust_remote_code)
    names = [prompt_name(tokenizer, row["prompt_ids"]) for row in iterate_rows(pairs, PAIRS)]
    places: dict[int, tuple[int, int]] = {}
    for name, row in zip(names, iterate_rows(pairs, PAIRS), strict=True):
        place = variant_place(knobs.seed, row["prompt_ids"])
        places[name] = min(place, places.get(name, place))
    share = knobs.preferences.validation_share
    held_out = choose({name: place for name, (_, place) in places.items()}, share)
    if not held_out:
        raise InputError(f"{pairs}: all pairs have one prompt; expected at least two prompts")

    def provenance() -> dict:
        return read_provenance(pairs) | {"stage": "split_preferences"}

    found = {}
    for path, side in ((train, False), (validation, True)):
        rows = zip(names, iterate_rows(pairs, PAIRS), strict=True)
        kept = (row for name, row in rows if (name in held_out) is side)
        found[f"{path.stem}_pairs"] = write_table(path, PAIRS, kept, provenance)
    write_json(figures, found)
    say(found)


def prompt_name(tokenizer, ids: list[int]) -> int:
    """A number for the prompt's text without its white space."""
    return derive(0, "split_preferences", "".join(tokenizer.decode(ids).split()))


def variant_place(seed: int, ids: list[int]) -> tuple[int, int]:
    """(order among spellings of one prompt, whatever the seed; place in [0, 2^63) by the seed)."""
    return derive(0, "spelling", *ids), derive(seed, "split_preferences", *ids)


def choose(places: dict[int, int], share: float) -> set[int]:
    """Prompts to hold out: those in the first `share` of [0, 2^63), and one at least on each side.

    Empty where there is only one prompt.
    """
    order = sorted(places, key=places.__getitem__)
    below = sum(place < share * 2**63 for place in places.values())
    return set(order[: min(max(below, 1), len(order) - 1)])


if __name__ == "__main__":
    split_preferences()
