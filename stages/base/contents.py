"""What stands in the tables between the stages, checked before hours go into it.

The schema says which columns there are and of what type; here is what their numbers must be, so
that a table edited with another tool is refused by file, row and column. A pass streams the columns
of numbers alone.
"""

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from stages.base.errors import InputError
from stages.base.tables import IGNORED, iterate_batches, read_provenance

IDS = ("input_ids", "prompt_ids", "completion_ids", "chosen_ids", "rejected_ids")
# Column -> the column of ids that it has one entry for each of.
BESIDE = {
    "labels": "input_ids",
    "log_probs_old": "completion_ids",
    "log_probs_sampler": "completion_ids",
    "log_probs_ref": "completion_ids",
    "values_old": "completion_ids",
    "log_probs_ref_chosen": "chosen_ids",
    "log_probs_ref_rejected": "rejected_ids",
}

ROUNDING = 1e-3  # of a log-prob, which lies above 0 by rounding alone

Largest = dict[str, tuple[int, int]]


def check_contents(path: Path, schema: pa.Schema) -> Largest:
    """Raise InputError for the first row whose numbers no stage could have written.

    Lists of ids hold at least one, none below 0; lists beside them are as long as they are; numbers
    are finite; a list that may be null is null in all rows or in none. Returns, for each column of
    ids, the largest one and its row, for `check_vocabulary` once a model is there.
    """
    start, largest, absent = 0, {}, {}
    names = [f.name for f in schema if pa.types.is_list(f.type) or pa.types.is_floating(f.type)]
    for batch in iterate_batches(path, schema, columns=names):
        for name in names:
            column = batch[name]
            _check_column(path, name, column, start)
            if name in BESIDE:
                _check_lengths(path, name, column, batch[BESIDE[name]], start)
                _check_presence(path, name, column, start, absent)
            if name == "labels":
                _check_predicted(path, column, start)
            if name in IDS or name == "labels":
                _keep_largest(name, column, start, largest)
        start += batch.num_rows
    return largest


def check_vocabulary(path: Path, largest: Largest, size: int, model: Path) -> None:
    """Raise InputError where a table holds an id that a model of `size` ids does not know."""
    for name, (token, row) in largest.items():
        if token >= size:
            raise InputError(
                f"{path}: row {row}: {name!r} holds the id {token}, but {model} knows"
                f" {size} ids, 0 to {size - 1}"
            )


def check_positions(path: Path, schema: pa.Schema, most: int | None, model: Path) -> None:
    """Raise InputError where a prompt and an answer have more tokens than a model has positions."""
    if most is None:
        return
    start, names = 0, [name for name in schema.names if name in IDS]
    for batch in iterate_batches(path, schema, columns=names):
        lengths = {name: pc.list_value_length(batch[name]) for name in names}
        prompt = lengths.pop("prompt_ids", 0)
        tokens = pc.add(pc.max_element_wise(*lengths.values()), prompt)
        place = pc.index(pc.greater(tokens, most), True).as_py()
        if place >= 0:
            raise InputError(
                f"{path}: row {start + place} has {tokens[place]} tokens, but {model} has"
                f" {most} positions"
            )
        start += batch.num_rows


def check_provenance(path: Path, *keys: str) -> dict:
    """The provenance of a table, which an edit with another tool may lose; InputError then."""
    made = read_provenance(path)
    for key in keys:
        if key not in made:
            raise InputError(
                f"{path}: its metadata lost 'provenance' with {key!r}, which the stage that wrote"
                " it put there; expected an edited table to keep the metadata of its file"
            )
    return made


def _check_column(path: Path, name: str, column: pa.Array, start: int) -> None:
    """Numbers finite, ids not empty and not below 0, margins not below 0."""
    is_list = pa.types.is_list(column.type)
    flat = column.flatten() if is_list else column
    rows = pc.list_parent_indices(column) if is_list else None

    def refuse(bad: pa.Array, expected: str) -> None:
        if (place := pc.index(bad, True).as_py()) >= 0:
            row = start + (place if rows is None else rows[place].as_py())
            raise InputError(f"{path}: row {row}: {name!r} holds {flat[place]}, {expected}")

    if pa.types.is_floating(flat.type):
        refuse(pc.invert(pc.is_finite(flat)), "expected a finite number")
    if name == "margin":
        refuse(pc.less(flat, 0.0), "expected 0 or more")
    if name.startswith("log_probs"):
        refuse(pc.greater(flat, ROUNDING), "expected a log-prob, 0 or below")
    if name == "labels":
        wrong = pc.and_(pc.less(flat, 0), pc.not_equal(flat, IGNORED))
        refuse(wrong, f"expected ids, or {IGNORED} for none")
    if name in IDS:
        refuse(pc.less(flat, 0), "expected ids, 0 or more")
        empty = pc.index(pc.equal(pc.list_value_length(column), 0), True).as_py()
        if empty >= 0:
            raise InputError(f"{path}: row {start + empty}: {name!r} is empty, expected ids")


def _check_lengths(path: Path, name: str, column: pa.Array, ids: pa.Array, start: int) -> None:
    found, wanted = pc.list_value_length(column), pc.list_value_length(ids)
    place = pc.index(pc.not_equal(found, wanted), True).as_py()
    if place >= 0:
        raise InputError(
            f"{path}: row {start + place}: {name!r} has {found[place]} entries, expected"
            f" {wanted[place]}, one for each of {BESIDE[name]!r}"
        )


def _check_predicted(path: Path, labels: pa.Array, start: int) -> None:
    """A label at position 0 is no target, for nothing predicts it."""
    later = pc.list_slice(labels, 1)
    targets = pc.not_equal(later.flatten(), IGNORED)
    rows = pc.list_parent_indices(later).filter(targets)
    place = pc.index(pc.is_in(pa.array(range(len(labels)), rows.type), rows), False).as_py()
    if place >= 0:
        raise InputError(
            f"{path}: row {start + place}: 'labels' has no id after its first entry, expected"
            " at least one to predict"
        )


def _check_presence(
    path: Path, name: str, column: pa.Array, start: int, absent: dict[str, bool]
) -> None:
    """A list that one row lacks and another has was measured by no stage."""
    if len(column):
        first = absent.setdefault(name, not column[0].is_valid)
        place = pc.index(column.is_null(), not first).as_py()
        if place >= 0:
            words = ("has", "has no") if first else ("has no", "has")
            raise InputError(
                f"{path}: row {start + place} {words[0]} {name!r}, but row 0 {words[1]}; expected"
                " one or the other of all rows"
            )


def _keep_largest(name: str, column: pa.Array, start: int, largest: Largest) -> None:
    flat = column.flatten()
    highest = pc.max(flat).as_py()
    if highest is not None and highest > largest.get(name, (-math.inf, 0))[0]:
        place = pc.index(flat, highest).as_py()
        largest[name] = (highest, start + pc.list_parent_indices(column)[place].as_py())
