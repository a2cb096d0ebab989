"""Knobs of `report`, and the one check of what says which stages there are.

These are `rounds`, `branches`, `rm.kind` and `rm.data`, `reward_models`, `labelled` and
`best_of_n`: dvc.yaml reads them, and no stage that trains does.
"""

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from stages.base.knobs import Section, choice, text

BRANCH = r"[A-Za-z][A-Za-z0-9_-]*"
PAIRS = "data/preferences/train.parquet"
TABLE = (
    r"data/(rollouts|buffers)/round-[1-9]\d*\.parquet|data/source/.+\.parquet"
    rf"|data/labelled/{BRANCH}\.parquet"
)


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


class RewardModel(Section):
    """A reward model by what it learns from."""

    kind: choice(
        "bradley_terry learns from pairs, outcome from completions that are right or wrong.",
        "bradley_terry",
        "outcome",
    )
    data: text(
        "What a reward model learns from: data/preferences/train.parquet; or, of kind outcome, the"
        " rollouts or the buffer of a round (data/rollouts/round-1.parquet), data/labelled/<name>"
        ".parquet, or a copy of such a table under data/source."
    )

    @model_validator(mode="after")
    def data_fits(self) -> Self:
        if (self.kind == "outcome") == (self.data == PAIRS):
            wanted = (
                "a table such as data/rollouts/round-1.parquet" if self.data == PAIRS else PAIRS
            )
            raise ValueError(f"data is {self.data!r}; kind {self.kind} expects {wanted}")
        if self.kind == "outcome" and not re.fullmatch(TABLE, self.data):
            raise ValueError(
                f"data is {self.data!r}; expected data/rollouts/round-<number>.parquet, the same of"
                " data/buffers, data/labelled/<a name of labelled>.parquet or a .parquet file under"
                " data/source"
            )
        return self


def names_of_files(labelled: Any) -> Any:
    """Check the mapping of name -> file of labelled completions."""
    if not isinstance(labelled, dict):
        raise ValueError("expected a mapping such as mine: data/source/labelled.jsonl, or {}")
    for key, file in labelled.items():
        if not isinstance(key, str) or not re.fullmatch(BRANCH, key):
            raise ValueError(f"key {key!r} is no name; expected letters, digits, - and _")
        if not str(file).startswith("data/source/"):
            raise ValueError(f"{key!r} is {file!r}; expected a file under data/source")
    return labelled


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
    rm: RewardModel
    reward_models: Annotated[
        dict[Annotated[str, Field(pattern=rf"^{BRANCH}$")], RewardModel],
        Field(
            description="Further reward models, trained beside models/rm to be compared with it:"
            " name: {kind, data}; {}: none."
        ),
    ]
    labelled: Annotated[
        dict[str, str],
        BeforeValidator(names_of_files),
        Field(
            description="Files of completions labelled right or wrong, which become"
            " data/labelled/<name>.parquet; {}: none."
        ),
    ]

    best_of_n: Annotated[
        dict[Annotated[str, Field(pattern=rf"^{BRANCH}$")], str],
        Field(
            description="Reward models that pick one of the sampled held-out answers (best of n):"
            " name: models/rm or models/reward/<a name of reward_models>; {}: none."
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
        self._tables_are_made()
        made = {"models/rm"} | {f"models/reward/{key}" for key in self.reward_models}
        for key, folder in self.best_of_n.items():
            if folder not in made:
                raise ValueError(
                    f"best_of_n.{key} is {folder!r}; expected {' or '.join(sorted(made))}"
                )
        return self

    def _tables_are_made(self) -> None:
        """Raise ValueError for a reward model that learns from a table that no stage makes."""
        models = {"rm": self.rm}
        models |= {f"reward_models.{key}": model for key, model in self.reward_models.items()}
        made = {f"data/rollouts/round-{key}.parquet" for key in self.rounds}
        made |= {f"data/buffers/round-{key}.parquet" for key in self.rounds}
        made |= {f"data/labelled/{key}.parquet" for key in self.labelled} | {PAIRS}
        for name, model in models.items():
            if model.data not in made and not model.data.startswith("data/source/"):
                section = "labelled" if "labelled" in model.data else "rounds"
                key = Path(model.data).stem.removeprefix("round-")
                raise ValueError(f"{name}.data is {model.data!r}, but {section} has no {key!r}")

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
