"""One row as tokens: which belong to the prompt, which to the answer, and what is known of each.

Letters: T completion tokens. Log-probs are in nats.
"""

import math
from dataclasses import dataclass, field

from stages.base.tables import IGNORED

MEASURES = ("log-prob", "ratio", "advantage", "reference")


@dataclass(frozen=True)
class Span:
    """A run of ids under one title; `figures` has a list of T values for each measure known."""

    title: str
    ids: list[int]
    answer: bool
    figures: dict[str, list[float]] = field(default_factory=dict)


def spans(row: dict, update: dict | None) -> list[Span]:
    """A row of any table with ids -> its spans in order; empty for a row without ids.

    Rollouts, buffers, evaluations: prompt and completion, with what `figures` knows; SFT rows: what
    is only read and what is learned, in turn; pairs: prompt, chosen, rejected.
    """
    prompt = [Span("prompt", row["prompt_ids"], False)] if row.get("prompt_ids") else []
    if "completion_ids" in row:
        return [*prompt, Span("completion", row["completion_ids"], True, figures(row, update))]
    if "chosen_ids" in row:
        return [*prompt, _side(row, "chosen"), _side(row, "rejected")]
    return _by_label(row["input_ids"], row["labels"]) if "labels" in row else []


def figures(row: dict, update: dict | None) -> dict[str, list[float]]:
    """Measure -> T values: what the row of the buffer and that of the update say of each token.

    log-prob   log-prob under the policy that sampled
    reference  that minus the log-prob under the reference: above 0, more likely than before
    advantage  as the update used it
    ratio      new / old probability, as the token stood when last trained on
    value      what the critic expected before the token
    """
    found = {}
    old, reference = row.get("log_probs_old"), row.get("log_probs_ref")
    if old is not None:
        found["log-prob"] = old
    if old is not None and reference is not None:
        found["reference"] = [a - b for a, b in zip(old, reference, strict=True)]
    if row.get("values_old") is not None:
        found["value"] = row["values_old"]
    if update is not None:
        found["advantage"] = update["advantage"]
        if update["ratio"] is not None:
            found["ratio"] = update["ratio"]
    return found


def _side(row: dict, side: str) -> Span:
    """An answer of a pair; of a scored one the log-prob under the reference is known."""
    log_probs = row.get(f"log_probs_ref_{side}")
    return Span(side, row[f"{side}_ids"], True, {"log-prob": log_probs} if log_probs else {})


def _by_label(ids: list[int], labels: list[int]) -> list[Span]:
    found = []
    for token, label in zip(ids, labels, strict=True):
        learned = label != IGNORED
        if not found or found[-1].answer is not learned:
            found.append(Span("learned" if learned else "read", [], learned))
        found[-1].ids.append(token)
    return found


def shade(measure: str, value: float, largest: float) -> tuple[int, int, int]:
    """Value -> background (red, green, blue), always light enough for black text.

    A log-prob goes from white (certain) to red (unlikely). The others go from white at their
    neutral point (ratio 1, else 0) to green above it and red below, full at `largest` away from it.
    """
    if measure == "log-prob":
        return _blend(1 - math.exp(min(0.0, value)), RED)
    away = math.log(max(value, 1e-9)) if measure == "ratio" else value
    return _blend(min(1.0, abs(away) / largest), GREEN if away > 0 else RED)


def extent(measure: str, values: list[float]) -> float:
    """How far from neutral the farthest value lies, at least a little: a ratio of 1.2, else 1."""
    if measure == "ratio":
        return max([math.log(1.2), *(abs(math.log(max(x, 1e-9))) for x in values)])
    return max([1.0, *map(abs, values)])


RED, GREEN = (244, 109, 92), (102, 194, 120)


def _blend(share: float, colour: tuple[int, int, int]) -> tuple[int, int, int]:
    return tuple(round(245 + (c - 245) * share) for c in colour)
