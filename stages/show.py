"""Show any artifact of the pipeline: `python -m stages.show PATH`. No stage: it writes nothing.

    data/buffers/round-3.parquet   a table: columns, rows, single tokens
    data/buffers                   the tables of all rounds as one
    data/task/sft.jsonl            rows (JSONL, CSV, arrays in JSON, a folder of `save_to_disk`)
    models/policy/3                a model folder: parameters, dtype, where it came from
    data/figures/optimize/3.json   figures; those of a folder (data/figures/optimize) as one table
    data                           any other folder: what lies in it

Rows are read by DuckDB, and a condition is one of SQL (viewer/rows.py). It prints plain text into a
pipe.
"""

import gc
import json
from pathlib import Path

import click

from stages.base.errors import InputError
from stages.base.metrics import read_json
from stages.base.spelling import spelled_out
from stages.viewer import models, text
from stages.viewer.decoding import token_texts
from stages.viewer.places import listing, rows_at
from stages.viewer.rows import Rows, quoted
from stages.viewer.tokens import MEASURES, spans

# What --worst goes by: the first of these that a table has.
WORTH = ("reward", "reward_shaped", "reward_correctness", "correct")


class Viewer(click.Command):
    """A command whose bad input ends in one line on stderr and exit code 1."""

    def invoke(self, ctx: click.Context):
        gc.enable()
        try:
            return super().invoke(ctx)
        except InputError as error:
            raise click.ClickException(spelled_out(str(error))) from error


@click.command(cls=Viewer)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--round", "round_number", type=int, help="Rows of this round.")
@click.option("--group", type=int, help="Rows of this group: the completions of one prompt.")
@click.option("--sample", type=int, help="Rows with this number in their group.")
@click.option("--where", help="Rows that fit (SQL): \"reward < 0.5 and completion != ''\".")
@click.option("--sort", help="Lowest of this column first; highest first with a minus: -reward.")
@click.option("--worst", is_flag=True, help="Lowest reward first.")
@click.option("--rows", "count", type=click.IntRange(min=1), default=10, help="How many (10).")
@click.option("--columns", help="Only these, in this order: prompt,completion,reward.")
@click.option("--full", is_flag=True, help="Long texts and lists whole.")
@click.option("--summary/--no-summary", default=None, help="Columns; shown if no rows are chosen.")
@click.option("--tokens", is_flag=True, help="The first of the rows, token by token.")
@click.option("--colour", type=click.Choice(MEASURES), default=MEASURES[0], help="Of the tokens.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Model folder for --tokens.")
def show(path: Path, summary: bool | None, tokens: bool, colour: str, tokenizer, **chosen) -> None:
    """Show a table, a model folder, a file of figures or what lies in a folder."""
    out = text.console()
    if not path.exists():
        raise InputError(f"{path}: missing; `dvc repro` makes it, `dvc checkout` brings it back")
    if models.is_model(path):
        for name, value in models.describe(path).items():
            text.print_line(out, f"{name:<14}{value}")
    elif (table := rows_at(path)) is not None:
        table = narrowed(table, chosen)
        if tokens:
            return show_tokens(out, table, chosen, colour, tokenizer)
        if summary is None:
            narrowing = set(chosen) - {"count", "full"}
            summary = all(chosen[name] is None or chosen[name] is False for name in narrowing)
            summary &= table.kind == ".parquet"
        show_table(out, table, chosen, summary)
    elif path.is_dir():
        text.print_rows(out, text.shown(listing(path), chosen["full"]))
    elif path.suffix == ".json":
        for line in json.dumps(read_json(path), indent=2, ensure_ascii=False).splitlines():
            text.print_line(out, line)
    elif path.suffix == ".html":
        text.print_line(out, f"{path}: a page; open it in a browser")
    else:
        raise InputError(
            f"{path}: expected a folder or a file of rows (.parquet, .csv, .jsonl), figures (.json)"
            " or a page (.html)"
        )


def narrowed(table: Rows, chosen: dict) -> Rows:
    """The rows that --round, --group, --sample and --where ask for.

    Where rows of a folder know no round (evaluations), --round is that round's file in it.
    """
    asked = {"round": chosen["round_number"], "group": chosen["group"], "sample": chosen["sample"]}
    file = table.path / f"round-{asked['round']}.parquet"
    if "round" not in table.names and file.is_file():
        table, asked["round"] = Rows(file, [file], ".parquet"), None
    for name, value in asked.items():
        if value is not None:
            table.check(name)
            table.where(f"{quoted(name)} = {value}")
    if chosen["where"]:
        table.where(chosen["where"])
    return table


def show_table(out, table: Rows, chosen: dict, summary: bool) -> None:
    """Head, summary where asked for, rows.

    Without --columns those of nulls are left out, and those of ids where there is text to read.
    """
    ids = [name for name in table.names if name.endswith("_ids")] * ("completion" in table.names)
    columns = [name for name in table.names if name not in ids]
    if chosen["columns"]:
        columns = chosen["columns"].split(",")
        for name in columns:
            table.check(name)
    rows = select(table, chosen, chosen["count"], columns)
    if not chosen["columns"]:
        known = {name for row in rows for name, value in row.items() if value is not None}
        rows = [{name: row[name] for name in row if name in known} for row in rows]
    fitting = " that fit" if table.condition else ""
    text.print_line(out, f"{table.path}: {size(table, rows, chosen)} rows{fitting}", "bold")
    if summary:
        for name, made in table.provenance().items():
            line = "  ".join(f"{key} {value}" for key, value in made.items())
            text.print_line(out, f"{name}: {line}")
        out.print()
        known = [
            {name: "" if value is None else text.cell(value) for name, value in entry.items()}
            for entry in table.summary()
        ]
        text.print_rows(out, known)
        out.print()
    text.print_rows(out, text.shown(rows, chosen["full"]))


def size(table: Rows, shown: list[dict], chosen: dict) -> str:
    """How many rows fit; text that holds more than are shown is not read to its end for it."""
    if table.kind == ".parquet":
        return f"{table.count():,}"
    whole = len(shown) < chosen["count"]
    return f"{len(shown):,}" if whole else f"first {len(shown):,}"


def select(table: Rows, chosen: dict, count: int, columns: list[str] | None = None) -> list[dict]:
    """The first `count` rows in the order that --sort or --worst asks for."""
    key = chosen["sort"]
    if chosen["worst"]:
        if key:
            raise InputError("--worst sorts already; leave out --sort")
        key = next((name for name in WORTH if name in table.names), WORTH[0])
    if key is None:
        return table.first(count, columns)
    return table.extreme(count, key.removeprefix("-"), key.startswith("-"), columns)


def show_tokens(out, table: Rows, chosen: dict, colour: str, tokenizer: Path | None) -> None:
    """The first row of the selection: its tokens in a line, and one by one with their figures."""
    rows = select(table, chosen, 1)
    if not rows:
        raise InputError(f"{table.path}: no row fits")
    row = rows[0]
    buffer, update = joined(table.path, row)
    parts = spans(row | buffer, update)
    if not parts:
        raise InputError(f"{table.path}: no column of token ids; there are {', '.join(row)}")
    known = [name for part in parts for name in part.figures]
    if known and colour not in known:
        raise InputError(f"{table.path}: no {colour} of the tokens; there are {', '.join(known)}")
    texts = token_texts(tokenizer or tokenizer_folder(table), [part.ids for part in parts])
    texts = [[spelled_out(token) for token in part] for part in texts]
    plain = {name: x for name, x in row.items() if not isinstance(x, list | str)}
    head = text.shown([plain], full=False)[0]
    file = {"file": row["file"]} if "file" in row else {}
    text.print_record(out, {"first of": f"{table.count():,} rows"} | file | head)
    out.print()
    text.print_spans(out, parts, texts, colour)
    for part, texts_of_part in zip(parts, texts, strict=True):
        if part.figures:
            out.print()
            text.print_rows(out, text.token_rows(part, texts_of_part))


def joined(path: Path, row: dict) -> tuple[dict, dict | None]:
    """(columns of the buffer, row of the update) of the same completion, where these files lie.

    They lie beside the table's folder: data/buffers/round-k.parquet, data/updates/round-k.parquet.
    """
    names = ("round", "group", "sample")
    if not set(names) <= row.keys():
        return {}, None
    home = (path if path.is_dir() else path.parent).parent
    found = {}
    for folder in ("buffers", "updates"):
        file = home / folder / f"round-{row['round']}.parquet"
        rows = []
        if file.is_file():
            other = Rows(file, [file], ".parquet")
            other.where(" and ".join(f"{quoted(name)} = {row[name]}" for name in names))
            rows = other.first(1)
        found[folder] = rows[0] if rows else None
    return found["buffers"] or {}, found["updates"]


def tokenizer_folder(table: Rows) -> Path:
    """The model folder named in the table's provenance, seen from here or from its repository."""
    made = next(iter(table.provenance().values()), {})
    name = next((made[key] for key in ("policy", "tokenizer", "reference") if key in made), None)
    if not name:
        raise InputError(f"{table.path}: names no model; say which one with --tokenizer")
    homes = [Path(), *table.path.resolve().parents]
    return next((home / name for home in homes if (home / name).is_dir()), Path(name))


if __name__ == "__main__":
    show()
