"""The table of the benchmarks: JSON that is measured, and the Markdown page that it becomes."""

import json
from pathlib import Path

EMPTY = {"machine": {}, "rows": [], "idle": None, "growth": {}}
# (must, aim) of the ratio on the tiny model and on SmolLM2, by work and peer.
GOALS = {
    ("SFT", "TRL"): {"tiny": (1.2, 2), "smollm2": (2.5, 4)},
    ("reward model", "TRL"): {"tiny": (1.2, 2), "smollm2": (2.5, 4)},
    ("DPO", "TRL"): {"tiny": (2.5, 3.5), "smollm2": (2.5, 3.5)},
    ("rollout", "TRL"): {"tiny": (2, 4), "smollm2": (1.5, 3)},
    ("rollout", "plain loop"): {"tiny": (4, 4), "smollm2": (4, 4)},
    ("optimize", "TRL"): {"tiny": (1.2, 2), "smollm2": (2.5, 4)},
    ("optimize by LoRA", "TRL"): {"tiny": (1.2, 2.5), "smollm2": (2.5, 4)},
    ("tokenization", "datasets.map"): {"tiny": (1.5, 3), "smollm2": (1.5, 3)},
    ("four rounds through files", "in memory"): {"smollm2": (1 / 1.35, 1 / 1.1)},
    ("SFT, share of peak", "matrix product"): {"smollm2": (0.4, 0.6)},
}
# What is aimed at on rows of real length: the ratio, and the share of the peer's memory.
LONG_GOALS = {
    "SFT": (3, 0.5),
    "SFT, every token trained": (2.2, 0.6),
    "reward model": (3, 0.5),
    "rollout": (2, None),
    "optimize": (2.5, 0.35),
    "optimize by LoRA": (2.5, 0.5),
}
HEAD = """# Benchmarks

Made by `make bench`, how cost grows by `make growth` (tests/benchmarks);
[performance.md](performance.md) says what was tried. Both
sides have the same model, rows and machine and run in turn, A B A B, each in a process of its own;
a figure is the median of warm steps. Every token trained, the plain loop and the four rounds run
once, not twice. SFT, reward model and DPO take 16 rows or pairs a step, DPO with the reference run
before, on both sides; a round is 16 prompts with 8 completions each for the tiny model, 6 with 8
for SmolLM2 (24 with 8 in the four rounds through files), of up to 12 tokens, in micro-batches of
16. SFT learns the answers alone, as the pipeline
does; TRL learns every token of a row, and "every token trained" is this project doing so too.
Ratios are this project over the peer, more being better; for four rounds the ratio is the loop's
time over that of the stages' processes. MB is the peak of the largest process.
"""


LONG = """Word problems with worked solutions (reasoning-gym's gsm_symbolic, as long as GSM8K's) and
SmolLM2. A step is of 16 rows or pairs, a round of 2 prompts with 8 completions each of up to 256
tokens. `train_max_tokens` is 2,048 here, so that a pass holds about eight rows and the gradient is
that of the whole step; TRL has its 16 rows in one pass.
"""


def merged(rows: list[dict], fresh: list[dict]) -> list[dict]:
    """Rows with the fresh ones in place of those of the same work, model, peer and precision."""

    def key(row: dict) -> tuple:
        return (
            row.get("long", False),
            *(row[n] for n in ("precision", "work", "peer_name", "model")),
        )

    found = {key(row): row for row in [*rows, *fresh]}
    return list(found.values())


def save(path: Path, table: dict) -> None:
    """Write the JSON file, and the page beside it."""
    path.write_text(json.dumps(table, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(table))


def markdown(table: dict) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in table["machine"].items())
    parts = [HEAD, facts + "\n"]
    for precision in dict.fromkeys(row["precision"] for row in table["rows"]):
        rows = [row for row in table["rows"] if row["precision"] == precision]
        parts += [f"## {precision}\n", comparison([row for row in rows if not row.get("long")])]
        if long := [row for row in rows if row.get("long")]:
            parts += [f"## {precision}, answers of real length\n", LONG, lengthy(long)]
    if table["idle"]:
        found = table["idle"]
        parts.append(
            f"`dvc repro` with nothing to do, 6 rounds: {found['seconds']:.2f} s (must: 2 s)\n"
        )
    if table["growth"]:
        parts.append("## How cost grows\n")
        parts += [grown(name, lines) for name, lines in table["growth"].items()]
    return "\n".join(parts)


def comparison(rows: list[dict]) -> str:
    names = (
        "work",
        "model",
        "unit",
        "this project",
        "peer",
        "",
        "ratio",
        "must / aim",
        "MB",
        "peer's MB",
    )
    lines = [names, ["---"] * len(names)]
    for row in rows:
        goal = GOALS.get((row["work"], row["peer_name"]), {}).get(row["model"])
        if row["peer_name"] == "matrix product" and row["precision"] != "float32":
            goal = None  # of float32 alone
        lines.append(
            [
                row["work"],
                row["model"],
                row["unit"],
                f"{row['ours']:,.4g}",
                f"{row['peer']:,.4g}",
                row["peer_name"],
                f"{row['ratio']:.2f}",
                f"{goal[0]:.3g} / {goal[1]:.3g}" if goal else "",
                f"{row['ours_mb']:,}",
                f"{row['peer_mb']:,}",
            ]
        )
    return as_table(lines)


def lengthy(rows: list[dict]) -> str:
    """The comparison on rows of real length: ratio and share of memory, each beside its aim."""
    names = (
        "work",
        "unit",
        "this project",
        "TRL",
        "ratio",
        "aim",
        "MB",
        "TRL's MB",
        "share",
        "aim",
    )
    lines = [names, ["---"] * len(names)]
    for row in rows:
        ratio, share = LONG_GOALS.get(row["work"], (None, None))
        figures = [f"{row['ours']:,.4g}", f"{row['peer']:,.4g}", f"{row['ratio']:.2f}", ratio or ""]
        memory = [f"{row['ours_mb']:,}", f"{row['peer_mb']:,}"]
        memory += [f"{row['ours_mb'] / row['peer_mb']:.2f}", share or ""]
        lines.append([row["work"], row["unit"], *figures, *memory])
    return as_table(lines)


def grown(name: str, lines: list[dict]) -> str:
    """Sizes in columns; seconds, seconds per unit of size, and peak memory in rows."""
    sizes = [f"{line['size']:,}" for line in lines]
    return as_table(
        [
            [UNITS[name], *sizes],
            ["---"] * (len(sizes) + 1),
            ["seconds", *(f"{line['seconds']:.3g}" for line in lines)],
            [
                "milliseconds each",
                *(f"{1000 * line['seconds'] / line['size']:.3g}" for line in lines),
            ],
            ["peak MB", *(f"{line['peak_mb']:,}" for line in lines)],
        ]
    )


UNITS = {
    "rollout": "rollout: completions",
    "optimize": "optimize: completions",
    "tokenization": "tokenization: rows",
    "dvc repro": "`dvc repro`, nothing to do: rounds",
}


def as_table(lines: list) -> str:
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
