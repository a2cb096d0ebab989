"""Stage `split_preferences`: hold out some prompts for the validation of the reward model.

Reads   data/preferences/pairs.parquet
Knobs   preferences.validation_share, seed
Writes  data/preferences/{train,validation}.parquet (base/tables.py: PAIRS), figures

All pairs of a prompt go to one side, chosen by a hash of the prompt's ids: reordering the rows, or
adding some, moves no other prompt.
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
from stages.knobs.split_preferences import Knobs


@click.command(cls=Stage)
@paths("--pairs", "--train", "--validation", "--figures")
def split_preferences(pairs: Path, train: Path, validation: Path, figures: Path) -> None:
    """Split pairs by prompt."""
    knobs = params.load(Knobs)
    check_contents(pairs, PAIRS)
    share = knobs.preferences.validation_share

    def held_out(row: dict) -> bool:
        return derive(knobs.seed, "split_preferences", *row["prompt_ids"]) < share * 2**63

    def provenance() -> dict:
        return read_provenance(pairs) | {"stage": "split_preferences"}

    counts = {}
    for path, side in ((train, False), (validation, True)):
        rows = (row for row in iterate_rows(pairs, PAIRS) if held_out(row) is side)
        counts[path.stem] = write_table(path, PAIRS, rows, provenance)
    if not all(counts.values()):
        for path in (train, validation):
            path.unlink()
        raise InputError(
            f"{pairs}: a validation_share of {share} leaves {counts}; expected pairs on both sides:"
            " bring pairs of more prompts, or change preferences.validation_share"
        )
    found = {f"{name}_pairs": count for name, count in counts.items()}
    write_json(figures, found)
    say(found)


if __name__ == "__main__":
    split_preferences()
