"""Stage `prepare_task`: generate the embedded task with reasoning-gym, without a network.

Reads   the first rows of each dataset that stands in place of the task's, to find a bad one before
        anything trains
Knobs   task, seed, where the rows of sft, preferences, prompts and evaluate come from
Writes  data/task/{sft,preferences,prompts,heldout}.jsonl: questions that occur once in all of them;
        figures

Tokenizing is left to later stages: another model must not make another task.
"""

import json
from pathlib import Path

import click

from stages.base import params
from stages.base.command import Stage, paths, say
from stages.base.errors import InputError
from stages.base.files import replacing
from stages.base.metrics import write_json
from stages.knobs.prepare_task import Knobs
from stages.rows.inputs import look_into
from stages.rows.task import generate


@click.command(cls=Stage)
@paths("--out", "--figures")
def prepare_task(out: Path, figures: Path) -> None:
    """Generate the rows of the embedded task."""
    knobs = params.load(Knobs)
    check_datasets(knobs)
    task = knobs.task
    sizes = {
        "heldout": task.heldout_rows,
        "prompts": task.prompt_rows,
        "preferences": task.preference_rows,
        "sft": task.sft_rows,
    }
    sets = generate(task.name, task.config, task.system, sizes, task.sft_wrong_share, knobs.seed)
    with replacing(out, folder=True) as folder:
        for name, rows in sets.items():
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(lines)
    found = {f"{name}_rows": len(rows) for name, rows in sets.items()}
    write_json(figures, found)
    say(found, task=task.name)


def check_datasets(knobs: Knobs) -> None:
    """Raise InputError with a line for each dataset that cannot be opened or read as rows."""
    kinds = {
        "sft": "sft",
        "preferences": "preferences",
        "prompts": "prompts",
        "evaluate": "prompts",
    }
    problems = []
    for section, kind in kinds.items():
        try:
            look_into(kind, getattr(knobs, section), knobs.seed)
        except InputError as error:
            problems.append(f"{section}: {error}")
    if problems:
        raise InputError("\n  ".join(["bad datasets", *problems]))


if __name__ == "__main__":
    prepare_task()
