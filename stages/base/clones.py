"""What a clone lacks, brought by DVC while a stage runs.

`dvc repro --pull --allow-missing` skips stages that did not change and pulls a dependency that is
missing whole. Of a folder it pulls nothing once a single file lies in it: a round that has just
run, or the .dvc file that Git keeps. The stage would go on with a part, and the rest be lost from
its hash.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from ruamel.yaml import YAML

from stages.base.errors import InputError

PIPELINE = Path("dvc.yaml")


def bring_outputs(knobs: dict, *folders: Path) -> None:
    """Pull the pipeline's own outputs below `folders` that are missing; `knobs` names the rounds.

    InputError where DVC cannot bring them.
    """
    if under_dvc():
        document = YAML(typ="safe").load(PIPELINE.read_text(encoding="utf-8"))
        found = outputs(document["stages"], knobs)
        pull([path for path in found if any(folder in path.parents for folder in folders)])


def bring_sources(*folders: Path) -> None:
    """Pull what the .dvc files below `folders` stand for; InputError where DVC cannot."""
    if under_dvc():
        pull([path for folder in folders for path in tracked(folder)])


def outputs(stages: dict, knobs: dict) -> Iterator[Path]:
    """Paths of all `outs` of dvc.yaml, those of a stage with `foreach` once for each key."""
    for stage in stages.values():
        keys = knobs[stage["foreach"][2:-1]] if "foreach" in stage else [""]
        for out in stage.get("do", stage).get("outs", []):
            yield from (Path(out.replace("${key}", key)) for key in keys)


def tracked(folder: Path) -> Iterator[Path]:
    """Paths that .dvc files below a folder stand for, as `dvc add` writes them."""
    for file in sorted(folder.rglob("*.dvc")):
        for out in YAML(typ="safe").load(file.read_text(encoding="utf-8")).get("outs", []):
            yield file.parent / out["path"]


def under_dvc() -> bool:
    """Whether DVC runs this stage: by hand, it reads what there is."""
    return "DVC_STAGE" in os.environ


def pull(paths: list[Path]) -> None:
    missing = [str(path) for path in paths if not path.exists()]
    if not missing:
        return
    click.echo(f"not here yet, {len(missing)} of what this stage reads: dvc pull {missing[0]} ...")
    done = subprocess.run([sys.executable, "-m", "dvc", "pull", "--quiet", *missing])
    if done.returncode:
        raise InputError(f"{missing[0]}: missing, and DVC could not pull it (its words above)")
