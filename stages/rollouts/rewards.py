"""Rule-based rewards, one number per completion.

Lengths are completion tokens, the stop token included. A rule that raises stops the stage: it never
turns into 0.
"""

import importlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache

import numpy as np

from stages.base.errors import BadKnob

# Commas belong to a number only where they part its thousands: 1,234 is one number, 1,2 are two.
# A minus after a word, a number or a bracket takes away, or joins as in 3-5: it is no sign.
NUMBER = re.compile(r"(?:(?<![\w.)\]])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
ALMOST_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """Tokens -> penalty in [-1, 0]: DAPO's soft overlong punishment (Yu et al. 2025, eq. 13).

    0 up to `max_length - buffer`, falling linearly to -1 at `max_length`, -1 beyond. Raises
    ValueError unless 1 <= buffer <= max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"overlong buffer is {buffer}, expected 1 to max_length ({max_length})")
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))


@dataclass(frozen=True)
class Rules:
    """The rule-based components, each a column `reward_<name>` of the rollouts.

    correctness  (answer text, right answer, entry) -> 0..1; None where the prompt brings no answer
    format       1 where `format_pattern` matches the whole text, else 0; None without a pattern
    length       `overlong_penalty`; None with overlong_buffer 0
    """

    verify: Callable[[str, str | None, dict | None], float | None]
    format_pattern: str | None
    max_new_tokens: int
    overlong_buffer: int

    def components(self, text: str, length: int, answer: str | None, entry: dict | None) -> dict:
        """Completion text and length in tokens -> its three columns, as float32 holds them."""
        matched = penalty = None
        if self.format_pattern is not None:
            matched = float(re.fullmatch(self.format_pattern, text, re.DOTALL) is not None)
        if self.overlong_buffer:
            penalty = overlong_penalty(length, self.max_new_tokens, self.overlong_buffer)
        return {
            "reward_correctness": _single(self.verify(text, answer, entry)),
            "reward_format": matched,
            "reward_length": _single(penalty),
        }


def _single(score: float | None) -> float | None:
    """A score as the float32 columns keep it, so that a round in memory equals one through files.

    A right answer scores exactly 1; sums such as 6 x 1/6 come close and would round to 1. Raises
    ValueError for a score that is not finite.
    """
    if score is None:
        return None
    if not math.isfinite(score):
        raise ValueError(f"the score is {score}, expected a finite number or None")
    single = float(np.float32(score))
    return min(single, ALMOST_ONE) if score < 1 else single


def find_verifier(name: str, pattern: str | None) -> Callable:
    """Verifier knobs -> (text, answer, entry) -> score in 0..1 or None.

    task      the verifier of the reasoning-gym dataset that the entry names
    exact     the text equals the answer, white space at the ends apart
    numeric   the final number equals the answer's: in a box, after ####, else the last one
    regex     the first group of `pattern` in the text equals the answer
    m:f       function f of module m, called as f(text, answer, entry)

    Raises InputError for an unknown name, a pattern that is missing or broken, and a module that
    cannot be imported.
    """
    if name == "task":
        return _task_score
    if name == "exact":
        return lambda text, answer, entry: _same(text, answer)
    if name == "numeric":
        return lambda text, answer, entry: _same_number(text, answer)
    if name == "regex":
        compiled = _compiled(pattern)
        return lambda text, answer, entry: _same(_first_group(compiled, text), answer)
    if ":" in name:
        return _imported(name)
    raise BadKnob(
        "verifier", f"found {name!r}, expected task, exact, numeric, regex or module:function"
    )


def final_number(text: str) -> Decimal | None:
    """The number in the last box, else that after the last ####, else the last one of the text."""
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", text)
    marked = re.findall(r"####\s*([^\n]*)", text)
    for part in [*boxes[-1:], *marked[-1:], text]:
        if numbers := NUMBER.findall(part):
            return Decimal(numbers[-1].replace(",", ""))
    return None


def _task_score(text: str, answer: str | None, entry: dict | None) -> float | None:
    if entry is None:
        return None
    return float(_task_verifier(entry["metadata"]["source_dataset"])(text.strip(), entry))


@cache
def _task_verifier(name: str) -> Callable:
    from stages.rows.task import verifier

    return verifier(name)


def _same(text: str | None, answer: str | None) -> float | None:
    return None if answer is None else float(text is not None and text.strip() == answer.strip())


def _same_number(text: str, answer: str | None) -> float | None:
    expected = None if answer is None else final_number(answer)
    return None if expected is None else float(final_number(text) == expected)


def _first_group(pattern: re.Pattern, text: str) -> str | None:
    match = pattern.search(text)
    return match[1] if match else None


def _compiled(pattern: str | None) -> re.Pattern:
    try:
        compiled = re.compile(pattern or "", re.DOTALL)
    except re.error as error:
        raise BadKnob("verifier_pattern", f"no regular expression ({error})") from error
    if compiled.groups < 1:
        raise BadKnob(
            "verifier_pattern", f"found {pattern!r}, expected a pattern with one group, the answer"
        )
    return compiled


def _imported(name: str) -> Callable:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise BadKnob("verifier", f"cannot import {name!r} ({error})") from error
