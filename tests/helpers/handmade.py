"""Tables of a tiny run, written by hand, so that what is read from them can be known by heart."""

from pathlib import Path

from stages.base.tables import BUFFERS, EVALUATIONS, ROLLOUTS, UPDATES, write_table
from stages.sources.tiny import byte_tokenizer

# round, group, sample, word, completion, correct, advantage, clipped share
COMPLETIONS = [
    (1, 0, 0, "ab", "ba", True, 0.5, 0.0),
    (1, 0, 1, "ab", "b", False, -0.5, 0.25),
    (1, 1, 0, "xyz", "zy\x1b[2J", False, -1.5, 0.0),
    (1, 1, 1, "xyz", "zy", False, 1.5, 0.0),
    (2, 0, 0, "xyz", "yz", False, 0.25, 0.5),
    (2, 0, 1, "xyz", "y", False, -0.75, None),
]
# round, prompt_index, greedy, completion, correct; the answers to both prompts are "ba"
ANSWERS = [
    (1, 3, True, "ba", True),
    (1, 3, False, "bb", False),
    (1, 4, True, "ba", True),
    (2, 3, True, "bz", False),
    (2, 3, False, "bb", False),
    (2, 4, True, "ba", True),
]
MODEL = "models/sft"


def write_run(root: Path) -> Path:
    """All tables of two rounds under `root`/data, and the tokenizer's folder."""
    tokenizer = byte_tokenizer(64)
    tokenizer.save_pretrained(root / MODEL)
    for number in (1, 2):
        rows = [row(tokenizer, *entry) for entry in COMPLETIONS if entry[0] == number]
        for folder, schema in (("rollouts", ROLLOUTS), ("buffers", BUFFERS), ("updates", UPDATES)):
            write_table(
                root / "data" / folder / f"round-{number}.parquet",
                schema,
                [{name: entry[name] for name in schema.names} for entry in rows],
                {"stage": folder, "round": number, "policy": MODEL},
            )
        write_table(
            root / "data" / "evaluations" / f"round-{number}.parquet",
            EVALUATIONS,
            [answer(tokenizer, *entry[1:]) for entry in ANSWERS if entry[0] == number],
            {"stage": "evaluate", "policy": MODEL},
        )
    return root


def answer(tokenizer, prompt_index, greedy, said, correct) -> dict:
    """All columns of one answer to a held-out prompt."""
    return {
        "prompt_index": prompt_index,
        "sample": 0,
        "greedy": greedy,
        "prompt": "ab",
        "answer": "ba",
        "completion": said,
        "completion_ids": [*tokenizer(said)["input_ids"], 2],
        "finished": True,
        "correct": correct,
        "reward_correctness": float(correct),
    }


def row(tokenizer, number, group, sample, word, said, correct, advantage, clipped) -> dict:
    """All columns of one completion; the reward is 1 or 0, less a tenth for each of its tokens."""
    prompt, ids = f"<|im_start|>user\n{word}<|im_end|>", [*tokenizer(said)["input_ids"], 2]
    log_probs = [-0.25 * (t + 1) for t in range(len(ids))]
    return {
        "round": number,
        "group": group,
        "sample": sample,
        "prompt_index": group,
        "prompt": prompt,
        "answer": word[::-1],
        "completion": said,
        "prompt_ids": tokenizer(prompt)["input_ids"],
        "completion_ids": ids,
        "finished": True,
        "log_probs_old": log_probs,
        "log_probs_sampler": None,
        "reward_correctness": float(correct),
        "reward_format": None,
        "reward_length": None,
        "reward_model": None,
        "reward": correct - 0.125 * len(ids),
        "log_probs_ref": [x - 0.5 for x in log_probs],
        "values_old": None,
        "advantage": [advantage] * len(ids),
        "used": True,
        "reward_shaped": None,
        "ratio": None if clipped is None else [1.0 + clipped] * len(ids),
        "ratio_mean": None if clipped is None else 1.0 + clipped,
        "ratio_max": None if clipped is None else 1.0 + 2 * clipped,
        "clipped_fraction": clipped,
        "kl": None if clipped is None else 0.0,
    }
