"""Write docs/knobs.md from the validated knobs: `python tools/knobs_page.py --write`."""

import sys
import types
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from stages.base.params import all_knobs, fields, read  # noqa: E402

INTRODUCTION = """# What does each knob do?

Every key of `params.yaml`: what it takes, its default, what it does. A knob stands under the stage
that uses it first; "also" names the other stages that read it. Change a knob, and exactly these
stages run again, and what follows them. `report` shows every knob and comes last in any case.

This page is made by `python tools/knobs_page.py --write`; a test holds it against the code.
"""
HEAD = "| knob | takes | default | what it does | also |\n|---|---|---|---|---|\n"
ORDER = (
    "prepare_task prepare_model tokenize_sft train_sft tokenize_preferences split_preferences"
    " tokenize_labelled train_rm score_pairs train_direct rollout score optimize evaluate report"
    " score_answers"
).split()
CHECKING = {"prepare_task", "prepare_model"}  # they try out early what later stages use
SHARED = 5  # a knob that so many stages use stands in a section of its own


def page() -> str:
    """The whole page as Markdown; ValueError for a stage that ORDER lacks."""
    found = {}
    knobs = all_knobs()
    for stage in sorted(knobs, key=ORDER.index):
        for key, field in fields(knobs[stage]):
            found.setdefault(key, (field, []))[1].append(stage)
    sections = {name: [] for name in ("Many stages", *ORDER)}
    defaults = read(ROOT / "params.yaml")
    for key, (field, stages) in found.items():
        home = home_of(stages)
        also = [stage for stage in stages if stage != home]
        cells = [f"`{key}`", takes(field), shown(value_at(defaults, key))]
        cells += [escaped(field.description or ""), ", ".join(also)]
        sections[home].append("| " + " | ".join(cells) + " |\n")
    return INTRODUCTION + "".join(
        f"\n## {name}\n\n{HEAD}{''.join(lines)}" for name, lines in sections.items() if lines
    )


def home_of(stages: list[str]) -> str:
    """The section of a knob that these stages read."""
    using = [stage for stage in stages if stage not in CHECKING] or stages
    return "Many stages" if len(using) >= SHARED else using[0]


def value_at(values: dict, key: str):
    for part in key.split("."):
        values = values[part]
    return values


def takes(field) -> str:
    """Type and range in words."""
    limits = {}
    for part in field.metadata:
        for name in ("gt", "ge", "lt", "le"):
            if getattr(part, name, None) is not None:
                limits[name] = f"{getattr(part, name):,}"
    return escaped(" ".join([kind_of(field.annotation), *range_of(limits)]))


def kind_of(kind) -> str:
    if get_origin(kind) is Annotated:
        return kind_of(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return ", ".join(str(option) for option in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(kind_of(part) for part in get_args(kind))
    names = {int: "whole number", float: "number", str: "text", bool: "true, false"}
    return names.get(kind) or ("null" if kind is type(None) else "mapping")


def range_of(limits: dict[str, str]) -> list[str]:
    """Bounds of a number -> the words for them: `0 to 1`, `above 0, below 1`, `1 or more`."""
    low, high = limits.get("ge"), limits.get("le")
    if low and high:
        return [f"{low} to {high}"]
    words = [f"above {limits['gt']}"] if "gt" in limits else []
    words += [f"{low} or more"] if low else []
    words += [f"below {limits['lt']}"] if "lt" in limits else []
    words += [f"at most {high}"] if high else []
    return [", ".join(words)] if words else []


def shown(value) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "see params.yaml" if value else "{}"
    return escaped(str(value).lower() if isinstance(value, bool) else str(value))


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    if "--write" in sys.argv:
        (ROOT / "docs" / "knobs.md").write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
