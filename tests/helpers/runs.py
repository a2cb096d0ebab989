"""A made-up run for the report's page: every figure there, or as few as a run can have."""

from stages.page.page import Run

FIGURES = (
    "accuracy_sampled accuracy_greedy length finished reward kl_ref kl clipped_fraction entropy"
    " grad_norm reward_correctness reward_format reward_length length_rollout finished_rollout"
    " reward_model advantage_std groups_without_spread accuracy_best accuracy_rollout"
    " accuracy_picked_rollout accuracy_best_rollout"
    " sampler_ratio_mean sampler_ratio_max sampler_ratio_cut"
).split()
EVALUATED = FIGURES[:4]


def run_of(rounds: dict[str, str], text: str = "evil", known: bool = True, group: int = 3) -> Run:
    """A run whose prompts, answers, headings and knobs all say `text`.

    `known` false: every figure that may be undefined is. `group`: completions of a group.
    """
    numbers = [0, *map(int, rounds)]

    def figure(number: int, name: str) -> float | None:
        return 0.1 * number + 0.01 * len(name) if known and (number or name in EVALUATED) else None

    return Run(
        rounds=rounds,
        table=[{"round": k} | {name: figure(k, name) for name in FIGURES} for k in numbers],
        sft=[{"step": str(i), "loss": "1.5", "loss_ema": "1.25"} for i in range(1, 4)],
        rm=[{"step": str(i), "loss": "0.5", "loss_ema": ""} for i in range(1, 4)],
        steps=[step(k, i, known) for k in numbers[1:] for i in range(2 * k - 1, 2 * k + 1)],
        rm_figures={
            "validation_accuracy": 0.75,
            "calibration": {"confidence": [0.6], "accuracy": [0.5], "pairs": [4]},
            "gaps": {"edges": [-1.0, 0.0, 1.0], "pairs": [1, 3]},
        },
        samples=[sample(text, numbers[:8], known)],
        groups={k: [("worst", completions(text, group, known))] for k in numbers[1:]},
        params={"loss": text, "model": {"source": text}, "list": [text], "empty": None},
        definitions={"reward": text, "accuracy_sampled": f'"{text}"'},
    )


def step(number: int, index: int, known: bool) -> dict:
    """A line of the step curve, as text, as the CSV files have it."""
    value = "0.5" if known else ""
    names = ("loss", "grad_norm", "kl", "clipped_fraction", "value_loss")
    return {"step": str(index), "round": str(number)} | dict.fromkeys(names, value)


def sample(text: str, numbers: list[int], known: bool) -> dict:
    """A held-out prompt with the same two answers in every round."""
    rows = [
        {
            "greedy": greedy,
            "completion": text,
            "correct": greedy,
            "reward_correctness": float(greedy) if known else None,
        }
        for greedy in (True, False)
    ]
    cells = [(number, rows) for number in numbers]
    answer = text if known else None
    return {"prompt_index": 7, "prompt": text, "answer": answer, "change": 0.5, "cells": cells}


def completions(text: str, count: int, known: bool) -> list[dict]:
    """The completions of a group, their rewards falling."""
    rewards = [name for name in FIGURES if name.startswith("reward")]
    update = ("advantage", "ratio_max", "clipped_fraction", "kl")
    return [
        {"group": 5, "sample": i, "prompt": text, "answer": text if known else None}
        | {"completion": text, "finished": i % 2 == 0, "used": known}
        | {name: 1.0 - i if known else None for name in (*rewards, *update)}
        for i in range(count)
    ]
