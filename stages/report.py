"""Stage `report`: gather the figures of all stages into the tables and the page that people read.

Reads   data/figures, data/curves; of data/evaluations, data/buffers and data/updates a few rows;
        docs/metrics.md for the meaning of the figures. In a clone DVC is asked for those of stages
        that it skipped
Knobs   rounds (which rounds there are: files of dropped rounds may still lie about), and all of
        params.yaml to show it
Writes  metrics/ for `dvc metrics`, plots/ for `dvc plots`, reports/index.html

Every figure is defined in docs/metrics.md.
"""

from csv import DictReader
from pathlib import Path

import click

from stages.base import params
from stages.base.clones import bring_outputs
from stages.base.command import Stage, paths, say
from stages.base.errors import MissingFile
from stages.base.files import replacing
from stages.base.metrics import growing_curve, read_json, write_json
from stages.knobs.report import Knobs, RewardModel
from stages.page.excerpts import (
    answers,
    best_of_answers,
    best_of_rollouts,
    changed_prompts,
    completions,
    telling_groups,
)
from stages.page.page import Run, definitions, page, spread

EVALUATED = ("accuracy_sampled", "accuracy_greedy", "length", "finished")
REWARD_MODEL = (
    "validation_accuracy",
    "validation_ties",
    "calibration_error",
    "outcome_accuracy",
    "outcome_auc",
    "outcome_ranking",
    "outcome_best",
    "outcome_right",
    "outcome_completions",
    "buffer_auc",
    "buffer_ranking",
    "buffer_best",
)
PROMPTS, GROUPS = 4, 2  # shown at either end


@click.command(cls=Stage)
@paths(
    "--figures",
    "--curves",
    "--evaluations",
    "--buffers",
    "--updates",
    "--meanings",
    "--metrics",
    "--plots",
    "--page pages",
)
def report(
    figures: Path,
    curves: Path,
    evaluations: Path,
    buffers: Path,
    updates: Path,
    meanings: Path,
    metrics: Path,
    plots: Path,
    pages: Path,
) -> None:
    """Gather figures, curves and samples."""
    knobs = params.load(Knobs)
    bring_outputs(knobs.model_dump(), figures, curves, evaluations, buffers, updates)
    starts = dict(sorted(knobs.rounds.items(), key=lambda pair: int(pair[0])))
    rounds = [int(key) for key in starts]
    found = {number: read_round(figures, number) for number in [0, *rounds]}
    asked = {number: evaluations / f"{evaluation_of(number)}.parquet" for number in found}
    table = [
        round_row(number, stages, best_of_answers(asked[number]))
        for number, stages in found.items()
    ]
    branches = [branch_row(figures, name, start) for name, start in knobs.branches.items()]
    rewards = [reward_model_row(figures, "rm", knobs.rm)]
    rewards += [reward_model_row(figures, *pair) for pair in knobs.reward_models.items()]
    picks = {
        name: read_json(figures / "score_answers" / f"{name}.json") for name in knobs.best_of_n
    }
    for name, of_tables in picks.items():
        for row in table:
            row |= picked(name, of_tables[evaluation_of(row["round"])])
        for row in branches:
            row |= picked(name, of_tables[f"direct-{row['branch']}"])
    sft, rm = read_json(figures / "train_sft.json"), read_json(figures / "train_rm.json")
    with replacing(metrics, folder=True) as folder:
        training = {f"sft_{name}": sft[name] for name in ("loss_first", "loss_last")}
        training |= {f"rm_{name}": rm[name] for name in ("validation_accuracy", "validation_loss")}
        write_json(folder / "training.json", training)
        write_json(folder / "summary.json", summary(table))
        for row in table:
            known = {name: value for name, value in row.items() if value is not None}
            known.pop("round")
            write_json(folder / f"round-{row['round']}.json", known)
        for row in branches:
            known = {name: value for name, value in row.items() if value is not None}
            write_json(folder / f"direct-{known.pop('branch')}.json", known)
        for row in rewards[1:]:
            known = {name: value for name, value in row.items() if value is not None}
            write_json(folder / f"reward-{known.pop('name')}.json", known)
    with replacing(plots, folder=True) as folder:
        write_json(folder / "rounds.json", table)  # an undefined figure of a CSV is drawn as 0
        with growing_curve(folder / "steps.csv") as add:
            for row in steps_of(curves, rounds):
                add(row)
    run = Run(
        rounds=starts,
        table=[row | details(found[row["round"]], row["round"], buffers) for row in table],
        sft=read_curve(curves / "train_sft.csv"),
        rm=read_curve(curves / "train_rm.csv"),
        steps=steps_of(curves, rounds),
        rm_figures=rm,
        samples=samples(asked, rounds),
        groups={number: groups(buffers, updates, number) for number in rounds},
        params=params.read(),
        definitions=definitions(meanings.read_text(encoding="utf-8")),
        branches=branches,
        reward_models=rewards,
        picks={name: f"{knobs.best_of_n[name]}" for name in picks},
    )
    with replacing(pages, folder=True) as folder:
        (folder / "index.html").write_text(page(run), encoding="utf-8", newline="\n")
    say(summary(table), rounds=len(rounds))


def summary(table: list[dict]) -> dict:
    """What a run came to, in one row of `dvc exp show`: the last round's figures and the gain."""
    first, last = table[0]["accuracy_sampled"], table[-1]["accuracy_sampled"]
    names = ("accuracy_sampled", "accuracy_greedy", "reward", "kl_ref")
    found = {f"final_{name}": table[-1][name] for name in names if table[-1][name] is not None}
    return found if first is None or last is None else found | {"accuracy_gain": last - first}


def read_round(figures: Path, number: int) -> dict[str, dict]:
    """Figures by stage; round 0 is the SFT policy, which was evaluated and sampled by no round."""
    found = {"evaluate": read_json(figures / "evaluate" / f"{number or 'sft'}.json")}
    for stage in ("rollout", "score", "optimize") if number else ():
        found[stage] = read_json(figures / stage / f"{number}.json")
    return found


def evaluation_of(number: int) -> str:
    """The name of a round's table of held-out answers; 0 is the SFT policy."""
    return f"round-{number}" if number else "sft"


def round_row(number: int, stages: dict[str, dict], best: float | None) -> dict:
    """The headline figures of a round; what it has not is null. `best` of its sampled answers."""
    row = {"round": number} | {name: stages["evaluate"][name] for name in EVALUATED}
    row["accuracy_best"] = best
    row["reward"] = stages.get("score", {}).get("reward")
    for name in ("kl_ref", "kl", "clipped_fraction", "entropy", "grad_norm"):
        row[name] = stages.get("optimize", {}).get(name)
    return row


def branch_row(figures: Path, name: str, start: str) -> dict:
    """Figures of a branch of direct alignment: its evaluation, and what its pairs show."""
    evaluated = read_json(figures / "evaluate" / f"direct-{name}.json")
    trained = read_json(figures / "train_direct" / f"{name}.json")
    shown = [key for key in trained if key not in ("validation_pairs", "pairs", "steps", "skipped")]
    row = {"branch": name, "start": start} | {key: evaluated[key] for key in EVALUATED}
    return row | {f"pairs_{key}": trained[key] for key in shown}


def reward_model_row(figures: Path, name: str, source: RewardModel) -> dict:
    """Figures of models/rm (`rm`), or of a further reward model."""
    path = figures / ("train_rm.json" if name == "rm" else f"train_reward/{name}.json")
    trained = read_json(path)
    row = {"name": name, "kind": source.kind, "data": source.data}
    return row | {name: trained.get(name) for name in REWARD_MODEL}


def picked(name: str, figures: dict) -> dict:
    """What best of n adds to the row of a round or branch; null where nothing could be checked."""
    return {f"accuracy_picked_{name}": figures.get("accuracy_picked")}


def details(stages: dict[str, dict], number: int, buffers: Path) -> dict:
    """More figures of a round, for the page alone; none of round 0."""
    if "rollout" not in stages:
        return {}
    sampled, scored, updated = (stages[name] for name in ("rollout", "score", "optimize"))
    rules = ("reward_correctness", "reward_format", "reward_length")
    return (
        {name: sampled.get(name) for name in rules}
        | {f"{name}_rollout": sampled[name] for name in ("length", "finished")}
        | best_of_rollouts(buffers / f"round-{number}.parquet")
        | {"reward_model": scored["reward_model"]}
        | {name: updated[name] for name in ("advantage_std", "groups_without_spread")}
        | {name: value for name, value in updated.items() if name.startswith("sampler_ratio")}
    )


def samples(paths: dict[int, Path], rounds: list[int]) -> list[dict]:
    """The held-out prompts that changed most, with the answers of evenly spaced rounds."""
    changes = changed_prompts(paths[0], paths[rounds[-1]], PROMPTS)
    numbers = [number for number, _ in changes]
    shown = {number: answers(paths[number], numbers) for number in spread([0, *rounds])}
    return [
        {name: shown[0][prompt][0][name] for name in ("prompt_index", "prompt", "answer")}
        | {"change": change}
        | {"cells": [(number, found.get(prompt, [])) for number, found in shown.items()]}
        for prompt, change in changes
    ]


def groups(buffers: Path, updates: Path, number: int) -> list[tuple[str, list[dict]]]:
    """The telling groups of a round, each with its heading."""
    name = f"round-{number}.parquet"
    chosen = telling_groups(buffers / name, GROUPS)
    wanted = [group for found in chosen.values() for group in found]
    found = completions(buffers / name, updates / name, wanted)
    return [(heading, found[group]) for heading, named in chosen.items() for group in named]


def steps_of(curves: Path, rounds: list[int]) -> list[dict]:
    """The step curves of all rounds, one after the other."""
    return [row for number in rounds for row in read_curve(curves / "optimize" / f"{number}.csv")]


def read_curve(path: Path) -> list[dict]:
    """Rows of a CSV curve; MissingFile where it is not there."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(DictReader(file))
    except FileNotFoundError as error:
        raise MissingFile(path, "the curve of a stage") from error


if __name__ == "__main__":
    report()
