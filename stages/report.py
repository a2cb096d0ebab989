"""Stage `report`: gather the figures of all stages into the tables that people read.

Reads   data/figures, data/curves
Knobs   rounds (which rounds there are: files of dropped rounds may still lie about)
Writes  metrics/ for `dvc metrics`, plots/ for `dvc plots`

Every figure is defined in docs/metrics.md.
"""

from csv import DictReader
from pathlib import Path

import click

from stages.core.errors import InputError
from stages.knobs.report import Knobs
from stages.store.common import params
from stages.store.common.command import Stage, say
from stages.store.common.files import replacing
from stages.store.common.metrics import read_json, write_curve, write_json

EVALUATED = ("accuracy_sampled", "accuracy_greedy", "length", "finished")


@click.command(cls=Stage)
@click.option("--figures", type=click.Path(path_type=Path), required=True)
@click.option("--curves", type=click.Path(path_type=Path), required=True)
@click.option("--metrics", type=click.Path(path_type=Path), required=True)
@click.option("--plots", type=click.Path(path_type=Path), required=True)
def report(figures: Path, curves: Path, metrics: Path, plots: Path) -> None:
    """Gather figures and curves."""
    rounds = [int(key) for key in params.load(Knobs).rounds]
    table = [round_row(figures, number) for number in [0, *rounds]]
    sft, rm = read_json(figures / "train_sft.json"), read_json(figures / "train_rm.json")
    with replacing(metrics, folder=True) as folder:
        training = {f"sft_{name}": sft[name] for name in ("loss_first", "loss_last")}
        training |= {f"rm_{name}": rm[name] for name in ("validation_accuracy", "validation_loss")}
        write_json(folder / "training.json", training)
        for row in table:
            known = {name: value for name, value in row.items() if value is not None}
            known.pop("round")
            write_json(folder / f"round-{row['round']}.json", known)
    with replacing(plots, folder=True) as folder:
        write_curve(folder / "rounds.csv", table)
        write_curve(folder / "sft.csv", read_curve(curves / "train_sft.csv"))
        write_curve(folder / "rm.csv", read_curve(curves / "train_rm.csv"))
        write_curve(folder / "steps.csv", steps_of(curves, rounds))
    last = table[-1]
    before, after = table[0]["accuracy_sampled"], last["accuracy_sampled"]
    gain = None if before is None or after is None else after - before
    say({name: last[name] for name in EVALUATED}, rounds=len(rounds), accuracy_gain=gain)


def round_row(figures: Path, number: int) -> dict:
    """The headline figures of a round; round 0 is the SFT policy, which was sampled by no round."""
    found = read_json(figures / "evaluate" / f"{number or 'sft'}.json")
    row = {"round": number} | {name: found[name] for name in EVALUATED}
    scored = updated = {}
    if number:
        scored = read_json(figures / "score" / f"{number}.json")
        updated = read_json(figures / "optimize" / f"{number}.json")
    row["reward"] = scored.get("reward")
    for name in ("kl_ref", "kl", "clipped_fraction", "entropy", "grad_norm"):
        row[name] = updated.get(name)
    return row


def steps_of(curves: Path, rounds: list[int]) -> list[dict]:
    """The step curves of all rounds, one after the other."""
    return [row for number in rounds for row in read_curve(curves / "optimize" / f"{number}.csv")]


def read_curve(path: Path) -> list[dict]:
    """Rows of a CSV curve; InputError where it is missing."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(DictReader(file))
    except FileNotFoundError as error:
        raise InputError(f"{path}: missing; expected the curve of a stage") from error


if __name__ == "__main__":
    report()
