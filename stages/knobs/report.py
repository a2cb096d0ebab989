"""Knobs of `report`, and the one check of `rounds`."""

import re
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from stages.base.knobs import Section


def chain_of_rounds(rounds: Any) -> Any:
    """Check the mapping of round -> start folder; an integer key would make DVC run no round."""
    if not isinstance(rounds, dict) or not rounds:
        raise ValueError("expected a mapping such as '1': models/sft, with at least one round")
    for key, start in rounds.items():
        if not isinstance(key, str):
            raise ValueError(f"key {key!r} is no text: quote it, '{key}': {start}")
        if not re.fullmatch(r"[1-9]\d*", key):
            raise ValueError(f"key {key!r} is no round number; expected '1', '2', ...")
        if start == "models/sft":
            continue
        policy = re.fullmatch(r"models/policy/([1-9]\d*)", str(start))
        if not policy or policy[1] not in rounds or int(policy[1]) >= int(key):
            raise ValueError(
                f"round '{key}' starts from {start!r}; expected models/sft or models/policy/<an"
                " earlier round of this mapping>"
            )
    return rounds


class Knobs(Section):
    whole_file: ClassVar[bool] = True  # the report shows every knob, so DVC compares all of them

    rounds: Annotated[
        dict[str, str],
        BeforeValidator(chain_of_rounds),
        Field(
            description="For each round (quoted number) the folder of the policy it starts from."
        ),
    ]
