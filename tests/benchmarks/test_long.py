"""The regime of real length: its rows, and its part of the page."""

import json
from statistics import mean

from tests.benchmarks import page
from tests.benchmarks.workplace import write_long_rows


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_long_rows_are_problems_with_solutions_and_the_wrong_one_ends_in_another_number(tmp_path):
    write_long_rows(tmp_path, 40)
    names = ("sft", "preferences", "prompts")
    sft, pairs, prompts = (read(tmp_path / f"{name}.jsonl") for name in names)
    assert len(sft) == len(pairs) == len(prompts) == 40
    for row, pair, prompt in zip(sft, pairs, prompts, strict=True):
        assert row["messages"] == pair["chosen"] != pair["rejected"]
        assert [row["messages"][0]] == prompt["prompt"]
        right, wrong = (pair[side][-1]["content"] for side in ("chosen", "rejected"))
        assert right.endswith(f"#### {prompt['answer']}") and len(wrong) == len(right)
        assert not wrong.endswith(f"#### {prompt['answer']}")
    words = [len(m["content"].split()) for row in sft for m in row["messages"]]
    assert mean(words) > 30  # of question and solution; an answer of the short regime is one word


def test_figures_of_both_regimes_stand_side_by_side_with_their_aims():
    row = {
        "work": "SFT",
        "model": "smollm2",
        "unit": "tokens/s",
        "ours": 300.0,
        "peer": 100.0,
        "peer_name": "TRL",
        "ratio": 3.0,
        "ours_mb": 4000,
        "peer_mb": 16000,
        "precision": "float32",
    }
    rows = page.merged([row], [row | {"ours": 200.0, "ratio": 2.0, "long": True}])
    assert len(rows) == 2 and len(page.merged(rows, [row | {"long": False}])) == 2
    text = page.markdown(page.EMPTY | {"rows": rows})
    short, long = text.split("## float32, answers of real length")
    assert "| SFT | smollm2 | tokens/s | 300 | 100 | TRL | 3.00 | 2.5 / 4 | 4,000 |" in short
    assert "| SFT | tokens/s | 200 | 100 | 2.00 | 3 | 4,000 | 16,000 | 0.25 | 0.5 |" in long
