"""A folder in which the training stages run in seconds: knobs, a model, rows of every kind."""

from pathlib import Path

from stages.base.tables import PAIRS, SCORED_PAIRS, SFT, write_table
from stages.models.checkpoints import save_model
from tests.helpers.models import byte_tokenizer, random_ids
from tests.helpers.tiny import small_params, write

TRAINING = {"epochs": 3, "train_batch_size": 2, "batch_acc": 2, "lr": 3e-3, "warmup_steps": 3}
SECTIONS = ("sft", "rm", "direct")
CHANGES = {f"{s}__{name}": value for s in SECTIONS for name, value in TRAINING.items()}
CHANGES |= {"sft__drop_last": True, "nonfinite": "skip"}

COMMANDS = {
    "train_sft": "--data data/sft.parquet --base models/base",
    "train_rm": "--kind bradley_terry --train data/pairs.parquet"
    " --validation data/pairs.parquet --sft models/base",
    "train_direct": "--train data/scored.parquet --validation data/scored.parquet"
    " --policy models/base",
}


def lay_out(folder: Path, model) -> None:
    """Write params.yaml, models/base and the tables of COMMANDS, 11 rows each."""
    (folder / "data" / "source").mkdir(parents=True)
    (folder / "models" / "base").mkdir(parents=True)
    save_model(folder / "models" / "base", model, byte_tokenizer())
    rows = {"sft": [], "pairs": [], "scored": []}
    for i in range(11):
        prompt, chosen, rejected = random_ids(i, 2 + i % 3, 2 + i % 2, 1 + i % 4)
        labels = [-100] * len(prompt) + chosen
        rows["sft"].append({"input_ids": prompt + chosen, "labels": labels})
        pair = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected, "margin": 0.0}
        rows["pairs"].append(pair)
        scores = {"log_probs_ref_chosen": chosen, "log_probs_ref_rejected": rejected}
        rows["scored"].append(pair | {k: [-1.0 - j for j in v] for k, v in scores.items()})
    for name, schema in (("sft", SFT), ("pairs", PAIRS), ("scored", SCORED_PAIRS)):
        write_table(folder / "data" / f"{name}.parquet", schema, rows[name], {})
    set_knobs(folder)


def set_knobs(folder: Path, **changes) -> None:
    write(folder / "params.yaml", small_params(**CHANGES | changes))


def words(stage: str, name: str) -> list[str]:
    """The options of a stage, its outputs in a folder of that name."""
    outputs = f"--out {name}/model --curve {name}/curve.csv --figures {name}/figures.json"
    return [*COMMANDS[stage].split(), *outputs.split()]
