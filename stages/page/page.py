"""The report as one self-contained HTML page: plain values in, text out.

Whatever comes out of models, data and parameters is escaped by the template engine; control and
direction characters, which would not be seen or would move what follows, are spelled out first.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stages.base.spelling import flat, spelled_out
from stages.page.charts import Line, histogram, line_chart, short

LONGEST_TEXT, LONGEST = 600, 2000  # characters of a prompt or an answer, and of anything else
COLUMNS = 8  # evaluations side by side
ROWS = 8  # completions of a group


@dataclass(frozen=True)
class Run:
    """What the page shows; the names of figures are those of docs/metrics.md.

    table      figures of each round, round 0 being the SFT policy
    sft, rm    curves of these trainings, steps those of all rounds; numbers may be text, as in CSV
    rm_figures of train_rm
    samples    [{prompt, answer, change, cells: [(round, rows of the evaluation)]}]
    groups     {round: [(heading, rows of completions)]}
    branches   figures of each branch of direct alignment; may be empty
    reward_models  name, kind, data and figures of each, models/rm first
    picks      {name: reward model} of best of n, whose figures are in table and branches
    """

    rounds: Mapping[str, str]
    table: Sequence[dict]
    sft: Sequence[dict]
    rm: Sequence[dict]
    steps: Sequence[dict]
    rm_figures: dict
    samples: Sequence[dict]
    groups: Mapping[int, Sequence[tuple[str, Sequence[dict]]]]
    params: dict
    definitions: Mapping[str, str]
    branches: Sequence[dict] = ()
    reward_models: Sequence[dict] = ()
    picks: Mapping[str, str] = field(default_factory=dict)


def page(run: Run) -> str:
    """The whole page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: visible(value, LONGEST) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": short, "visible": visible, "counted": counted}
    return environment.get_template("page.html.j2").render(
        run=run,
        first=run.table[0],
        opening=next(row for row in run.table if row["round"]),
        last=run.table[-1],
        rounds=[int(key) for key in run.rounds],
        sections=sections(run),
        params=[
            (key, knob(value)) for key, value in sorted(flat(run.params).items(), key=in_order)
        ],
        rows_shown=ROWS,
    )


def visible(text: str | None, longest: int = LONGEST_TEXT) -> str:
    """Text cut to `longest` characters, what a browser would hide or obey in it spelled out."""
    if text is None:
        return ""
    rest = len(text) - longest
    tail = f" … ({rest:,} more characters)" if rest > 0 else ""
    return spelled_out(text[:longest], keep="\n\t") + tail


def counted(rows: Sequence[dict]) -> list[tuple[str, bool, int]]:
    """Rows of an evaluation -> (answer, right or not, how often), the most frequent first."""
    found = Counter((row["completion"], row["correct"]) for row in rows)
    order = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    return [(text, right, count) for (text, right), count in order]


def spread(items: Sequence, count: int = COLUMNS) -> list:
    """At most `count` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def knob(value: object) -> str:
    """A value of params.yaml as it is written there."""
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def in_order(pair: tuple[str, object]) -> str:
    """By this `rounds.9` comes before `rounds.10`."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(9), pair[0])


def chains(rounds: Mapping[str, str]) -> list[list[int]]:
    """The knob `rounds` -> chains of rounds from where they branch off, 0 being models/sft.

    [[0, 1, 2, 3], [1, 4]] for 4 started from models/policy/1.
    """
    found: list[list[int]] = []
    for number, folder in ((int(key), folder) for key, folder in rounds.items()):
        number_of = re.fullmatch(r"models/policy/(\d+)", folder)
        start = int(number_of[1]) if number_of else 0  # a branch starts from what SFT made
        running = next((chain for chain in found if chain[-1] == start), None)
        if running is None:
            found.append([start, number])
        else:
            running.append(number)
    return found


def definitions(markdown: str) -> dict[str, str]:
    """docs/metrics.md -> figure: meaning, of its tables whose first column names figures."""
    found = {}
    for names, meaning in re.findall(r"^\| (`[^|]+`) \| (.+) \|$", markdown, flags=re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            found[name] = meaning.replace("\\|", "|").replace("`", "")
    return found


# Title, unit of the y axis, figures, and whether that axis starts at 0.
BY_ROUND = {
    "Outcome": (
        ("Held-out accuracy", "share right", "accuracy_sampled accuracy_greedy", False),
        ("Reward", "reward", "reward", False),
        ("KL", "nats per token", "kl_ref kl", True),
    ),
    "Rewards and behaviour": (
        ("Rule rewards", "mean", "reward_correctness reward_format reward_length", False),
        ("Reward model's score", "logits", "reward_model", False),
        (
            "Best of n rollouts",
            "share right",
            "accuracy_rollout accuracy_picked_rollout accuracy_best_rollout",
            False,
        ),
        ("Length", "tokens", "length length_rollout", True),
        ("Answers that ended", "share", "finished finished_rollout", False),
        ("Clip share", "share of tokens", "clipped_fraction", True),
        ("Entropy", "nats per token", "entropy", True),
        ("Groups all alike", "share", "groups_without_spread", True),
        ("Advantage", "standard deviation", "advantage_std", True),
        ("Policy against sampler", "ratio", "sampler_ratio_mean sampler_ratio_max", False),
        ("Sampler's ratios cut", "share of tokens", "sampler_ratio_cut", True),
    ),
}
BY_STEP = (
    ("Gradient norm", "L2 norm", "grad_norm", True),
    ("KL to the sampling policy", "nats per token", "kl", True),
    ("Clip share", "share of tokens", "clipped_fraction", True),
    ("Loss", "loss", "loss", False),
    ("Value loss", "loss", "value_loss", True),
)


def sections(run: Run) -> list[dict]:
    """Title and charts of each section; what was not measured has no chart."""
    rows = {row["round"]: row for row in run.table}
    order = chains(run.rounds)
    rounds = [[rows[k] for k in chain] for chain in order]
    steps = [[row for k in chain[1:] for row in _of(run.steps, k)] for chain in order]
    found = {
        title: [_curves(run, rounds, "round", *chart) for chart in charts]
        for title, charts in BY_ROUND.items()
    }
    found["Outcome"].append(kl_against_reward(run, rows, order))
    found["Reinforcement learning, step by step"] = [
        _curves(run, steps, "step", *chart) for chart in BY_STEP
    ]
    losses = "loss loss_ema"
    found["SFT and reward model"] = [
        _curves(run, [run.sft], "step", "SFT loss", "nats per token", losses, False),
        _curves(run, [run.rm], "step", "Reward model loss", "loss", losses, False),
        calibration(run),
        margins(run),
    ]
    return [
        {"title": title, "charts": [card for card in cards if card["chart"]]}
        for title, cards in found.items()
    ]


def _curves(
    run: Run,
    parts: Sequence[Sequence[dict]],
    x: str,
    title: str,
    unit: str,
    figures: str,
    zero: bool,
) -> dict:
    """A card with a line for each figure, in as many parts as there are chains of rounds."""
    names, lines = figures.split(), []
    for look, name in zip(looks(names), names, strict=True):
        chains = [[(_number(row[x]), _number(row.get(name))) for row in part] for part in parts]
        if any(y is not None for chain in chains for _, y in chain):
            lines.append(Line(words(name), chains, look, dots=x == "round"))
    label = "round" if x == "round" else "optimizer step"
    legend = [(line.look, line.name) for line in lines] if len(lines) > 1 else []
    chart = line_chart(lines, label, unit, whole=True, zero=zero)
    return _card(run, title, names, chart, legend)


def kl_against_reward(run: Run, rows: Mapping[int, dict], order: Sequence[Sequence[int]]) -> dict:
    """Reward of each round's completions over the KL to the reference in its update."""
    name = "kl_ref" if any(row.get("kl_ref") is not None for row in rows.values()) else "kl"
    known = [
        [k for k in chain if None not in (rows[k].get(name), rows[k]["reward"])] for chain in order
    ]
    points = [[(rows[k][name], rows[k]["reward"]) for k in chain] for chain in known]
    labels = [[str(k) for k in chain] for chain in known]
    line = Line("round", points, dots=True, labels=labels)
    chart = line_chart([line], f"{words(name)}, nats per token", "reward")
    return _card(run, "Reward against KL", [name, "reward"], chart)


def calibration(run: Run) -> dict:
    """How often the reward model's pick is right, by how sure it is, against the diagonal."""
    bins = run.rm_figures.get("calibration") or {"confidence": [], "accuracy": [], "pairs": []}
    points = [[*zip(bins["confidence"], bins["accuracy"], strict=True)]]
    line = Line("share right", points, dots=True)
    even = Line("even", [[(0.5, 0.5), (1.0, 1.0)]] if bins["pairs"] else [], "even")
    chart = line_chart([even, line], "confidence in its pick", "share right")
    return _card(run, "Reward model calibration", ["calibration_error"], chart)


def margins(run: Run) -> dict:
    """Chosen minus rejected score of the validation pairs."""
    gaps = run.rm_figures.get("gaps") or {"edges": [], "pairs": []}
    chart = histogram(gaps["edges"], gaps["pairs"], "chosen minus rejected score", "pairs")
    return _card(run, "Reward model margins", ["validation_margin"], chart)


def words(name: str) -> str:
    """A figure's name for people."""
    return name.replace("_rollout", " of rollouts").replace("_", " ")


def _card(run: Run, title: str, names: Sequence[str], chart, legend: Sequence = ()) -> dict:
    meaning = [f"{words(n)}: {run.definitions[n]}" for n in names if n in run.definitions]
    return {"title": title, "chart": chart, "legend": legend, "meaning": "\n".join(meaning)}


def looks(names: Sequence[str]) -> list[str]:
    """Classes of the style sheet: what is averaged stands behind its moving average."""
    if "loss_ema" in names:
        return ["faint", "s1"]
    return [f"s{i}" for i in range(1, len(names) + 1)]


def _of(steps: Sequence[dict], number: int) -> list[dict]:
    return [row for row in steps if _number(row["round"]) == number]


def _number(text: str | float | None) -> float | None:
    return None if text in (None, "") else float(text)
