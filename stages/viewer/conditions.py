"""Conditions on rows as people type them: `reward < 0.5 and finished == true`.

    conditions := condition { "and" condition }
    condition  := column ( "<" | "<=" | "==" | "=" | "!=" | ">=" | ">" | "~" ) literal
    literal    := number | 'text' | "text" | true | false | null

Nothing that is typed is ever run as code.
"""

import re
from dataclasses import dataclass

from stages.base.errors import InputError

CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|==|!=|<|>|=|~)\s*('[^']*'|\"[^\"]*\"|[^\s'\"]+)\s*")
AND = re.compile(r"and(\s+|$)")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
WORDS = {"true": True, "false": False, "null": None}

Literal = bool | int | float | str | None


@dataclass(frozen=True)
class Condition:
    """`column operator value`; the operator is one of < <= == != >= > and ~ (text contains)."""

    column: str
    operator: str
    value: Literal


def parse(text: str) -> list[Condition]:
    """`reward < 0.5 and kl > 1` -> its conditions; InputError says where it breaks off."""
    found, position = [], 0
    while True:
        match = CONDITION.match(text, position)
        if match is None:
            raise InputError(
                f"condition {text!r}: cannot read {text[position:]!r}; expected `column operator"
                " value`, such as `reward < 0.5`, joined by `and`"
            )
        column, operator, literal = match.groups()
        operator = "==" if operator == "=" else operator
        condition = Condition(column, operator, _value(literal))
        if condition.value is None and operator not in ("==", "!="):
            said = f"{column} {operator} null"
            raise InputError(f"condition {said!r}: null goes with == and != only")
        found.append(condition)
        position = match.end()
        if position == len(text):
            return found
        joint = AND.match(text, position)
        if joint is None:
            raise InputError(f"condition {text!r}: expected `and` before {text[position:]!r}")
        position = joint.end()


def _value(literal: str) -> Literal:
    if literal[0] in "'\"":
        return literal[1:-1]
    if literal.lower() in WORDS:
        return WORDS[literal.lower()]
    if not NUMBER.fullmatch(literal):
        raise InputError(
            f"condition: found {literal!r}, expected a number, true, false, null or 'text'"
        )
    return int(literal) if literal.lstrip("+-").isdigit() else float(literal)
