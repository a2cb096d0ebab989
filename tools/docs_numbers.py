"""Fill in the figures that README.md and docs/*.md show, from the files that commands write.

    python tools/docs_numbers.py            # say which page is behind
    python tools/docs_numbers.py --write    # fill in; after a `dvc repro`, take its examples too

A page marks a place with `<!-- numbers: NAME -->`, and its end with `<!-- end -->`. NAME is a key
of `BLOCKS`. Sources: metrics/ (`dvc repro`), docs/example.json (rows of that run, taken here),
docs/runs.json (tools/compare_objectives.py), docs/comparison.json (tools/compare_methods.py) and
docs/benchmarks.json (`make bench`).
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
EXAMPLE = "docs/example.json"
PLACE = re.compile(r"(<!-- numbers: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
ROUND = 3  # the round whose row the pages show


def pages(root: Path = ROOT) -> Iterator[Path]:
    """The pages for people: the README and those beside it."""
    yield root / "README.md"
    yield from sorted((root / "docs").glob("*.md"))


def filled(text: str, root: Path = ROOT) -> str:
    """A page with its marked places made anew; KeyError for a NAME that there is not."""
    return PLACE.sub(lambda place: place[1] + BLOCKS[place[2]](root) + place[3], text)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def load(root: Path, name: str) -> dict:
    return json.loads((root / name).read_text(encoding="utf-8"))


def rounds(root: Path) -> list[dict]:
    """The figures of round 0 (SFT), 1, 2, ... of the run that metrics/ holds."""
    files = {int(p.stem.split("-")[1]): p for p in (root / "metrics").glob("round-*.json")}
    return [load(root, f"metrics/{files[number].name}") for number in sorted(files)]


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def run_table(root: Path) -> str:
    """Each round of the default run, a line each."""
    columns = {
        "sampled answers right": "accuracy_sampled",
        "greedy answers right": "accuracy_greedy",
        "reward": "reward",
        "KL to `models/sft`": "kl_ref",
    }
    rows = [
        ["SFT" if k == 0 else f"round {k}", *(number(r.get(c)) for c in columns.values())]
        for k, r in enumerate(rounds(root))
    ]
    return table(["after", *columns], rows)


def chart(root: Path) -> str:
    """The two accuracies as lines over the rounds."""
    found = rounds(root)
    lines = [[number(r[c]) for r in found] for c in ("accuracy_greedy", "accuracy_sampled")]
    low = min(float(value) for line in lines for value in line)
    steps = ", ".join(str(k) for k in range(len(found)))
    drawn = "".join(f"    line [{', '.join(line)}]\n" for line in lines)
    return (
        "```mermaid\nxychart-beta\n"
        '    title "Right answers to held-out words: greedy (upper line) and sampled"\n'
        f'    x-axis "round (0: SFT)" [{steps}]\n'
        f'    y-axis "share" {int(low * 10) / 10} --> 1\n{drawn}```\n'
    )


def training_table(root: Path) -> str:
    """What SFT and the reward model of the default run came to."""
    found = load(root, "metrics/training.json")
    return table(
        ["figure of the default run", "value"],
        [[f"`{name}`", number(value)] for name, value in found.items()],
    )


def seeds_table(root: Path) -> str:
    """The default objective, a column a seed."""
    found = load(root, "docs/runs.json")
    runs = [r for r in found["runs"] if r["loss"] == "grpo" and not r["settings"]]
    lines = {
        "SFT: sampled answers right": lambda r: number(r["before"]["accuracy_sampled"]),
        "last round: sampled answers right": lambda r: number(r["after"]["accuracy_sampled"]),
        "SFT: greedy answers right": lambda r: number(r["before"]["accuracy_greedy"]),
        "last round: greedy answers right": lambda r: number(r["after"]["accuracy_greedy"]),
        "reward model: held-out pairs right": lambda r: number(r["rm_validation_accuracy"]),
    }
    head = ["", *(f"seed {r['seed']}" for r in runs)]
    return table(head, [[name, *map(value, runs)] for name, value in lines.items()])


def elsewhere_table(root: Path) -> str:
    """The same run, seed 42, on two processors."""
    found = load(root, "docs/runs.json")
    here = next(r for r in found["runs"] if r["loss"] == "grpo" and r["seed"] == 42)
    after, before = here["after"]["accuracy_sampled"], here["before"]["accuracy_sampled"]
    rows = [[found["processor"], number(after), f"{after - before:+.3f}"]]
    for other in found["elsewhere"]:
        rows.append([other["processor"], number(other["after"]), f"{other['gain']:+.3f}"])
    return table(["processor", "sampled answers right", "gain"], rows)


def objectives_table(root: Path) -> str:
    """What each objective came to, a line each; greedy in brackets, † where it was made anew."""
    found = load(root, "docs/runs.json")["runs"]
    keys = dict.fromkeys((r["loss"], tuple(r["settings"].items())) for r in found)
    seeds = sorted({r["seed"] for r in found if r["loss"] != "grpo"})
    rows = []
    for loss, settings in keys:
        spelled = ", ".join(f"`{key}: {value}`" for key, value in settings) or "the defaults"
        cells = [f"`{loss}`", spelled]
        for seed in seeds:
            cells.append(
                "".join(
                    f"{number(r['after']['accuracy_sampled'])} "
                    f"({number(r['after']['accuracy_greedy'])}){' †' if 'code' in r else ''}"
                    for r in found
                    if (r["loss"], tuple(r["settings"].items()), r["seed"])
                    == (loss, settings, seed)
                )
            )
        rows.append(cells)
    return table(["loss", "settings", *(f"seed {seed}" for seed in seeds)], rows)


def row(root: Path) -> str:
    """One completion of the default run: its buffer's columns, and its tokens."""
    found = load(root, EXAMPLE)["row"]
    head = {
        "prompt": found["question"],
        "answer": found["answer"],
        "completion": found["completion"],
        "reward": f"{found['reward']:.3f}   from reward_correctness {found['reward_correctness']:g}"
        f" and reward_model {found['reward_model']:.3f}",
    }
    names = ["log_probs_old", "log_probs_ref", "values_old", "advantage", "ratio"]
    lines = [f"{name:<15}{value}" for name, value in head.items()]
    lines.append(f"{'token':<15}" + "".join(f"{text:>8}" for text in found["tokens"]))
    for name in names:
        cells = "".join(f"{value:>8.3f}" for value in found[name])
        lines.append(f"{name:<15}{cells}")
    where = f"--round {found['round']} --group {found['group']} --sample {found['sample']}"
    command = f"    python -m stages.show data/buffers {where} --tokens\n"
    return command + "\n```text\n" + "\n".join(lines) + "\n```\n"


def worse(root: Path) -> str:
    """The first of the held-out prompts that got worse from round 1 to round 2."""
    found = load(root, EXAMPLE)["worse"]
    head = ["prompt_index", "answer", "before", "after", "place", "push_before", "push_after"]
    rows = [[str(line[name]) for name in head] for line in found["rows"]]
    return f"In the default run it finds {found['count']}; the first of them:\n\n" + table(
        head, rows
    )


def speed(root: Path) -> str:
    """How much faster than TRL, work by work, in float32."""
    found = load(root, "docs/benchmarks.json")["rows"]
    works = ("SFT", "reward model", "DPO", "rollout", "optimize")
    rows = []
    for work in works:
        cells = [
            number(r["ratio"], 1)
            for model in ("tiny", "smollm2")
            for r in found
            if (r["work"], r["model"], r["peer_name"], r["precision"])
            == (work, model, "TRL", "float32")
        ]
        rows.append([work, *cells])
    return table(["work", "tiny model", "SmolLM2-135M"], rows)


def comparison(root: Path) -> str:
    """All ways to train in one table; what was not measured yet is empty."""
    rows = []
    for found in load(root, "docs/comparison.json")["rows"]:
        settings = {k: v for k, v in found["settings"].items() if not k.startswith("+")}
        spelled = ", ".join(f"`{key}: {value}`" for key, value in settings.items())
        figures = [found.get(name) for name in ("accuracy_sampled", "accuracy_greedy", "kl_sft")]
        seconds = number(found.get("seconds"), 0)
        cells = [found["title"], spelled or "the defaults", *map(number, figures), seconds]
        rows.append([*cells, ran(found)])
    names = ["sampled right", "greedy right", "KL to `models/sft`", "seconds trained"]
    return table(["method", "settings", *names, "stages that ran"], rows)


def ran(found: dict) -> str:
    """`rollout@2`, `rollout@3` -> rollout x 2, and how many stages were kept."""
    if "ran" not in found:
        return ""
    if not (kept := found["stages"] - len(found["ran"])):
        return "all: the default run"
    counts = Counter(stage.partition("@")[0] for stage in found["ran"])
    each = [name if count == 1 else f"{name} x {count}" for name, count in counts.items()]
    return f"{', '.join(each)} (kept: {kept})"


def formats(root: Path) -> str:
    """The row formats that are known, from the code."""
    from stages.rows.layouts import FORMATS

    rows = [
        [kind, f"`{name}`", *(", ".join(f"`{f}`" for f in sorted(part)) for part in fields)]
        for kind, known in FORMATS.items()
        for name, fields in known.items()
    ]
    return table(["kind", "format", "columns it needs", "may have"], rows)


BLOCKS: dict[str, Callable[[Path], str]] = {
    "run": run_table,
    "chart": chart,
    "training": training_table,
    "seeds": seeds_table,
    "elsewhere": elsewhere_table,
    "objectives": objectives_table,
    "row": row,
    "worse": worse,
    "speed": speed,
    "formats": formats,
    "comparison": comparison,
}


def take_example(root: Path = ROOT) -> None:
    """Rows of the run that lies under data/, for the pages: docs/example.json."""
    found = {"row": example_row(root), "worse": example_worse(root)}
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    (root / EXAMPLE).write_text(text, encoding="utf-8")


def example_row(root: Path) -> dict:
    """A wrong completion in a group that has right ones: there is something to learn from it."""
    import duckdb

    from stages.viewer.decoding import token_texts

    tables = [f"'{root}/data/{name}/round-{ROUND}.parquet'" for name in ("buffers", "updates")]
    query = duckdb.sql(
        f"""select * from {tables[0]} as b natural join {tables[1]} as u
        where reward_correctness = 0 and advantage[1] < 0
            and regexp_full_match(completion, '[a-z]+')
        order by "group", sample limit 1"""
    )
    found = dict(zip(query.columns, query.fetchall()[0], strict=True))
    texts = token_texts(root / "models/sft", [found["completion_ids"]])[0]
    names = ["round", "group", "sample", "answer", "completion", "reward", "reward_correctness"]
    names += ["reward_model", "log_probs_old", "log_probs_ref", "values_old", "advantage", "ratio"]
    question = found["prompt"].split("<|im_end|>")[0].split("\n")[-1]
    row = {name: found[name] for name in names}
    return row | {"question": question, "tokens": ["end" if "<|" in t else t for t in texts]}


def example_worse(root: Path, count: int = 3) -> dict:
    """What the first snippet of docs/worse.md finds: how many rows, and the first ones."""
    from contextlib import chdir

    page = (root / "docs/worse.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1].replace("print(", "str(")
    with chdir(root):
        exec(code, space := {})
        names, rows = space["worse"].columns, space["worse"].fetchall()
    return {
        "count": len(rows),
        "rows": [dict(zip(names, line, strict=True)) for line in rows[:count]],
    }


def main() -> None:
    write, behind = "--write" in sys.argv, []
    if write and (ROOT / f"data/updates/round-{ROUND}.parquet").is_file():
        take_example()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            behind.append(page.name)
            if write:
                page.write_text(new, encoding="utf-8")
    if behind:
        print(*behind, "filled in" if write else "behind: python tools/docs_numbers.py --write")
    raise SystemExit(1 if behind and not write else 0)


if __name__ == "__main__":
    main()
