"""Write docs/knobs.md from the validated knobs: `python tools/knobs_page.py` prints the page."""

import sys
import types
from pathlib import Path
from typing import Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from stages.base.params import all_knobs, fields, read  # noqa: E402

INTRODUCTION = """# Knobs

Every key of `params.yaml`: what it does, what it takes, its default and the stages that read it.
Changing a key makes exactly those stages run again, and what follows them; `report`, which shows
every key, comes last in any case.
This page is made by `python tools/knobs_page.py > docs/knobs.md`; a test holds it against the code.

| knob | takes | default | read by | what it does |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page as Markdown."""
    defaults, rows = read(ROOT / "params.yaml"), {}
    for stage, section in all_knobs().items():
        for key, field in fields(section):
            row = rows.setdefault(key, {"field": field, "stages": []})
            row["stages"].append(stage)
    lines = []
    for key, row in rows.items():
        field, value = row["field"], defaults
        for part in key.split("."):
            value = value[part]
        cells = [f"`{key}`", takes(field), shown(value), ", ".join(row["stages"])]
        lines.append("| " + " | ".join([*cells, escaped(field.description or "")]) + " |")
    return INTRODUCTION + "\n".join(sorted(lines, key=order)) + "\n"


def takes(field) -> str:
    """Type and bounds in words."""
    bounds = [bound for part in field.metadata for bound in bound_of(part)]
    return escaped(" ".join([kind_of(field.annotation), *bounds]))


def kind_of(kind) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(str(option) for option in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(kind_of(part) for part in get_args(kind))
    names = {int: "whole number", float: "number", str: "text", bool: "true, false"}
    return names.get(kind) or ("null" if kind is type(None) else "mapping")


def bound_of(part):
    for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
        if getattr(part, name, None) is not None:
            yield f"{sign} {getattr(part, name)}"


def shown(value) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "see params.yaml"
    return escaped(str(value).lower() if isinstance(value, bool) else str(value))


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def order(line: str) -> tuple[int, str]:
    return line.split("|")[1].count("."), line


if __name__ == "__main__":
    print(page(), end="")
