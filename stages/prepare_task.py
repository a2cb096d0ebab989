"""Stage `prepare_task`: generate the embedded task with reasoning-gym, without a network.

Reads   the first rows of each dataset that stands in place of the task's, to find a bad one before
        anything trains
Knobs   task, seed, where the rows of sft, preferences, prompts and evaluate come from, verifier and
        rewards.correctness (which want prompts with an answer)
Writes  data/task/{sft,preferences,prompts,heldout}.jsonl: questions that occur once in all of them;
        figures

Tokenizing is left to later stages: another model must not make another task.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import click

from stages.base import params
from stages.base.clones import bring_sources
from stages.base.command import Stage, paths, say
from stages.base.errors import InputError
from stages.base.files import replacing
from stages.base.metrics import write_json
from stages.base.verifiers import can_verify
from stages.knobs.prepare_task import Knobs
from stages.rows.canonical import PromptRow
from stages.rows.inputs import look_into
from stages.rows.task import check_entry, generate
from stages.text.messages import Dropped


@click.command(cls=Stage)
@paths("--out", "--figures")
def prepare_task(out: Path, figures: Path) -> None:
    """Generate the rows of the embedded task."""
    bring_sources(params.SOURCE)
    knobs = params.load(Knobs)
    task = knobs.task
    sizes = {
        "heldout": task.heldout_rows,
        "prompts": task.prompt_rows,
        "preferences": task.preference_rows,
        "sft": task.sft_rows,
    }
    sets = generate(task.name, task.config, task.system, sizes, task.sft_wrong_share, knobs.seed)
    check_datasets(knobs, sets)
    with replacing(out, folder=True) as folder:
        for name, rows in sets.items():
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(lines)
    found = {f"{name}_rows": len(rows) for name, rows in sets.items()}
    write_json(figures, found)
    say(found, task=task.name)


def check_datasets(knobs: Knobs, sets: dict[str, list[dict]]) -> None:
    """Raise InputError with a line for each dataset of which a later stage could make nothing."""
    kinds = {
        "sft": ("sft", "sft"),
        "preferences": ("preferences", "preferences"),
        "prompts": ("prompts", "prompts"),
        "evaluate": ("prompts", "heldout"),
    }
    problems = []
    for section, (kind, embedded) in kinds.items():
        try:
            rows = look_into(kind, getattr(knobs, section), sets[embedded], knobs.seed)
            if section == "prompts":
                check_answers(rows, knobs)
        except InputError as error:
            problems.append(f"{section}: {error}")
    if problems:
        raise InputError("\n  ".join(["bad datasets", *problems]))


def check_answers(prompts: Iterable[tuple[int, PromptRow | Dropped]], knobs: Knobs) -> None:
    """Raise InputError where no prompt can be verified and so no completion would have a reward."""
    name, weight = knobs.verifier, knobs.rewards.correctness
    if weight is None:
        return
    for number, row in prompts:
        if name == "task" and isinstance(row, PromptRow) and row.entry is not None:
            check_entry(f"{knobs.prompts.dataset}: row {number}", row.entry)
        if isinstance(row, PromptRow) and can_verify(name, row.answer, row.entry):
            return
    wanted = {"task": "'entry'", "numeric": "'answer' with a number"}.get(name, "'answer'")
    raise InputError(
        f"{knobs.prompts.dataset}: verifier {name} needs {wanted} and no prompt has one, so that"
        f" with rewards.correctness {weight} none would have a reward; expected a column of that"
        " name (prompts.columns may name another), or rewards.correctness null"
    )


if __name__ == "__main__":
    prepare_task()
