"""How things look on a terminal or in a pipe: harmless text, tables where they fit, records.

Whatever comes out of a file (text of a model, column names, provenance) passes through
`spelled_out`: control characters and escape sequences are shown, never obeyed.
"""

import json
import shutil
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stages.base.spelling import spelled_out
from stages.viewer.tokens import Span, extent, shade

LONGEST = 300
SHORT = 24
PIPE_WIDTH = 120


def console() -> Console:
    """Colours and the width of the terminal; plain text in a pipe, COLUMNS or 120 wide."""
    width = shutil.get_terminal_size((PIPE_WIDTH, 0)).columns
    return Console(width=width, highlight=False, markup=False, emoji=False)


def cell(value: object, full: bool = False) -> str:
    """A value as short text: four digits, lists by their range, long text cut unless `full`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and value and all(isinstance(x, int | float) for x in value):
        return _numbers(value, full)
    if isinstance(value, list | dict | int):
        value = json.dumps(value, ensure_ascii=False, default=str)
    text = spelled_out(str(value)) or "''"
    if full or len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({len(text) - LONGEST} more characters)"


def _numbers(values: list, full: bool) -> str:
    if full:
        return "[" + " ".join(cell(x) for x in values) + "]"
    if len(set(values)) == 1:
        return f"{cell(values[0])} x {len(values)}"
    if all(isinstance(x, int) for x in values):
        return f"{len(values)} ids"
    return f"{cell(min(values))}..{cell(max(values))} ({len(values)})"


def shown(rows: Sequence[dict], full: bool) -> list[dict[str, str]]:
    """Rows of values -> the same as short text; a column that a row lacks is empty there."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{spelled_out(n): cell(row[n], full) if n in row else "" for n in names} for row in rows]


def print_rows(out: Console, rows: Sequence[dict[str, str]]) -> None:
    """Rows of text, all with the same keys: a table where it fits the width, else records."""
    if not rows:
        return
    names = list(rows[0])
    widths = [max(cell_len(name), *(cell_len(row[name]) for row in rows)) for name in names]
    if sum(widths) + 2 * (len(names) - 1) <= out.width:
        out.print(_table(rows))
        return
    for row in rows:
        print_record(out, {name: text for name, text in row.items() if text})
        out.print()


def _table(rows: Sequence[dict[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        right = all(_is_figure(row[name]) for row in rows)
        table.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row.values()))
    return table


def _is_figure(text: str) -> bool:
    try:
        float(text or "0")
    except ValueError:
        return text in ("null", "true", "false")
    return True


def print_record(out: Console, record: dict[str, str]) -> None:
    """One row: short values in a paragraph, then each long one on a line of its own."""
    long = [name for name, text in record.items() if len(text) > SHORT]
    parts = [f"{name} {text}" for name, text in record.items() if name not in long]
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + 3 + cell_len(part) <= out.width:
            lines[-1] += f"   {part}"
        else:
            lines.append(part)
    for line in lines:
        out.print(Text(line))
    for name in long:
        _wrapped(out, Text.assemble((f"  {name}  ", "bold"), record[name]))


def print_line(out: Console, text: str, style: str = "") -> None:
    """Print text of any origin on one line, as `_wrapped` does."""
    _wrapped(out, Text(spelled_out(text), style))


def _wrapped(out: Console, text: Text) -> None:
    """Print text, folded at the width of a terminal; in a pipe a line stays a line."""
    out.print(text, soft_wrap=not out.is_terminal)


def print_spans(out: Console, parts: Sequence[Span], pieces: Sequence[Sequence[str]], measure: str):
    """Tokens in a row, span by span; those of answers on the shade of their figure."""
    for span, texts in zip(parts, pieces, strict=True):
        line = Text().append(f"{span.title:<11}", "bold")
        values = span.figures.get(measure)
        largest = extent(measure, values or [])
        for index, text in enumerate(texts):
            style = "" if span.answer else "dim"
            if values is not None:
                red, green, blue = shade(measure, values[index], largest)
                style = f"black on rgb({red},{green},{blue})"
            line.append(text, style)
        _wrapped(out, line)


def token_rows(span: Span, texts: Sequence[str]) -> list[dict[str, str]]:
    """One row a token: its number, id and text, and all that is known of it."""
    return [
        {"#": str(i), "id": str(token), "token": text.replace(" ", "\u2423")}
        | {name: cell(values[i]) for name, values in span.figures.items()}
        for i, (token, text) in enumerate(zip(span.ids, texts, strict=True))
    ]
