"""`python -m stages.show`: what a person sees of each artifact."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from stages.base.tables import SCORED_PAIRS, SFT, write_table
from stages.models.checkpoints import save_model
from stages.show import show
from stages.sources.tiny import byte_tokenizer, random_llama
from tests.helpers.handmade import write_run
from tests.helpers.tiny import ROOT


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A tiny run's folder; tests only read it."""
    return write_run(tmp_path_factory.mktemp("run"))


def seen(*words, columns=120) -> list[str]:
    """Lines that the command prints into a pipe, without the spaces at their ends."""
    result = CliRunner().invoke(show, list(map(str, words)), env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.output.splitlines()]


def refused(*words) -> str:
    result = CliRunner().invoke(show, list(map(str, words)))
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    return result.output.removeprefix("Error: ").strip()


def test_a_table_shows_size_provenance_columns_and_first_rows(root):
    path = root / "data/buffers/round-1.parquet"
    lines = seen(path, "--rows", 1)
    assert lines[0] == f"{path}: 4 rows"
    assert lines[1] == "round-1.parquet: rows 4  policy models/sft  round 1  stage buffers"
    table = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert table["column"] == ["type", "nulls", "mean", "lowest", "highest", "items"]
    assert table["reward"] == ["FLOAT", "0", "-0.2188", "-0.875", "0.625"]
    assert table["completion_ids"][:2] == ["INTEGER[]", "0"]
    assert lines.count("  prompt  <|im_start|>user\\nab<|im_end|>") == 1


def test_chosen_rows_come_without_the_summary_unless_it_is_asked_for(root):
    words = (root / "data/buffers", "--where", "reward_correctness == 0", "--round", 1)
    words += ("--columns", "file,completion,reward", "--worst", "--rows", 2)
    lines = seen(*words)
    assert lines == [
        f"{root}/data/buffers: 3 rows that fit",
        "file     completion  reward",
        "round-1  zy\\x1b[2J   -0.875",
        "round-1  zy          -0.375",
    ]
    assert seen(*words, "--summary")[-3:] == lines[-3:]
    assert any(
        line.startswith("advantage") or "lowest" in line for line in seen(*words, "--summary")
    )


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--group", 1, "--round", 1], ["zy\\x1b[2J", "zy"]),
        (["--sort", "reward", "--rows", 2], ["zy\\x1b[2J", "zy"]),
        (["--sort", "-reward", "--rows", 1], ["ba"]),
        (["--sample", 0, "--sort", "completion"], ["ba", "yz", "zy\\x1b[2J"]),
        (["--where", "completion == 'y' and round > 1"], ["y"]),
        (["--group", 77], []),
    ],
)
def test_rows_are_chosen_by_number_condition_and_order(root, options, wanted):
    lines = seen(root / "data/buffers", *options, "--columns", "completion")
    assert [line.split()[1] for line in lines[2:]] == wanted


def test_ids_are_shown_where_a_table_has_no_text(tmp_path):
    rows = [{"input_ids": [4, 5], "labels": [-100, 5]}]
    write_table(tmp_path / "sft.parquet", SFT, rows, {})
    assert seen(tmp_path / "sft.parquet")[-1] == "2 ids      2 ids"


def test_a_value_that_no_row_has_is_left_out_unless_its_column_is_named(root):
    path = root / "data/buffers/round-1.parquet"
    lines = seen(path, "--group", 0)
    assert not any(name in line for name in ("reward_format", "_ids") for line in lines)
    assert seen(path, "--group", 0, "--columns", "reward_format")[1:] == ["reward_format"] + 2 * [
        "         null"
    ]


def test_tokens_of_one_row_are_told_apart_and_explained(root):
    path = root / "data/rollouts/round-1.parquet"
    lines = seen(path, "--tokens", "--group", 0, "--sample", 1, "--colour", "advantage")
    assert "prompt     <|im_start|>user\\nab<|im_end|>" in lines
    assert "completion b<|im_end|>" in lines
    start = next(i for i, line in enumerate(lines) if line.startswith("#"))
    assert [line.split() for line in lines[start:]] == [
        ["#", "id", "token", "log-prob", "reference", "advantage", "ratio"],
        ["0", "71", "b", "-0.25", "0.5", "-0.5", "1.25"],
        ["1", "2", "<|im_end|>", "-0.5", "0.5", "-0.5", "1.25"],
    ]


@pytest.mark.parametrize("folder", ["buffers", "updates", "rollouts"])
def test_every_table_of_a_round_knows_its_tokens(root, folder):
    lines = seen(root / "data" / folder, "--round", 2, "--tokens", "--where", "group == 0")
    assert lines[0].startswith("first of 2 rows   file round-2")
    assert "completion yz<|im_end|>" in lines


def test_a_round_of_rows_that_do_not_name_it_is_that_of_their_file(root):
    lines = seen(root / "data/evaluations", "--round", 2, "--columns", "completion,greedy")
    assert lines == [
        f"{root}/data/evaluations/round-2.parquet: 3 rows",
        "completion  greedy",
        *["bz            true", "bb           false", "ba            true"],
    ]
    assert "no column 'round'" in refused(root / "data/evaluations", "--round", 9)


def test_on_a_terminal_each_token_has_its_colour(root):
    words = [str(root / "data/rollouts"), *"--tokens --group 1 --round 1 --colour".split()]
    terminal = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm", "NO_COLOR": None}
    certain, unlikely = (
        CliRunner().invoke(show, [*words, colour], color=True, env=terminal).output
        for colour in ("reference", "advantage")
    )
    assert "\x1b[30;48;2;174;220;182m" in certain  # half a nat above the reference: half green
    assert "\x1b[30;48;2;244;109;92m" in unlikely  # the largest advantage below 0: full red
    assert "\x1b[2mx" in certain  # the prompt is dim
    assert "\x1b[2J" not in certain and "\\x1b" in certain


def test_nothing_wraps_wider_than_a_narrow_terminal(root):
    for options in (["--no-summary"], ["--tokens", "--group", 1], ["--worst", "--rows", 3]):
        lines = seen(root / "data/buffers/round-1.parquet", *options, columns=40)
        figures = [
            line for line in lines if not line.lstrip().startswith(("prompt ", "completion "))
        ]
        assert max(map(len, figures[1:])) <= 40


def test_a_model_folder_tells_its_size_and_history(tmp_path):
    tokenizer = byte_tokenizer(64)
    model = random_llama(tokenizer, 16, 32, 1, 2, 64, 0.1, 0.0)
    save_model(tmp_path, model, tokenizer)
    table = dict(line.split(maxsplit=1) for line in seen(tmp_path))
    assert table["parameters"] == f"{sum(p.numel() for p in model.parameters()):,} F32"
    assert table["architecture"] == "LlamaForCausalLM"


def test_a_scored_pair_shows_the_log_probs_of_the_reference_token_by_token(root, tmp_path):
    path = tmp_path / "train.parquet"
    row = {"prompt_ids": [4], "chosen_ids": [71, 2], "rejected_ids": [70], "margin": 0.0}
    row |= {"log_probs_ref_chosen": [-0.5, -0.25], "log_probs_ref_rejected": [-2.0]}
    write_table(path, SCORED_PAIRS, [row], {"reference": f"{root}/models/sft"})
    words = [line.split() for line in seen(path, "--tokens")]
    assert ["0", "71", "b", "-0.5"] in words and ["0", "70", "a", "-2"] in words


def test_figures_and_curves_are_shown_too(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps({"loss": 0.5, "note\x1b": "é"}))
    assert seen(tmp_path / "f.json") == ["{", '  "loss": 0.5,', '  "note\\u001b": "é"', "}"]
    (tmp_path / "r.json").write_text('[{"round": 0, "kl": null}, {"round": 1, "kl": 0.5}]')
    table = ["round    kl", "    0  null", "    1   0.5"]
    assert seen(tmp_path / "r.json") == [f"{tmp_path}/r.json: 2 rows", *table]
    (tmp_path / "c.csv").write_text("step,loss\n1,0.5\n2,0.25\n")
    assert seen(tmp_path / "c.csv", "--sort", "loss", "--rows", 1)[1:] == [
        "step  loss",
        "   2  0.25",
    ]


def test_rows_that_are_no_table_are_counted_no_further_than_shown(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"content": "a"}\n{"content": [{"type": "text", "text": "b"}]}\n{}\n')
    lines = seen(path, "--rows", 2)
    assert lines[0] == f"{path}: first 2 rows"
    assert lines[-2:] == ["a", '[{"type": "text", "text": "b"}]']


def test_figures_of_a_folder_are_a_table_with_a_row_a_file(tmp_path):
    for name, figures in (("round-2", {"kl": 0.5}), ("round-10", {"kl": 2.0}), ("rm", {"loss": 1})):
        (tmp_path / f"{name}.json").write_text(json.dumps(figures))
    head, *table = seen(tmp_path)
    assert head == f"{tmp_path}: 3 rows"
    assert [line.split() for line in table] == [
        ["file", "loss", "kl"],
        ["rm", "1", "null"],
        ["round-2", "null", "0.5"],
        ["round-10", "null", "2"],
    ]
    words = ("--columns", "kl", "--sort", "-kl", "--rows", 1)
    assert seen(tmp_path, *words)[1:] == ["file      kl", "round-10   2"]


def test_a_folder_of_different_things_is_listed(root, tmp_path):
    assert seen(root / "data") == [
        "name          kind   holds",
        "buffers/      table  6 rows",
        "evaluations/  table  6 rows",
        "rollouts/     table  6 rows",
        "updates/      table  6 rows",
    ]
    for name in ("train", "validation"):
        write_table(tmp_path / f"{name}.parquet", SFT, [{"input_ids": [4], "labels": [5]}], {})
    (tmp_path / "curve.csv").write_text("step,loss\n1,0.5\n")
    (tmp_path / "figures.json").write_text("{}")
    (tmp_path / "index.html").write_text("<p>")
    (tmp_path / "round-1.parquet").write_text("half")
    (tmp_path / "lost").symlink_to("cache/none")
    assert [line.split(maxsplit=2) for line in seen(tmp_path)[1:]] == [
        ["curve.csv", "rows", "16 bytes"],
        ["figures.json", "figures", "2 bytes"],
        ["index.html", "page", "3 bytes"],
        ["lost", "unreadable"],
        ["round-1.parquet", "unreadable"],
        ["train.parquet", "table", "1 rows"],
        ["validation.parquet", "table", "1 rows"],
    ]


def test_files_of_rounds_are_one_table_by_the_names_of_their_columns(tmp_path):
    write_table(tmp_path / "round-1.parquet", SFT, [{"input_ids": [4], "labels": [5]}], {})
    write_table(tmp_path / "round-2.parquet", SFT, [{"input_ids": [4], "labels": [5]}], {"x": 1})
    assert seen(tmp_path)[0] == f"{tmp_path}: 2 rows"
    (tmp_path / "round-1.parquet").rename(tmp_path / "sft.parquet")  # as the start's evaluation
    assert seen(tmp_path)[0] == f"{tmp_path}: 2 rows"
    (tmp_path / "round-2.parquet").rename(tmp_path / "direct-dpo.parquet")  # a branch's
    assert seen(tmp_path)[0] == f"{tmp_path}: 2 rows"
    (tmp_path / "direct-dpo.parquet").unlink()
    write_table(tmp_path / "round-2.parquet", SFT.remove(1), [{"input_ids": [4]}], {})
    assert [line.split()[0] for line in seen(tmp_path)[-2:]] == ["round-2", "sft"]
    (tmp_path / "round-2.parquet").unlink()
    assert seen(tmp_path)[1:] == ["sft.parquet  table  1 rows"]


def test_a_page_is_left_to_a_browser(tmp_path):
    (tmp_path / "index.html").write_text("<p>")
    assert seen(tmp_path / "index.html") == [f"{tmp_path}/index.html: a page; open it in a browser"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data/none.parquet"], "data/none.parquet: missing; `dvc repro` makes it"),
        (["models/sft/chat_template.jinja"], "expected a folder or a file of rows (.parquet"),
        (
            ["data/buffers", "--where", "rewards < 1"],
            "no column 'rewards'; there are file, round, group",
        ),
        (["data/buffers", "--columns", "a,b"], "no column 'a'; there are file, round"),
        (["data/buffers", "--where", "exec('1')"], "Scalar Function with name exec does not exist"),
        (["data/buffers", "--worst", "--sort", "kl"], "leave out --sort"),
        (["data/buffers", "--tokens", "--group", "9"], "no row fits"),
        (
            ["data/updates", "--round", "2", "--sample", "1", "--tokens", "--colour", "ratio"],
            "no ratio of the tokens; there are log-prob, reference, advantage",
        ),
        (["data/buffers", "--tokens", "--tokenizer", "models"], "tokenizer.json: missing"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(root, monkeypatch, words, said):
    monkeypatch.chdir(root)
    message = refused(*words)
    assert said in message and "\n" not in message


def test_it_starts_without_torch_and_transformers(root):
    code = "import sys, stages.show; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.strip() == b"[]", done.stderr
