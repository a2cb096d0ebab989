"""params.yaml: what a person can get wrong in it, and what they are told."""

import difflib

import pydantic
import pytest
from dvc.utils.hydra import apply_overrides
from ruamel.yaml import YAML

from stages.base import params
from stages.base.errors import InputError
from stages.base.knobs import Section
from stages.rows.layouts import FORMATS
from tests.helpers.tiny import ROOT, change, plain, small_params, write

KNOBS = params.all_knobs()
VIEWER = "show"  # no stage: it reads no knobs
SCRIPTS = {path.stem for path in (ROOT / "stages").glob("[a-z]*.py")} - {VIEWER}


@pytest.fixture
def complaint(tmp_path, monkeypatch):
    """Knob changes -> the whole message with which a stage (any, by default rollout) refuses."""
    monkeypatch.chdir(tmp_path)

    def refuse(stage="rollout", **changes):
        write(tmp_path / "params.yaml", change(small_params(), **changes))
        with pytest.raises(InputError) as caught:
            params.load(KNOBS[stage])
        return str(caught.value)

    return refuse


@pytest.fixture
def accepted(tmp_path, monkeypatch):
    """Knob changes -> the knobs of a stage."""
    monkeypatch.chdir(tmp_path)

    def load(stage="rollout", **changes):
        write(tmp_path / "params.yaml", change(small_params(), **changes))
        return params.load(KNOBS[stage])

    return load


def fields(section=None, prefix=""):
    """(stage, dotted key, field) of every knob, or of those below one class."""
    if section is None:
        return [
            (stage, *found) for stage, knobs in KNOBS.items() for found in fields(knobs, prefix)
        ]
    found = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found += fields(kind, f"{prefix}{name}.")
        else:
            found.append((prefix + name, field))
    return found


def test_the_committed_defaults_are_valid_for_every_stage(monkeypatch):
    monkeypatch.chdir(ROOT)
    for knobs in KNOBS.values():
        params.load(knobs)


@pytest.mark.parametrize(
    "knob, value, whole", [("top_p", 0.9, 1.0), ("top_k", 5, 0), ("min_p", 0.1, 0.0)]
)
def test_vllm_samples_from_the_whole_vocabulary(complaint, accepted, knob, value, whole):
    assert getattr(accepted(sampler="own", **{knob: value}), knob) == value
    message = complaint(sampler="vllm", **{knob: value})
    assert f"{knob}: found {value}, expected {whole} with sampler vllm" in message


def test_a_single_process_has_nothing_to_share_a_model_with(complaint, accepted):
    assert accepted("optimize", processes=2, shard=True).shard
    message = complaint(processes=1, shard=True)
    assert message.count("shard: found true, but processes is 1; expected several processes") == 1


def test_every_script_has_knobs_and_every_knobs_module_has_a_script():
    beside = {"show", "merge", "clear_scratch", "disk", "drop_moments"}  # commands, no stages
    assert set(KNOBS) == SCRIPTS - beside


def test_a_missing_knob_is_named_with_what_it_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = small_params()
    del values["temperature"], values["sft"]["lr"], values["rm"]
    write(tmp_path / "params.yaml", values)
    with pytest.raises(InputError) as caught:
        params.load(KNOBS["prepare_task"])
    message = str(caught.value)
    assert "params.yaml: temperature: missing. Divides the logits" in message
    assert "params.yaml: sft.lr: missing. Peak learning rate" in message
    assert "params.yaml: rm: missing" in message


def test_every_knob_that_is_missing_is_named(monkeypatch):
    unnamed = []
    for key, field in {key: field for _, key, field in fields()}.items():
        values = small_params()
        *sections, name = key.split(".")
        target = values
        for section in sections:
            target = target[section]
        del target[name]
        monkeypatch.setattr(params, "read", lambda path, values=values: values)
        with pytest.raises(InputError) as caught:
            params.load(KNOBS["report"])
        if f"params.yaml: {key}: missing. {field.description}" not in str(caught.value):
            unnamed.append(key)
    assert not unnamed


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("temprature", "temperature"),
        ("ppo_epoch", "ppo_epochs"),
        ("sft__learning", None),
        ("sft__epoch", "sft.epochs"),
        ("rewards__corectness", "rewards.correctness"),
        ("quite_something_else", None),
    ],
)
def test_a_misspelt_knob_is_named_with_the_one_that_was_meant(complaint, key, meant):
    message = complaint(**{key: 1})
    line = f"params.yaml: {key.replace('__', '.')}: no stage knows this key"
    assert line in message
    if meant:
        assert f"did you mean {meant}?" in message


def test_a_misspelt_section_is_named(complaint):
    message = complaint(sfft={"lr": 1.0})
    assert "params.yaml: sfft: no stage knows this key; did you mean sft" in message


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("temperature", "hot", "found 'hot'; Input should be a valid number"),
        ("temperature", True, "found True; Input should be a valid number"),
        ("temperature", None, "found None; Input should be a valid number"),
        ("temperature", [1.0], "found [1.0]; Input should be a valid number"),
        ("num_rollouts", 2.5, "found 2.5; Input should be a valid integer"),
        ("num_rollouts", 2.0, "found 2.0; Input should be a valid integer"),
        ("num_rollouts", "2", "found '2'; Input should be a valid integer"),
        ("num_rollouts", True, "found True; Input should be a valid integer"),
        ("sft__drop_last", "no", "found 'no'; Input should be a valid boolean"),
        ("sft__drop_last", 0, "found 0; Input should be a valid boolean"),
        ("precision", "fp16", "found 'fp16'; Input should be 'float32' or 'bf16'"),
        ("device", "gpu", "found 'gpu'; String should match pattern"),
        ("sft__max_samples", 1.5, "found 1.5; Input should be a valid integer"),
        ("rewards__reward_model", "much", "found 'much'; Input should be a valid number"),
        ("critic", "value", "found 'value'; Input should be 'reward_model' or 'policy'"),
        ("task__config", 3, "found 3; Input should be a valid dictionary"),
        ("model__source", "", "found ''; String should have at least 1 character"),
        ("sft", 3, "found 3; Input should be a valid dictionary"),
        ("sft", None, "found None; Input should be a valid dictionary"),
    ],
)
def test_a_mistyped_knob_is_named_with_what_was_found(complaint, key, value, expected):
    assert f"params.yaml: {key.replace('__', '.')}: {expected}" in complaint(**{key: value})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("temperature", 0.0, "greater than 0"),
        ("temperature", -1, "greater than 0"),
        ("top_p", 0.0, "greater than 0"),
        ("top_p", 1.01, "less than or equal to 1"),
        ("top_k", -1, "greater than or equal to 0"),
        ("min_p", 1.5, "less than or equal to 1"),
        ("seed", -1, "greater than or equal to 0"),
        ("threads", 0, "greater than or equal to 1"),
        ("sft__epochs", 0, "greater than or equal to 1"),
        ("sft__lr", 0.0, "greater than 0"),
        ("preferences__validation_share", 1.0, "less than 1"),
        ("preferences__validation_share", 0.0, "greater than 0"),
        ("gamma", 1.1, "less than or equal to 1"),
        ("clip_eps_lo", -0.1, "greater than or equal to 0"),
        ("target_kl", 0.0, "greater than 0"),
        ("evaluate__max_samples", 0, "greater than or equal to 1"),
        ("model__dropout", 1.0, "less than 1"),
    ],
)
def test_a_knob_out_of_range_is_named_with_its_range(complaint, key, value, expected):
    message = complaint(**{key: value})
    name = key.replace("__", ".")
    assert f"params.yaml: {name}: found {value!r}; Input should be {expected}" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("key", ["temperature", "lr", "sft.lr", "beta", "rewards.correctness"])
def test_nan_and_infinity_are_refused(tmp_path, monkeypatch, key, value):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "params.yaml", change(small_params(), **{key.replace(".", "__"): value}))
    with pytest.raises(InputError, match=f"params.yaml: {key}: found .*finite number"):
        params.load(KNOBS["score"])


def test_several_problems_are_told_at_once_and_each_once(complaint):
    message = complaint(temperature=-1, seed="x", sft__lr="fast", tempo=3)
    lines = message.splitlines()
    assert lines[0] == "bad parameters"
    keys = [line.split(": ")[1] for line in lines[1:]]
    assert sorted(keys) == ["seed", "sft.lr", "temperature", "tempo"]


def test_a_stage_is_stopped_by_the_knobs_of_a_later_stage(complaint):
    assert "params.yaml: clip_eps_lo: found 7" in complaint("prepare_task", clip_eps_lo=7)


def test_numbers_and_words_are_read_as_dvc_reads_them(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("a: 1e-5\nb: no\nc: 1.0E-3\nd: yes\ne: on\nf: 0o17\ng: 017\nh: ~\ni: 1_000\n")
    values = params.read(path)
    from dvc.utils.serialize import load_yaml

    assert values == load_yaml(str(path))
    assert values["a"] == 1e-5 and isinstance(values["a"], float)
    assert values["b"] == "no" and values["d"] == "yes" and values["e"] == "on"
    assert values["h"] is None


def test_a_small_learning_rate_in_dvcs_own_spelling_is_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(text.replace("  lr: ", "  lr: 1e-05 # "))
    assert params.load(KNOBS["train_sft"]).sft.lr == 1e-5


def test_a_whole_number_is_a_number_too(accepted):
    assert accepted(temperature=1).temperature == 1.0


def test_knobs_that_may_be_null_take_null(accepted):
    assert accepted("optimize", target_kl=None, critic=None).target_kl is None
    assert accepted("score", rewards__reward_model=None).rewards.reward_model is None


def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("seed: 1\nlr: 0.1\nseed: 2\n")
    with pytest.raises(InputError, match=r'(?s)params.yaml: not valid YAML.*duplicate key "seed"'):
        params.read(path)


@pytest.mark.parametrize("text", ["seed: [1\n", "seed: 1\n  lr: 2\n", "a: b: c\n", "\tseed: 1\n"])
def test_broken_yaml_is_refused_with_the_file(tmp_path, text):
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match="params.yaml: not valid YAML: (?s:.*)line"):
        params.read(path)


@pytest.mark.parametrize(("text", "found"), [("", "NoneType"), ("- 1\n", "list"), ("3\n", "int")])
def test_something_else_than_a_mapping_is_refused(tmp_path, text, found):
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=f"expected a mapping of knobs, found {found}"):
        params.read(path)


def test_text_that_is_no_utf8_is_refused(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_bytes("seed: 1  # é\n".encode("latin-1"))
    with pytest.raises(InputError, match="params.yaml"):
        params.read(path)


def test_a_missing_file_says_where_to_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="params.yaml: missing; run from the folder"):
        params.load(KNOBS["rollout"])


def with_rounds(tmp_path, text):
    """The small params with `rounds` written as a person would."""
    values = small_params()
    del values["rounds"]
    write(tmp_path / "params.yaml", values)
    with (tmp_path / "params.yaml").open("a") as file:
        file.write(f"rounds:\n{text}\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  1: models/sft", "key 1 is no text: quote it, '1': models/sft"),
        ("  '1': models/sft\n  2: models/policy/1", "quote it, '2': models/policy/1"),
        ("  '1': models/stf", "starts from 'models/stf'; expected models/sft, models/policy/"),
        ("  '1': models/policy/1", "round '1' starts from 'models/policy/1'"),
        ("  '1': models/policy/2\n  '2': models/sft", "round '1' starts from 'models/policy/2'"),
        ("  '2': models/policy/1", "round '2' starts from 'models/policy/1'"),
        ("  '1': models/sft\n  '2': models/policy/1/", "round '2' starts from 'models/policy/1/'"),
        ("  '1': null", "round '1' starts from None"),
        ("  '1': 0", "round '1' starts from 0"),
        ("  '1': [models/sft]", r"round '1' starts from ['models/sft']"),
        ("  '0': models/sft", "key '0' is no round number"),
        ("  '01': models/sft", "key '01' is no round number"),
        ("  first: models/sft", "key 'first' is no round number"),
        ("  '-1': models/sft", "key '-1' is no round number"),
        ("  - models/sft", "expected a mapping such as '1': models/sft"),
        ("  {}", "expected a mapping such as '1': models/sft"),
        ("  3", "expected a mapping such as '1': models/sft"),
        ("", "expected a mapping such as '1': models/sft"),
    ],
)
def test_rounds_that_make_no_chain_are_refused_with_the_fix(tmp_path, monkeypatch, text, expected):
    monkeypatch.chdir(tmp_path)
    with_rounds(tmp_path, text)
    for stage in ("prepare_task", "report"):
        with pytest.raises(InputError) as caught:
            params.load(KNOBS[stage])
        assert "params.yaml: rounds: " in str(caught.value)
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    "rounds",
    [
        {"1": "models/sft"},
        {"1": "models/sft", "2": "models/policy/1", "3": "models/policy/2"},
        {"1": "models/sft", "2": "models/policy/1", "3": "models/policy/1"},
        {"1": "models/sft", "2": "models/sft"},
        {"2": "models/sft", "5": "models/policy/2", "17": "models/policy/5"},
        {"3": "models/policy/1", "1": "models/sft"},
    ],
)
def test_gaps_branches_and_any_order_of_rounds_are_fine(accepted, rounds):
    assert accepted("report", rounds=rounds).rounds == rounds


RIGHT_ALONE = {"correctness": 1.0, "format": None, "length": None, "reward_model": None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_rollouts": 1}, "num_rollouts: found 1, but loss grpo compares"),
        ({"loss": "rloo", "num_rollouts": 1}, "num_rollouts: found 1, but loss rloo"),
        ({"loss": "ppo", "critic": None}, "critic: found null, but loss ppo needs one"),
        (
            {"loss": "reinforce", "ppo_epochs": 2},
            "ppo_epochs: found 2, but loss reinforce has no ratio",
        ),
        ({"kl_estimator": "k1"}, "kl_estimator: found 'k1', but the KL goes into the loss"),
        *(
            ({"loss": loss, "kl_estimator": kind}, f"kl_estimator: found '{kind}', but the KL goes")
            for loss in ("ppo", "rloo", "reinforce")
            for kind in ("k2", "k3")
        ),
        ({"kl_placement": "reward", "kl_estimator": "k3"}, "kl_estimator: found 'k3', but the KL"),
        (
            {"loss": "maxrl", "kl_placement": "reward", "rewards": RIGHT_ALONE},
            "kl_placement: found 'reward', but loss maxrl needs rewards of at least 0",
        ),
        (
            {"loss": "ppo", "kl_estimator": "k1", "kl_placement": "loss"},
            "kl_estimator: found 'k1'",
        ),
        *(
            ({"loss": loss, "kl_placement": "loss"}, "kl_placement: found 'loss', but loss " + loss)
            for loss in ("raft", "online_dpo")
        ),
        ({"loss": "online_dpo", "kl_placement": "reward"}, "kl_placement: found 'reward', but"),
        ({"loss": "online_dpo", "beta": 0.0}, "beta: found 0, but loss online_dpo compares with"),
        (
            {"loss": "online_dpo", "loss_aggregation": "token-mean"},
            "loss_aggregation: found 'token-mean', but loss online_dpo is a mean over pairs",
        ),
        ({"loss": "raft", "num_rollouts": 1}, "num_rollouts: found 1, but loss raft"),
        ({"loss": "grop"}, "loss: found 'grop', expected one of reinforce, rloo, ppo, grpo"),
    ],
)
def test_knobs_that_do_not_fit_together_are_named(complaint, changes, expected):
    for stage in ("prepare_task", "optimize"):
        message = complaint(stage, **changes)
        assert f"params.yaml: {expected}" in message
        assert len(message.splitlines()) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "ppo", "num_rollouts": 1},
        {"loss": "reinforce", "num_rollouts": 1},
        {"loss": "reinforce", "ppo_epochs": 2, "allow_off_policy": True},
        {"loss": "grpo", "critic": None},
        {"kl_estimator": "k1", "kl_placement": "reward"},
        {"kl_estimator": "k1", "beta": 0.0},
        {"kl_estimator": "k3", "loss": "rloo", "beta": 0.0},
        {"kl_estimator": "k2", "loss": "rloo", "kl_placement": "loss"},
        {"kl_placement": "reward"},
        {"loss": "maxrl", "kl_placement": "reward", "beta": 0.0, "rewards": RIGHT_ALONE},
        {"loss": "maxrl", "kl_placement": "loss", "rewards": RIGHT_ALONE},
        {"loss": "ppo", "kl_estimator": "k1"},
        {"loss": "raft", "beta": 0.0, "ppo_epochs": 3},
        {"loss": "raft", "kl_placement": "reward", "kl_estimator": "k1"},
        {"loss": "raft", "loss_aggregation": "seq-mean-token-mean", "kl_estimator": "k1"},
        {"loss": "online_dpo", "ppo_epochs": 3, "skip_wrong_groups": True},
    ],
)
def test_knobs_that_do_fit_together_pass(accepted, changes):
    accepted("optimize", **changes)


def test_every_knob_says_in_words_what_it_takes():
    silent = [(stage, key) for stage, key, field in fields() if not field.description]
    assert not silent


def test_no_knob_has_a_default_in_code():
    held = [(stage, key) for stage, key, field in fields() if not field.is_required()]
    assert not held


def test_a_key_that_several_stages_read_has_one_type_and_one_meaning():
    def takes(key, field):
        return pydantic.create_model("One", **{key: (field.annotation, field)}).model_json_schema()

    known, differing = {}, []
    for stage, key, field in fields():
        found = takes(key.replace(".", "_"), field)
        if known.setdefault(key, found) != found:
            differing.append((stage, key))
    assert not differing


def test_every_key_of_the_committed_file_is_read_by_a_stage_and_has_a_value():
    known = {key for _, key, _ in fields()}
    values = plain(ROOT / "params.yaml")

    def leaves(mapping, prefix=""):
        for name, value in mapping.items():
            if prefix + name in known:
                yield prefix + name
            elif isinstance(value, dict):
                yield from leaves(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name} (unread)"

    assert set(leaves(values)) == known


def test_dotted_keys_agree_with_the_fields():
    for stage, knobs in KNOBS.items():
        assert set(params.keys(knobs)) == {key for name, key, _ in fields() if name == stage}


def test_a_float_knob_survives_the_way_that_dvc_writes_it(tmp_path):
    path = tmp_path / "params.yaml"
    yaml = YAML()
    document = yaml.load("lr: 1.0e-3  # rate\n")
    for value in (1e-5, 1e-10, 3e-4, 0.1, 1.0, 123456789.0):
        document["lr"] = value
        with path.open("w") as file:
            yaml.dump(document, file)
        assert params.read(path)["lr"] == value


RULES = """
import json
from math import isclose as close
one, (two, three) = 1, (2, 3)
class Four: pass
try:
    def five(text, answer, entry): pass
except ImportError: pass
raise SystemError("this module was run")
"""


@pytest.mark.parametrize("function", ["json", "close", "one", "three", "Four", "five"])
def test_a_verifier_is_found_without_running_its_module(accepted, tmp_path, function):
    (tmp_path / "data" / "source" / "mine").mkdir(parents=True)
    (tmp_path / "data" / "source" / "mine" / "__init__.py").write_text("")
    (tmp_path / "data" / "source" / "mine" / "rules.py").write_text(RULES)
    assert accepted(verifier=f"mine.rules:{function}").verifier == f"mine.rules:{function}"


def test_an_installed_module_may_hold_the_verifier(accepted):
    assert accepted(verifier="json:loads").verifier == "json:loads"


@pytest.mark.parametrize("name", ["mine:six", "mine.rules:one", ":check", "mine:", "a:b:c", ".:a"])
def test_a_misspelt_verifier_is_told_by_whichever_stage_runs_first(complaint, tmp_path, name):
    (tmp_path / "data" / "source").mkdir(parents=True)
    (tmp_path / "data" / "source" / "mine.py").write_text(RULES)
    assert f"verifier: found {name!r}" in complaint("prepare_task", verifier=name)


@pytest.mark.parametrize(
    ("component", "weight"), [("reward_model", 0.1), ("length", 1.0), ("correctness", -1.0)]
)
def test_maxrl_is_refused_with_a_reward_that_can_be_negative(complaint, component, weight):
    rewards = {"correctness": 1.0, "format": None, "length": None, "reward_model": None}
    message = complaint("prepare_task", loss="maxrl", rewards=rewards | {component: weight})
    assert f"rewards.{component}: found {weight}, but loss maxrl divides by" in message


def test_maxrl_is_accepted_with_rewards_of_0_and_above(accepted):
    rewards = {"correctness": 1.0, "format": 0.5, "length": None, "reward_model": None}
    assert accepted("optimize", loss="maxrl", rewards=rewards).loss == "maxrl"


@pytest.mark.parametrize("columns", ["ask", ["ask"], {"prompt": 1}])
def test_columns_that_are_no_mapping_of_names_are_refused(complaint, columns):
    assert "params.yaml: sft.columns" in complaint("prepare_task", sft__columns=columns)


@pytest.mark.parametrize("section", ["sft", "preferences", "prompts", "evaluate"])
@pytest.mark.parametrize("name", ["data/source/rows", "data/source/rows.jsonl", "/rows.csv.gz"])
def test_a_dataset_that_is_not_there_is_told_by_whichever_stage_runs_first(
    complaint, section, name
):
    message = complaint("prepare_task", **{f"{section}__dataset": name})
    assert f"{section}.dataset: found {name!r}, but there is no such file" in message


@pytest.mark.parametrize("section", ["sft", "preferences", "prompts", "evaluate"])
@pytest.mark.parametrize("name", ["rows.jsonl", "data/rows.jsonl", "data/source/../rows.jsonl"])
def test_a_dataset_whose_changes_dvc_would_not_see_is_refused(complaint, tmp_path, section, name):
    (tmp_path / "data" / "source").mkdir(parents=True)
    for path in (tmp_path / "rows.jsonl", tmp_path / "data" / "rows.jsonl"):
        path.touch()
    for given in (name, str(tmp_path / name)):
        message = complaint("prepare_task", **{f"{section}__dataset": given})
        assert f"{section}.dataset: found {given!r}, outside data/source" in message


def test_a_link_under_data_source_may_lead_anywhere(accepted, tmp_path):
    (tmp_path / "data" / "source").mkdir(parents=True)
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "data" / "source" / "rows.jsonl").symlink_to(tmp_path / "rows.jsonl")
    assert accepted("tokenize_sft", sft__dataset="data/source/rows.jsonl")


def test_a_dataset_may_be_a_file_a_folder_or_a_hub_id(accepted, tmp_path):
    (tmp_path / "data" / "source" / "saved").mkdir(parents=True)
    (tmp_path / "data" / "source" / "rows.jsonl").touch()
    for name in ("data/source/saved", "data/source/rows.jsonl", "openai/gsm8k", "imdb"):
        assert accepted("tokenize_sft", sft__dataset=name).sft.dataset == name


@pytest.mark.parametrize(
    ("stage", "section", "kind"),
    [
        ("tokenize_sft", "sft", "sft"),
        ("tokenize_preferences", "preferences", "preferences"),
        ("rollout", "prompts", "prompts"),
        ("evaluate", "evaluate", "prompts"),
    ],
)
def test_a_row_format_is_one_that_can_be_read(accepted, complaint, stage, section, kind):
    for name in [*FORMATS[kind], None]:
        knobs = accepted(stage, **{f"{section}__format": name})
        assert getattr(knobs, section).format == name
    message = complaint("prepare_task", **{f"{section}__format": "mesages"})
    assert f"{section}.format: found 'mesages'" in message


@pytest.mark.parametrize(
    ("override", "removed", "added"),
    [
        ("ppo_epochs=2", ["ppo_epochs: 1 "], ["ppo_epochs: 2 "]),
        ("target_kl=0.1", ["target_kl:"], ["target_kl: 0.1"]),
        ("sft.format=messages", ["  format: "], ["  format: messages "]),
        ("critic=null", ["critic: policy "], ["critic: "]),
        ("+rounds.9=models/sft", [], ["  '9': models/sft"]),
        ("seed=42", [], []),
    ],
)
def test_dvc_exp_run_changes_the_line_of_its_knob_in_params_yaml_and_no_other(
    override, removed, added, tmp_path
):
    """DVC writes the whole file anew: what it spells in its own way would fill the diff."""
    before = (ROOT / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(before)
    apply_overrides(tmp_path / "params.yaml", [override])
    after = (tmp_path / "params.yaml").read_text()
    changes = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    found = {sign: [line[2:] for line in changes if line[0] == sign] for sign in "-+"}
    for lines, wanted in ((found["-"], removed), (found["+"], added)):
        assert len(lines) == len(wanted), "an empty value is null, '1' stands in single quotes"
        assert all(map(str.startswith, lines, wanted)), lines
