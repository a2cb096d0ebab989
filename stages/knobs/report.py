"""Knobs of `report`, and the one check of `rounds` and `branches`."""

import re
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from stages.base.knobs import Section

BRANCH = r"[A-Za-z][A-Za-z0-9_-]*"


def chain_of_rounds(rounds: Any) -> Any:
    """Check the mapping of round -> start folder; an integer key would make DVC run no round."""
    if not isinstance(rounds, dict) or not rounds:
        raise ValueError("expected a mapping such as '1': models/sft, with at least one round")
    for key, start in rounds.items():
        if not isinstance(key, str):
            raise ValueError(f"key {key!r} is no text: quote it, '{key}': {start}")
        if not re.fullmatch(r"[1-9]\d*", key):
            raise ValueError(f"key {key!r} is no round number; expected '1', '2', ...")
        policy = re.fullmatch(r"models/policy/([1-9]\d*)", str(start))
        earlier = policy and policy[1] in rounds and int(policy[1]) < int(key)
        if start != "models/sft" and not earlier and not branch_of(start):
            raise ValueError(
                f"round '{key}' starts from {start!r}; expected models/sft, models/policy/<an"
                " earlier round of this mapping> or models/direct/<a name of branches>"
            )
    return rounds


def branch_of(start: object) -> str | None:
    """The branch whose policy a start names: `models/direct/dpo` -> `dpo`."""
    found = re.fullmatch(rf"models/direct/({BRANCH})", str(start))
    return found and found[1]


def names_of_branches(branches: Any) -> Any:
    """Check the mapping of branch -> start folder."""
    if not isinstance(branches, dict):
        raise ValueError("expected a mapping such as dpo: models/sft, or {}")
    for key, start in branches.items():
        if not isinstance(key, str) or not re.fullmatch(BRANCH, key):
            raise ValueError(
                f"key {key!r} is no name of a branch; expected letters, digits, - and _, a letter"
                " first (DVC makes no stage of a number)"
            )
        policy = re.fullmatch(r"models/policy/[1-9]\d*", str(start))
        if start != "models/sft" and not policy and not branch_of(start):
            raise ValueError(
                f"branch {key!r} starts from {start!r}; expected models/sft, models/policy/<round>"
                " or models/direct/<another branch>"
            )
    return branches


class Knobs(Section):
    whole_file: ClassVar[bool] = True  # the report shows every knob, so DVC compares all of them

    rounds: Annotated[
        dict[str, str],
        BeforeValidator(chain_of_rounds),
        Field(
            description="For each round (quoted number) the folder of the policy it starts from."
        ),
    ]
    branches: Annotated[
        dict[str, str],
        BeforeValidator(names_of_branches),
        Field(
            description="For each branch of direct alignment (a name) the folder of the policy that"
            " it starts from, which is its reference; {}: none."
        ),
    ]

    @model_validator(mode="after")
    def starts_are_made(self) -> Self:
        """DVC takes a leftover folder of a dropped branch or round for a file of the user's."""
        starts = {f"round '{key}'": start for key, start in self.rounds.items()}
        starts |= {f"branch '{key}'": start for key, start in self.branches.items()}
        made = {f"models/policy/{key}" for key in self.rounds}
        made |= {f"models/direct/{key}" for key in self.branches} | {"models/sft"}
        for name, start in starts.items():
            if start not in made:
                section = "branches" if branch_of(start) else "rounds"
                key = start.rpartition("/")[2]
                raise ValueError(f"{name} starts from {start!r}, but {section} has no {key!r}")
        self._no_circle()
        return self

    def _no_circle(self) -> None:
        """Raise ValueError where policies start from one another in a circle."""
        above = {f"models/policy/{key}": start for key, start in self.rounds.items()}
        above |= {f"models/direct/{key}": start for key, start in self.branches.items()}
        for policy in above:
            seen, place = {policy}, above[policy]
            while place in above:
                if place in seen:
                    raise ValueError(f"{policy} starts from itself, by way of {place}")
                seen.add(place)
                place = above[place]
