"""The chain of rounds through files equals one long run in memory, bit for bit."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from ruamel.yaml import YAML
from safetensors.torch import load_file

from stages.base import command, params
from stages.base.chunks import chunks
from stages.base.environment import SAVE_MINUTES
from stages.base.randomness import seed_everything
from stages.base.tables import BUFFERS, ROLLOUTS, read_provenance
from stages.knobs.optimize import Knobs as OptimizeKnobs
from stages.knobs.rollout import Knobs as RolloutKnobs
from stages.models.adapters import adapter_weights, make_trainable
from stages.models.checkpoints import load_policy, load_scorer, new_scorer, save_model
from stages.models.scorers import reference_log_probs, scores_and_values
from stages.models.trainer_state import (
    TrainerState,
    load_optimizer,
    load_trainer,
    save_optimizer,
    save_policy,
)
from stages.optimize import make_settings
from stages.optimize import optimize as optimize_command
from stages.rl.epochs import Learner, Round
from stages.rl.targets import make_targets
from stages.rollout import rollout as rollout_command
from stages.rollouts.engine import Engine
from stages.rollouts.prompts import load_prompts
from stages.rollouts.rewards import Rules
from stages.rollouts.sampling import Sampling
from stages.score import score as score_command
from stages.score import total_reward
from stages.training import saving
from stages.training.steps import adamw
from tests.helpers.cuts import Cut, cutting
from tests.helpers.models import (
    buffer_row,
    byte_tokenizer,
    cpu_accelerator,
    gpt2,
    gpt2_scorer,
    llama,
    llama_scorer,
    random_ids,
    same_weights,
    weights_of,
)
from tests.pipeline.running import content

PARAMS = Path(__file__).resolve().parents[2] / "params.yaml"
CPU = torch.device("cpu")
PAIRS = {"llama": (llama, llama_scorer), "gpt2": (gpt2, gpt2_scorer)}
STOPS = [2, *range(40, 90)]
ROUNDS = (1, 2, 3)
KNOBS = {
    "device": "cpu",
    "threads": 1,
    "prompts_per_step": 4,
    "num_rollouts": 3,
    "temperature": 0.9,
    "top_p": 0.95,
    "max_new_tokens": 6,
    "rollout_batch_size": 6,
    "score_batch_size": 5,
    "verifier": "odd_rule:share",
    "overlong_buffer": 3,
    "rewards": {"correctness": 1.0, "format": None, "length": 0.7, "reward_model": 0.3},
    "ppo_epochs": 2,
    "train_batch_size": 4,
    "batch_acc": 2,
    "lr": 2e-3,
    "lr_critic": 3e-3,
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "beta": 0.05,
}
LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.3, "targets": "all-linear"}
ODD_RULE = "def share(text, answer, entry):\n    return len(set(text)) / 7 % 1\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with params.yaml, prompts, a reward rule, models/sft and models/rm, to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "source")
    monkeypatch.setattr(command, "stop_with_parent", lambda: None)
    threads, imported = torch.get_num_threads(), sys.path.copy()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "odd_rule.py").write_text(ODD_RULE)
    (tmp_path / "task").mkdir()
    words = ["ab", "hello", "x", "some words", "é", "longer still", "zz"]
    lines = [
        json.dumps({"prompt": [{"role": "user", "content": word}], "answer": word[::-1]})
        for word in words
    ]
    (tmp_path / "task" / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    yield tmp_path
    torch.set_num_threads(threads)
    sys.path[:] = imported
    sys.modules.pop("odd_rule", None)


def prepare(folder: Path, kind: str, **knobs) -> None:
    make, make_scorer = PAIRS[kind]
    tokenizer = byte_tokenizer()
    values = YAML(typ="safe").load(PARAMS) | KNOBS | knobs
    with (folder / "params.yaml").open("w") as file:
        YAML().dump(values, file)
    policy = make(vocabulary=len(tokenizer), dropout=0.1)
    policy.generation_config.eos_token_id = STOPS
    scorer = make_scorer(vocabulary=len(tokenizer), dropout=0.1, seed=5)
    for name, model in {"sft": policy, "rm": scorer}.items():
        (folder / "models" / name).mkdir(parents=True)
        save_model(folder / "models" / name, model, tokenizer)


def call(stage, **options) -> None:
    words = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    result = CliRunner().invoke(stage, [word.replace("_", "-", 1) for word in words])
    assert result.exit_code == 0, result.output


def through_files() -> dict[str, bytes]:
    """Three rounds by the stages' commands; the buffers as they were before `optimize` ran."""
    start, buffers = "models/sft", {}
    for k in ROUNDS:
        call(
            rollout_command,
            round=k,
            policy=start,
            task="task/prompts.jsonl",
            source="source",
            out=f"rollouts/{k}.parquet",
            figures=f"figures/rollout-{k}.json",
        )
        call(
            score_command,
            rollouts=f"rollouts/{k}.parquet",
            policy=start,
            reward_model="models/rm",
            reference="models/sft",
            out=f"buffers/{k}.parquet",
            figures=f"figures/score-{k}.json",
        )
        buffers[f"buffers/{k}.parquet"] = Path(f"buffers/{k}.parquet").read_bytes()
        call(
            optimize_command,
            round=k,
            buffer=f"buffers/{k}.parquet",
            policy=start,
            reward_model="models/rm",
            out=f"models/policy/{k}",
            updates=f"updates/{k}.parquet",
            curve=f"curves/{k}.csv",
            figures=f"figures/optimize-{k}.json",
        )
        start = f"models/policy/{k}"
    return buffers


@dataclass
class Memory:
    """What one long run holds."""

    policy: torch.nn.Module
    critic: torch.nn.Module | None
    optimizers: dict
    buffers: list
    records: list
    cursor: int = 0


def in_memory(tokenizer) -> Memory:
    """The same three rounds as one loop over the core functions; no file between them."""
    from odd_rule import share

    knobs, learning = params.load(RolloutKnobs), params.load(OptimizeKnobs)
    chosen, accelerator = make_settings(learning, 1), cpu_accelerator()
    policy, reference = (load_policy(Path("models/sft"), "sdpa", CPU) for _ in range(2))
    reward_model = load_scorer(Path("models/rm"), "sdpa", CPU)
    if learning.critic == "policy":
        critic = new_scorer(Path("models/sft"), "sdpa", CPU, zero_head=True)
    else:
        critic = load_scorer(Path("models/rm"), "sdpa", CPU)
    seed_everything(learning.seed, "optimize", "adapters", "policy")
    make_trainable(policy, Path("models/sft"), learning.lora, "lora")
    seed_everything(learning.seed, "optimize", "adapters", "critic")
    make_trainable(critic, Path("models/sft"), learning.lora, "lora")
    models = {"policy": policy} | ({"critic": critic} if chosen.objective.critic else {})
    optimizers = {name: adamw(m, 1.0, learning.weight_decay) for name, m in models.items()}
    memory = Memory(policy, models.get("critic"), optimizers, [], [])
    prompts, _ = load_prompts(knobs.prompts, Path("task/prompts.jsonl"), tokenizer, 256, knobs.seed)
    rules = Rules(share, None, knobs.max_new_tokens, knobs.overlong_buffer)
    engine = Engine(
        policy,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        Sampling(0.9, 0.95, 0, 0.0, 6, tuple(STOPS)),
        knobs.num_rollouts,
        knobs.rollout_batch_size,
        lambda prompt, text, ids: rules.components(text, len(ids), prompt.answer, prompt.entry),
        knobs.seed,
    )
    for k in ROUNDS:
        rows = list(engine.rows(prompts, k, memory.cursor, knobs.prompts_per_step, 0))
        memory.cursor = engine.counts.cursor
        for part in chunks(rows, KNOBS["score_batch_size"]):
            scores, _ = scores_and_values(reward_model, part)
            _, values = scores_and_values(critic, part)
            refs = reference_log_probs(reference, part, knobs.temperature)
            for row, score, value, ref in zip(part, scores, values, refs, strict=True):
                row |= {"reward_model": score, "values_old": value, "log_probs_ref": ref}
                row["reward"] = total_reward(row, KNOBS["rewards"])
        round_settings = replace(chosen, round_number=k)
        targets = make_targets(rows, round_settings)
        learner = Learner(policy, memory.critic, optimizers)
        learning = Round(accelerator, learner, rows, targets, round_settings)
        memory.records += learning.steps(len(memory.records))
        memory.buffers.append(rows)
    return memory


def curve_of(k: int) -> list[dict]:
    lines = [line.split(",") for line in Path(f"curves/{k}.csv").read_text().splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


@pytest.mark.parametrize(
    "loss, critic, kind, lora",
    [
        ("grpo", "policy", "llama", None),
        ("grpo", "reward_model", "gpt2", None),
        ("ppo", "policy", "llama", None),
        ("ppo", "reward_model", "llama", None),
        ("ppo", "reward_model", "gpt2", None),
        ("grpo", "policy", "gpt2", LORA),
        ("ppo", "policy", "llama", LORA),
        ("ppo", "reward_model", "llama", LORA),
    ],
)
def test_three_rounds_through_the_stages_are_one_long_run_bit_for_bit(
    loss, critic, kind, lora, project
):
    prepare(project, kind, loss=loss, critic=critic, lora=lora)
    before_optimize = through_files()
    memory = in_memory(byte_tokenizer())

    found = load_policy(Path("models/policy/3"), "sdpa", CPU)
    assert same_weights(weights_of(found), weights_of(memory.policy))
    start = weights_of(load_policy(Path("models/sft"), "sdpa", CPU))
    if lora is None:
        weights = weights_of(found).items()
        assert not any(torch.equal(weight, start[name]) for name, weight in weights)
    else:
        assert all(weight.any() for weight in adapter_weights(found).values())
        assert not Path("models/policy/3/model.safetensors").exists()

    trainer = load_trainer(Path("models/policy/3"))
    assert (trainer.step, trainer.rounds) == (12, [1, 2, 3])
    assert trainer.prompt_cursor == memory.cursor == 12
    assert (trainer.critic is not None) == (loss == "ppo")
    models = {"policy": memory.policy, "critic": memory.critic}
    for name, optimizer in memory.optimizers.items():
        save_optimizer(Path("wanted.safetensors"), optimizer, models[name])
        left, right = load_file(trainer.optimizers[name]), load_file("wanted.safetensors")
        assert same_weights(left, right)
    if loss == "ppo":
        critic = load_scorer(trainer.critic, "sdpa", CPU)
        assert same_weights(weights_of(critic), weights_of(memory.critic))

    for k, rows in zip(ROUNDS, memory.buffers, strict=True):
        compare_buffers(Path(f"buffers/{k}.parquet"), rows, loss)
        assert read_provenance(Path(f"buffers/{k}.parquet"))["prompt_cursor"] == 4 * k
        assert Path(f"buffers/{k}.parquet").read_bytes() == before_optimize[f"buffers/{k}.parquet"]
    curve = [row for k in ROUNDS for row in curve_of(k)]
    assert [float(row["lr"]) for row in curve] == [record.lr for record in memory.records]
    assert [float(row["lr"]) for row in curve] == [1e-3] + [2e-3] * 11
    assert [float(row["loss"]) for row in curve] == [r.policy.loss for r in memory.records]
    assert [int(row["step"]) for row in curve] == list(range(1, 13))
    for k in ROUNDS:
        assert float(curve_of(k)[0]["kl"]) == pytest.approx(0.0, abs=1e-8)
        assert float(curve_of(k)[2]["kl"]) > 0


def compare_buffers(path: Path, rows: list[dict], loss: str) -> None:
    """The buffer's columns are the loop's, to the last bit of a float32."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    assert len({len(ids) for ids in table["completion_ids"].to_pylist()}) > 2
    for name in [*ROLLOUTS.names, "reward_model", "reward", "log_probs_ref"]:
        wanted = pa.array([row[name] for row in rows], BUFFERS.field(name).type)
        assert table[name].combine_chunks() == wanted, name
    if loss == "ppo":  # GRPO's run never trains the critic that the score stage starts from
        wanted = pa.array([row["values_old"] for row in rows], BUFFERS.field("values_old").type)
        assert table["values_old"].combine_chunks() == wanted


@pytest.mark.parametrize("loss", ["grpo", "ppo"])
@pytest.mark.parametrize("kind", PAIRS)
def test_six_steps_in_one_go_are_two_and_two_and_two_through_saved_state(loss, kind, tmp_path):
    """One group is one step, so that six epochs are six steps over the same rows in one order."""
    make, make_scorer = PAIRS[kind]
    options = {"dropout": 0.1, "vocabulary": len(byte_tokenizer())}
    sft = make(**options)
    values = YAML(typ="safe").load(PARAMS) | KNOBS | {"loss": loss, "num_rollouts": 5}
    knobs = {key: value for key, value in values.items() if key in OptimizeKnobs.model_fields}
    knobs["model"] = {"trust_remote_code": False}
    chosen = make_settings(OptimizeKnobs(**knobs), 1)
    chosen = replace(chosen, train_batch_size=2, batch_acc=3)
    rows = []
    for i, answer in enumerate(random_ids(3, 2, 5, 1, 6, 3)):
        row = buffer_row(sft, [3, 9, 27], answer, sample=i, reward=i % 3 / 2, temperature=0.9)
        row["log_probs_ref"] = [x - 0.1 for x in row["log_probs_old"]]
        row["values_old"] = [0.1 * i] * len(answer)
        rows.append(row)

    def train(models, optimizers, epochs: int, step: int) -> list:
        settings = replace(chosen, ppo_epochs=epochs)
        learner = Learner(models["policy"], models.get("critic"), optimizers)
        targets = make_targets(rows, settings)
        return list(Round(cpu_accelerator(), learner, rows, targets, settings).steps(step))

    def fresh() -> dict:
        made = {"policy": make(**options)}
        return made | ({"critic": make_scorer(**options, seed=5)} if loss == "ppo" else {})

    whole = fresh()
    optimizers = {name: adamw(model, 1.0, 0.01) for name, model in whole.items()}
    wanted = train(whole, optimizers, 6, 0)
    assert len(wanted) == 6 and wanted[0].lr < wanted[1].lr

    models, got = fresh(), []
    optimizers = {name: adamw(model, 1.0, 0.01) for name, model in models.items()}
    for part in range(3):
        got += train(models, optimizers, 2, len(got))
        folder = tmp_path / str(part)
        pairs = {name: (optimizers[name], model) for name, model in models.items()}
        state = TrainerState(step=len(got))
        save_policy(folder, models["policy"], byte_tokenizer(), state, pairs, models.get("critic"))
        trainer = load_trainer(folder)
        models = {"policy": load_policy(folder, "sdpa", CPU)}
        if loss == "ppo":
            models["critic"] = load_scorer(trainer.critic, "sdpa", CPU)
        optimizers = {name: adamw(model, 1.0, 0.01) for name, model in models.items()}
        for name, optimizer in optimizers.items():
            load_optimizer(trainer.optimizers[name], optimizer, models[name])
        assert trainer.step == len(got)

    for name, model in whole.items():
        assert same_weights(weights_of(models[name]), weights_of(model))
    assert [(r.lr, r.policy, r.critic, r.kl) for r in got] == [
        (r.lr, r.policy, r.critic, r.kl) for r in wanted
    ]


def optimize_words(out: str) -> list[str]:
    words = "--round 2 --buffer buffers/2.parquet --policy models/policy/1 --reward-model models/rm"
    words += f" --out {out}/model --updates {out}/updates.parquet --curve {out}/curve.csv"
    return [*words.split(), "--figures", f"{out}/figures.json"]


@pytest.mark.parametrize(
    "changes",
    [{"loss": "ppo"}, {"loss": "grpo", "target_kl": 1e-9}, {"loss": "ppo", "lora": LORA}],
)
def test_a_round_that_is_cut_off_goes_on_and_ends_at_the_same_bytes(project, monkeypatch, changes):
    """With PPO's critic, or where the KL stops the epochs: the check is made where it was due."""
    prepare(project, "llama", **changes)
    monkeypatch.setenv(SAVE_MINUTES, "0.0000001")
    through_files()
    whole = CliRunner().invoke(optimize_command, optimize_words("whole"))
    assert whole.exit_code == 0, whole.output
    steps = len(Path("whole/curve.csv").read_text().splitlines()) - 1
    assert steps == (2 if "target_kl" in changes else 4)
    for step in range(1, steps + 1):
        with monkeypatch.context() as patch:
            patch.setattr(saving, "save_state", cutting(step))
            cut = CliRunner().invoke(optimize_command, optimize_words(f"cut{step}"))
        assert isinstance(cut.exception, Cut) and not Path(f"cut{step}/model").exists()
        result = CliRunner().invoke(optimize_command, optimize_words(f"cut{step}"))
        assert f"optimize-2: goes on after step {step} (" in result.output, result.output
        assert content(Path(f"cut{step}")) == content(Path("whole"))
    assert not list(Path(".scratch").glob("*"))
