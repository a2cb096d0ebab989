"""The pipeline and the tree of its rounds as inline SVG."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

# Column and row of each stage; the arrows are the ones that tell the story, not all of dvc.yaml.
STAGES = {
    "prepare_task": (0, 1),
    "prepare_model": (0, 0),
    "tokenize_sft": (1, 0),
    "tokenize_preferences": (1, 2),
    "train_sft": (2, 0),
    "split_preferences": (2, 2),
    "evaluate_sft": (3, 0),
    "train_rm": (3, 2),
    "rollout": (3, 1),
    "score": (4, 1),
    "optimize": (5, 1),
    "evaluate": (6, 1),
    "report": (6, 0),
}
ARROWS = (
    ("prepare_model", "tokenize_sft"),
    ("prepare_task", "tokenize_sft"),
    ("prepare_task", "tokenize_preferences"),
    ("tokenize_sft", "train_sft"),
    ("tokenize_preferences", "split_preferences"),
    ("split_preferences", "train_rm"),
    ("train_sft", "train_rm"),
    ("train_sft", "rollout"),
    ("train_sft", "evaluate_sft"),
    ("train_rm", "score"),
    ("rollout", "score"),
    ("score", "optimize"),
    ("optimize", "evaluate"),
    ("evaluate_sft", "report"),
    ("evaluate", "report"),
)
PER_ROUND = ("rollout", "score", "optimize", "evaluate")
BOX, ACROSS, DOWN = (132, 26), 158, 62


def parents(rounds: Mapping[str, str]) -> dict[int, int]:
    """The knob `rounds` -> round: the round that it starts from, 0 for models/sft."""
    return {
        int(key): 0 if start == "models/sft" else int(start.rpartition("/")[2])
        for key, start in rounds.items()
    }


def chains(parent: Mapping[int, int]) -> list[list[int]]:
    """Rounds in chains from where they branch off: [[0, 1, 2, 3], [1, 4]] for 4 started from 1."""
    found: list[list[int]] = []
    for number, start in parent.items():
        running = next((chain for chain in found if chain[-1] == start), None)
        if running is None:
            found.append([start, number])
        else:
            running.append(number)
    return found


def pipeline() -> Markup:
    """The stages and what feeds them."""
    drawn = [_arrow(_middle(STAGES[start]), _middle(STAGES[end])) for start, end in ARROWS]
    back, front = _middle(STAGES["optimize"]), _middle(STAGES["rollout"])
    loop = Markup('<path class="edge loop" d="M{} {} V{} H{} V{}"/>')
    drawn.append(loop.format(back[0], back[1] + 13, back[1] + 34, front[0], front[1] + 13))
    label = Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">next round</text>')
    drawn.append(label.format((back[0] + front[0]) / 2, back[1] + 31))
    for name, place in STAGES.items():
        each = name in PER_ROUND
        drawn.append(_box(_middle(place), f"{name}@k" if each else name, "round" if each else ""))
    return _svg("The stages of the pipeline", drawn, 7 * ACROSS, 3 * DOWN)


def tree(parent: Mapping[int, int], notes: Mapping[int, str]) -> Markup:
    """The rounds, each right of the one that it starts from; a branch gets a row of its own."""
    places, row = {0: (0, 0)}, 0
    for lane, chain in enumerate(chains(parent)):
        for number in chain[1:]:
            places[number] = (places[parent[number]][0] + 1, lane)
        row = lane
    drawn = [_arrow(_middle(places[p]), _middle(places[k])) for k, p in parent.items()]
    for number, place in places.items():
        name = f"round {number}" if number else "models/sft"
        drawn.append(_box(_middle(place), f"{name}  {notes[number]}".strip(), "round"))
    columns = 1 + max(column for column, _ in places.values())
    return _svg("The rounds", drawn, columns * ACROSS, (row + 1) * DOWN)


def _middle(place: tuple[int, int]) -> tuple[float, float]:
    return place[0] * ACROSS + ACROSS / 2, place[1] * DOWN + DOWN / 2


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> Markup:
    """From the right side of one box to the left of another, or between those above each other."""
    (x, y), (to, up) = start, end
    if x == to:
        x, y, to, up = x, y - BOX[1] / 2, to, up + BOX[1] / 2 + 5
        return Markup('<path class="edge" d="M{} {} L{} {}"/>').format(x, y, to, up)
    x, to = x + BOX[0] / 2, to - BOX[0] / 2 - 5
    half = (x + to) / 2
    curve = Markup('<path class="edge" d="M{} {} C{} {} {} {} {} {}"/>')
    return curve.format(x, y, half, y, half, up, to, up)


def _box(middle: tuple[float, float], text: str, look: str) -> Markup:
    x, y = middle
    box = '<rect class="box {}" x="{}" y="{}" width="{}" height="{}" rx="5"/>'
    text_ = '<text class="name" x="{}" y="{}" text-anchor="middle">{}</text>'
    corner = (x - BOX[0] / 2, y - BOX[1] / 2)
    return Markup(box).format(look, *corner, *BOX) + Markup(text_).format(x, y + 4, text)


def _svg(label: str, drawn: Sequence[Markup], width: int, height: int) -> Markup:
    head = (
        '<svg class="wide" viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="img"'
        ' aria-label="{2}"><defs><marker id="tip" viewBox="0 0 8 8" refX="3" refY="4"'
        ' markerWidth="6" markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    return Markup(head).format(width, height, label) + Markup("").join(drawn) + Markup("</svg>")
