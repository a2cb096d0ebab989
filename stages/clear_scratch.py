"""Remove what cut-off stages keep: `python -m stages.clear_scratch`. No stage.

    RLHF_SCRATCH (or .scratch) holds one folder for each piece of work that was cut off.

A stage that is under way loses what it could go on from, and no more than that. Nothing else that
lies in the folder is touched.
"""

import gc

import click

from stages.base.scratch import clear, works


@click.command()
@click.option("--days", type=click.FloatRange(min=0), default=0, help="Only what is older (0).")
def clear_scratch(days: float) -> None:
    """Remove what cut-off stages keep in the scratch folder."""
    gc.enable()
    found = [work for work in works() if work[1] >= days]
    for folder, age, size in found:
        if clear(folder):
            click.echo(f"{folder}: removed, {size / 1e6:,.1f} MB, {age:.1f} days old")
    if not found:
        click.echo("nothing to remove")


if __name__ == "__main__":
    clear_scratch()
