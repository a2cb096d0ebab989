"""Completions that are known to be right or wrong, out of a table of one of three kinds.

LABELLED rows say it themselves. Of ROLLOUTS and BUFFERS a completion is right where its
`reward_correctness` is exactly 1, as everywhere in the figures; one without is left out.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stages.base.errors import InputError
from stages.base.randomness import shuffled
from stages.base.tables import (
    BUFFERS,
    LABELLED,
    ROLLOUTS,
    Rows,
    iterate_batches,
    random_access,
    schema_of,
)

SCHEMAS = (BUFFERS, ROLLOUTS, LABELLED)  # BUFFERS first: they have all columns of ROLLOUTS


@dataclass(frozen=True)
class Completions(Sequence):
    """Some rows of a table by number: prompt_ids, completion_ids, label, and `rival`.

    `rival` is the score that a buffer has from the reward model of its run, else None.
    """

    rows: Rows
    numbers: list[int]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict:
        row = self.rows[self.numbers[index]]
        found = {name: row[name] for name in ("prompt_ids", "completion_ids")}
        return found | {"label": self.labels[index], "rival": row.get("reward_model")}

    def lengths(self) -> list[int]:
        """Tokens of prompt and completion of each row, by which rows are batched."""
        sides = [self.rows.lengths(name) for name in ("prompt_ids", "completion_ids")]
        return [sum(side[number] for side in sides) for number in self.numbers]


@contextmanager
def open_completions(path: Path, share: float, seed: int):
    """A table -> completions to train on, and those of the `share` of prompts that is held out.

    Raises InputError where there is nothing to learn: no label at all, labels that are all alike,
    a label that is neither 0 nor 1, or a single prompt.
    """
    schema = schema_of(path, *SCHEMAS)
    prompts, labels = read_labels(path, schema)
    known = [row for row, label in enumerate(labels) if label is not None]
    if not known:
        raise InputError(f"{path}: no row has a 'reward_correctness'; expected some of 0 and of 1")
    if len(found := {labels[row] for row in known}) == 1:
        kind = "right" if found == {1} else "wrong"
        raise InputError(f"{path}: every completion is {kind}; expected right and wrong ones")
    names = list(dict.fromkeys(prompts[row] for row in known))
    if len(names) == 1:
        raise InputError(f"{path}: all completions have one prompt; expected at least two prompts")
    count = min(max(1, round(share * len(names))), len(names) - 1)
    chosen = {names[i] for i in shuffled(len(names), seed, "train_rm", "held_out")[:count]}
    sides = [[row for row in known if (prompts[row] in chosen) is side] for side in (False, True)]
    with random_access(path, schema) as rows:
        yield tuple(Completions(rows, side, [labels[row] for row in side]) for side in sides)


def read_labels(path: Path, schema) -> tuple[list[tuple[int, ...]], list[int | None]]:
    """Prompt and label of each row of a table; None where it is not known."""
    name = "label" if schema is LABELLED else "reward_correctness"
    prompts, labels = [], []
    for batch in iterate_batches(path, schema, columns=["prompt_ids", name]):
        prompts += map(tuple, batch["prompt_ids"].to_pylist())
        for value in batch[name].to_pylist():
            if name == "label" and value not in (0, 1):
                row = len(labels)
                raise InputError(f"{path}: row {row}: 'label' holds {value}, expected 0 or 1")
            labels.append(None if value is None else int(value == 1))
    return prompts, labels
