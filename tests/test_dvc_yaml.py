"""dvc.yaml declares what the code reads: modules, knobs, files. (Faults D01 and D02.)

Stages stay up to date or turn stale here without ever running: made-up outputs are committed to a
dvc.lock, then one thing is changed and DVC is asked.
"""

import ast
import os
import re
import shutil
from collections import defaultdict
from contextlib import chdir
from functools import cache
from modulefinder import ModuleFinder
from pathlib import Path

import pytest
from dvc.dependency import param

from stages.base.params import all_knobs, keys
from stages.base.spelling import flat
from tests.helpers.clone import copy_of_working_tree, run
from tests.helpers.tiny import ROOT, change, plain, small_params, write
from tools.sync_dvc import bodies, code_dependencies, derived, imported_modules, script_of

DOCUMENT = plain(ROOT / "dvc.yaml")
BODIES = dict(bodies(DOCUMENT))
KNOBS = all_knobs()
MODULES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "stages").rglob("*.py"))


def covers(dependency: str, module: str) -> bool:
    return module == dependency or module.startswith(dependency + "/")


def declared_modules(stage: dict) -> set[str]:
    """Modules of stages/ that the deps of a stage name, folders spread out."""
    return {m for m in MODULES if any(covers(d, m) for d in stage["deps"])}


@pytest.fixture(scope="module")
def imports(tmp_path_factory) -> dict[str, set[str]]:
    """Script -> modules that it imports, as the standard library's modulefinder sees byte code.

    modulefinder knows no namespace packages, hence a copy with an __init__.py in each folder.
    """
    root = tmp_path_factory.mktemp("imports")
    shutil.copytree(ROOT / "stages", root / "stages", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [root / "stages", *(p for p in (root / "stages").rglob("*") if p.is_dir())]:
        (folder / "__init__.py").touch()
    found = {}
    for script in (ROOT / "stages").glob("[a-z]*.py"):
        finder = ModuleFinder(path=[str(root)])
        finder.run_script(str(root / "stages" / script.name))
        files = {Path(m.__file__) for m in finder.modules.values() if m.__file__}
        relative = {str(f.relative_to(root)) for f in files}
        found[script.stem] = {name for name in relative if (ROOT / name).is_file()}
    return found


COSTLY = ("train_sft", "train_rm", "rollout", "optimize")


@pytest.mark.parametrize("name", BODIES)
def test_a_stage_declares_every_module_that_its_script_imports(name, imports):
    assert declared_modules(BODIES[name]) >= imports[script_of(BODIES[name])]


@pytest.mark.parametrize("name", COSTLY)
def test_at_most_five_modules_that_a_costly_stage_does_not_run_make_it_stale(name, imports):
    idle = declared_modules(BODIES[name]) - imports[script_of(BODIES[name])]
    assert len(idle) <= 5, sorted(idle)


def test_code_dependencies_are_rooms_and_few():
    """Counted over the default pipeline."""
    optional = {n for n, s in DOCUMENT["stages"].items() if s.get("foreach") in OF_OPTIONAL}
    code = {n: [d for d in s["deps"] if d.startswith("stages/")] for n, s in BODIES.items()}
    assert sum(len(deps) for name, deps in code.items() if name not in optional) <= 100
    deps = [dep for stage in code.values() for dep in stage]
    single = [d for d in deps if d.endswith(".py")]
    assert {str(Path(d).parent) for d in single} == {"stages", "stages/knobs"}


@pytest.mark.parametrize("name", BODIES)
def test_a_stage_declares_exactly_what_the_tool_derives(name):
    deps, params = derived(BODIES[name])
    assert BODIES[name]["deps"] == deps, "run: python tools/sync_dvc.py --write"
    assert BODIES[name]["params"] == params, "run: python tools/sync_dvc.py --write"


@pytest.mark.slow
def test_no_module_is_loaded_at_run_time_that_the_import_statements_do_not_show(imports):
    code = """
import importlib, sys
for name in sys.argv[1:]:
    for module in [m for m in sys.modules if m.split(".")[0] == "stages"]:
        del sys.modules[module]
    importlib.import_module(f"stages.{name}")
    loaded = [m for m in sys.modules if m.startswith("stages.")]
    files = [getattr(sys.modules[m], "__file__", None) for m in loaded]
    print(name, *filter(None, files))
"""
    lines = run(ROOT, "python", "-c", code, *imports).stdout.splitlines()
    for name, *files in (line.split() for line in lines if line.split()[0] in imports):
        loaded = {str(Path(file).relative_to(ROOT)) for file in files}
        assert loaded <= imports[name] | {f"stages/{name}.py"}
    assert len(lines) >= len(imports)


def test_an_import_inside_a_function_counts_and_a_room_stands_for_its_modules(tmp_path):
    (tmp_path / "stages" / "rl").mkdir(parents=True)
    (tmp_path / "stages" / "rl" / "late.py").write_text("import stages.base.later\n")
    (tmp_path / "stages" / "rl" / "unused.py").write_text("")
    (tmp_path / "stages" / "base").mkdir(parents=True)
    (tmp_path / "stages" / "base" / "later.py").write_text("")
    script = tmp_path / "stages" / "x.py"
    script.write_text("def f():\n    from stages.rl import late\n    return late\n")
    found = {p.name for p in imported_modules(script, tmp_path)}
    assert found == {"x.py", "late.py", "later.py"}
    assert code_dependencies(script, tmp_path) == ["stages/base", "stages/rl", "stages/x.py"]


def test_every_module_is_imported_by_some_stage(imports):
    assert set().union(*imports.values()) == set(MODULES)


def test_a_template_is_a_dependency_of_the_stage_that_fills_it():
    templates = [str(p.relative_to(ROOT)) for p in (ROOT / "stages").rglob("*.j2")]
    assert templates == ["stages/page/page.html.j2"]
    assert any(covers(dep, templates[0]) for dep in BODIES["report"]["deps"])


# By hand: who must run again after an edit, room by room.
SAMPLE = {"rollout", "evaluate", "evaluate_sft", "evaluate_direct"}
TOKENIZE = {"tokenize_sft", "tokenize_preferences", "tokenize_labelled"}
PICK = {"score_answers"}  # which reads the held-out prompts, and runs a model
READ_ROWS = SAMPLE | TOKENIZE | PICK | {"prepare_task"}
TRAIN = {"train_sft", "train_rm", "train_reward", "optimize", "train_direct"}
SCORE = {"score", "score_pairs"}
EDITS = {
    "stages/base/params.py": set(BODIES),
    "stages/text/chat.py": READ_ROWS | {"prepare_model"},
    "stages/rows/layouts.py": READ_ROWS,
    "stages/models/forward.py": SAMPLE | TRAIN | SCORE | PICK | {"prepare_model"},
    "stages/direct/losses.py": {"train_direct"},
    "stages/training/batching.py": TRAIN,
    "stages/rollouts/engine.py": SAMPLE | PICK | {"prepare_model"},  # which tries the sampler
    "stages/rl/objectives.py": {"optimize"},
    "stages/page/page.py": {"report"},
    "stages/knobs/optimize.py": {"optimize"},
    "stages/knobs/rollout.py": {"rollout"},
}


@pytest.mark.parametrize("module", EDITS)
def test_an_edit_concerns_the_stages_that_it_should(module):
    assert {n for n, stage in BODIES.items() if module in declared_modules(stage)} == EDITS[module]


def used_names(modules: set[str]) -> set[str]:
    """Attribute names that code reads, and fields of the dataclasses that are filled by name."""
    names = set()
    for module in modules:
        for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.ClassDef) and not module.startswith(
                ("stages/knobs", "stages/base/knobs")
            ):
                names |= {f.target.id for f in node.body if isinstance(f, ast.AnnAssign)}
    return names


@pytest.mark.parametrize("script", KNOBS)
def test_every_knob_that_a_stage_declares_is_used_by_its_code(script, imports):
    names = used_names(imports[script])
    by_mapping = {"rewards"}  # score reads these through model_dump
    unused = [
        key
        for key in keys(KNOBS[script])
        if key.split(".")[0] not in by_mapping and key.split(".")[-1] not in names
    ]
    assert not unused


@pytest.mark.parametrize("script", KNOBS)
def test_a_stage_reads_params_yaml_through_its_own_knobs_alone(script, imports):
    """What a stage's `Knobs` does not name it cannot read: fields that are not there are errors."""
    knobs = {name for name in imports[script] if name.startswith("stages/knobs/")}
    assert knobs == {f"stages/knobs/{script}.py"}
    whole = getattr(KNOBS[script], "whole_file", False)  # declared as such
    readers = {"stages/base/params.py", "stages/base/clones.py"}  # clones: dvc.yaml, .dvc files
    for module in imports[script] - readers if not whole else []:
        text = (ROOT / module).read_text(encoding="utf-8")
        assert not re.search(r"PARAMS\b|params\.read|ruamel|params_show", text), module
    calls = re.findall(r"params\.load\((\w*)\)", (ROOT / f"stages/{script}.py").read_text())
    assert calls == ["Knobs"]


# Stages that follow `processes` without depending on it: they deal whole batches, and any number of
# processes gives the same bytes (tests/stages/test_dealing.py), so that another runs none of them.
FOLLOW = {"rollout", "score", "score_pairs", "evaluate"}


def test_the_stages_that_follow_a_knob_without_depending_on_it_are_listed():
    found = {s for s in KNOBS if "params.processes()" in (ROOT / f"stages/{s}.py").read_text()}
    assert found == FOLLOW
    assert not any("processes" in keys(KNOBS[script]) for script in FOLLOW)


def test_every_stage_says_in_words_what_it_does():
    assert [name for name, stage in BODIES.items() if not stage.get("desc")] == []


def options_of(script: str) -> set[str]:
    """`--names` of the click options in a script, from its text."""
    tree = ast.parse((ROOT / "stages" / f"{script}.py").read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    words = [
        argument.value.split()[0]
        for call in calls
        if getattr(call.func, "attr", "") == "option" or getattr(call.func, "id", "") == "paths"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    ]
    return {word for word in words if word.startswith("-")}


def command_of(stage: dict) -> dict[str, str]:
    """The options of a stage's command line and their values."""
    words = stage["cmd"].split()[3:]
    return dict(zip(words[::2], words[1::2], strict=True))


def outputs_of(stage: dict) -> set[str]:
    entries = [*stage.get("outs", []), *stage.get("metrics", []), *stage.get("plots", [])]
    return {next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries}


@pytest.mark.parametrize("name", BODIES)
def test_every_option_of_a_script_is_fed_from_dvc_yaml(name):
    assert BODIES[name]["cmd"].split()[:2] == ["python", "-m"]
    assert set(command_of(BODIES[name])) == options_of(script_of(BODIES[name]))


@pytest.mark.parametrize("name", BODIES)
def test_every_path_on_a_command_line_is_a_dependency_or_an_output_and_the_reverse(name):
    stage = BODIES[name]
    plain_values = ("--round", "--kind")
    paths = {v for option, v in command_of(stage).items() if option not in plain_values}
    data = {dep for dep in stage["deps"] if not dep.startswith("stages/")}
    assert paths <= data | outputs_of(stage)
    # Knobs name files below data/source and models/source themselves, folders of adapters their
    # base.
    named_inside = {"data/source", "models/base", "models/sft"}
    assert (data - named_inside) | outputs_of(stage) <= paths


def test_no_output_is_kept_out_of_the_run_cache():
    for stage in BODIES.values():
        assert not any(isinstance(out, dict) for out in stage.get("outs", []))
        assert "always_changed" not in stage and "frozen" not in stage


# From here on: DVC itself, on a copy whose outputs are made up.


# What adds the stages that are not there by default.
OPTIONAL = {
    "branches": {"dpo": "models/sft"},
    "reward_models": {"o": {"kind": "outcome", "data": "data/rollouts/round-1.parquet"}},
    "best_of_n": {"rm": "models/rm"},
    "labelled": {"mine": "data/source/mine.jsonl"},
}
OF_OPTIONAL = {f"${{{name}}}": list(values) for name, values in OPTIONAL.items()}


def params_with_all_stages(**changes) -> dict:
    """Small knobs, with every stage of dvc.yaml."""
    return small_params(**OPTIONAL | changes)


@pytest.fixture(scope="module")
def committed(tmp_path_factory) -> Path:
    """A copy of the repository in which every stage is up to date, on made-up outputs."""
    from dvc.repo import Repo

    folder = tmp_path_factory.mktemp("repository")
    copy_of_working_tree(folder)
    write(folder / "params.yaml", params_with_all_stages())
    (folder / "data" / "source" / "mine.jsonl").write_text("made up\n")
    with chdir(folder), Repo() as repo:
        for stage in repo.index.stages:
            for out in stage.outs:
                path = Path(out.fs_path)
                if path.suffix:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(f"made up for {stage.addressing}\n")
                else:
                    path.mkdir(parents=True, exist_ok=True)
                    (path / "file").write_text(f"made up for {stage.addressing}\n")
        for dependency in {dep for stage in BODIES.values() for dep in stage["deps"]}:
            if dependency.startswith("data/task/"):
                (folder / dependency).write_text("made up\n")
        repo.commit(force=True)
    assert stale(folder) == {}
    return folder


def stale(folder: Path) -> dict[str, dict]:
    """What `dvc status` says: stage -> {changed dependency: {what: how} or how}."""
    from dvc.repo import Repo

    with chdir(folder), Repo() as repo:
        found = defaultdict(dict)
        for stage, entries in repo.status().items():
            for entry in entries:
                if isinstance(entry, dict):
                    for changes in entry.values():
                        found[stage] |= changes
                else:
                    found[stage][entry] = entry
        return dict(found)


class Changed:
    """Files as they were, whatever a test does to them."""

    def __init__(self, *paths: Path):
        self.before = {path: path.read_bytes() for path in paths}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for path, content in self.before.items():
            path.write_bytes(content)


def names_of(stages) -> set[str]:
    return {stage.split("@")[0] for stage in stages}


def another(value):
    """Some other value of the same kind, as DVC sees it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, dict):
        return {**value, "another": 1}
    return f"another {value}"


def readers() -> dict[str, set[str]]:
    """Key -> stages of dvc.yaml whose code reads it, the report apart, which shows all keys."""
    found = defaultdict(set)
    for name, stage in BODIES.items():
        for key in keys(KNOBS[script_of(stage)]):
            if name != "report":
                found[key].add(name)
    return found


@pytest.fixture
def dependencies(committed, monkeypatch):
    """(stage, dependency) pairs of one DVC repository that stays open: a tenth of `stale`'s time.

    What `dvc status` says of a stage is what its dependencies say, and its outputs, which nobody
    touches here. Otherwise most of the time went into reading params.yaml, once for each stage.
    """
    from dvc.repo import Repo

    read = cache(lambda content, path, fs: load_path(path, fs))
    load_path = param.load_path
    monkeypatch.setattr(
        param, "load_path", lambda path, fs, **_: read(Path(path).read_bytes(), path, fs)
    )
    monkeypatch.chdir(committed)
    with Repo() as repo, repo.lock:
        yield [(s.addressing.split("@")[0], dep) for s in repo.index.stages for dep in s.deps]


def keys_of_file(values: dict) -> set[str]:
    """Dotted keys of params.yaml; `task.config`, `rounds` and their like are one knob each."""
    whole = ("rounds", "task.config", *OPTIONAL)
    return {next((w for w in whole if key.startswith(w)), key) for key in flat(values)}


def test_each_key_in_turn_makes_exactly_the_stages_stale_that_read_it(committed, dependencies):
    path, values, seen = committed / "params.yaml", params_with_all_stages(), {}
    params = [
        (stage, dep) for stage, dep in dependencies if isinstance(dep, param.ParamsDependency)
    ]
    with Changed(path):
        for key in keys_of_file(values):
            value = values
            for part in key.split("."):
                value = value[part]
            write(path, change(values, **{key.replace(".", "__"): another(value)}))
            found = {stage: set(dep.status().get("params.yaml", {})) for stage, dep in params}
            # It shows all of them; DVC names the sections of a file compared as a whole.
            assert found.pop("report") == {key.split(".")[0]}
            assert set().union(*found.values()) <= {key}
            seen[key] = {stage for stage, changes in found.items() if changes}
    # dvc.yaml reads these, no stage
    for key in ("rm.kind", "rm.data", "reward_models", "labelled", "best_of_n"):
        assert seen.pop(key) == set()
    assert seen == readers()
    assert len(seen) > 100


def test_each_module_in_turn_makes_exactly_the_stages_stale_that_declare_it(
    committed, dependencies
):
    code = defaultdict(list)
    for stage, dep in dependencies:
        if str(dep).startswith("stages/"):
            code[str(dep)].append((stage, dep))
    for module in MODULES:
        path = committed / module
        with Changed(path):
            path.write_text(path.read_text() + "# edited\n")
            # The same file in the lock entries of all stages: one answers for the others.
            stale = {name for name, found in code.items() if found[0][1].status()}
        assert {stage for name in stale for stage, _ in code[name]} == {
            name for name, stage in BODIES.items() if module in declared_modules(stage)
        }, module


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("ppo_epochs", 2, {"optimize"}),
        ("temperature", 0.8, {"rollout", "score", "optimize"}),
        ("rm__lr", 1e-5, {"train_rm", "train_reward"}),
        ("rewards__reward_model", None, {"score"}),
        ("preferences__validation_share", 0.5, {"split_preferences"}),
        ("evaluate__samples", 9, {"evaluate", "evaluate_sft", "evaluate_direct"}),
        ("direct__beta", 0.2, {"train_direct"}),
        ("score_batch_size", 7, SCORE | PICK),
        ("sft__max_samples", 7, {"prepare_task", "tokenize_sft"}),
        ("task__config", {"min_word_len": 4}, {"prepare_task"}),
    ],
)
def test_one_key_changed_makes_every_round_of_its_stages_stale_and_no_other(
    committed, key, value, expected
):
    path = committed / "params.yaml"
    with Changed(path):
        write(path, change(params_with_all_stages(), **{key: value}))
        found = stale(committed)
    assert "params.yaml" in found.pop("report")  # it shows all knobs
    keys = {"${rounds}": ["1", "2"]} | OF_OPTIONAL
    each = {name: keys.get(DOCUMENT["stages"][name].get("foreach"), [None]) for name in expected}
    wanted = {f"{name}@{key}" if key else name for name, found in each.items() for key in found}
    assert set(found) == wanted
    assert {key for changes in found.values() for key in changes["params.yaml"]} == {
        key.replace("__", ".")
    }


def test_comments_order_and_spelling_of_numbers_change_nothing(committed):
    path = committed / "params.yaml"
    values = params_with_all_stages(temperature=1.0, sft__lr=1e-5)
    with Changed(path):
        write(path, values)
        before = stale(committed)
        backwards = dict(reversed(values.items()))
        write(path, backwards)
        text = path.read_text().replace("temperature: 1.0", "temperature: 1  # a comment")
        path.write_text(text.replace("lr: 1.0e-05", "lr: 0.00001"))
        assert "0.00001" in path.read_text() or "1e-05" in path.read_text()
        assert stale(committed) == before


def test_another_round_concerns_its_own_stages_and_the_report(committed):
    path = committed / "params.yaml"
    rounds = {"1": "models/sft", "2": "models/policy/1", "3": "models/policy/2"}
    with Changed(path):
        write(path, params_with_all_stages(rounds=rounds))
        found = set(stale(committed))
    made = {"rollout@3", "score@3", "optimize@3", "evaluate@3", "score_answers@rm", "report"}
    assert found == made


def test_another_start_of_a_round_concerns_that_round_and_the_report(committed):
    path = committed / "params.yaml"
    with Changed(path):
        write(path, params_with_all_stages(rounds={"1": "models/sft", "2": "models/sft"}))
        found = set(stale(committed))
    assert found == {"rollout@2", "score@2", "optimize@2", "score_answers@rm", "report"}


@pytest.mark.parametrize("module", ["stages/rl/objectives.py", "stages/text/chat.py"])
def test_an_edited_module_makes_exactly_its_stages_stale(committed, module):
    path = committed / module
    with Changed(path):
        path.write_text(path.read_text() + "# edited\n")
        found = stale(committed)
    assert names_of(found) == EDITS[module]
    for changes in found.values():
        assert all(covers(dependency, module) for dependency in changes)


def test_a_rule_or_a_file_under_data_source_concerns_the_stages_that_may_read_it(committed):
    path = committed / "data" / "source" / "my_rules.py"
    path.write_text("def check(text, answer, entry):\n    return 1.0\n")
    try:
        found = names_of(stale(committed))
    finally:
        path.unlink()
    assert found == READ_ROWS - {"tokenize_labelled"}  # which depends on its one file


def test_a_model_under_models_source_concerns_the_stage_that_reads_it(committed):
    path = committed / "models" / "source" / "mine.gguf"
    path.write_text("a model")
    try:
        assert set(stale(committed)) == {"prepare_model"}
    finally:
        path.unlink()


LITTER = [
    "stages/base/__pycache__/errors.cpython-311.pyc",
    "stages/rows/__pycache__/params.cpython-312.pyc",
    "data/source/__pycache__/my_rules.cpython-311.pyc",
    "stages/rl/.objectives.py.swp",
    "stages/rl/.objectives.py.swo",
    "stages/rl/objectives.py~",
    "stages/rl/#objectives.py#",
    "stages/rl/.#objectives.py",
    "stages/rl/.DS_Store",
    "stages/rl/.ipynb_checkpoints/objectives-checkpoint.py",
    "data/source/.gitkeep",
    "data/curves/optimize/.1.csv.partial",
    "data/figures/.gitignore",
]


def test_byte_code_and_what_editors_leave_change_nothing(committed):
    made = [committed / name for name in LITTER if not (committed / name).exists()]
    for path in made:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("litter\n")
    try:
        assert stale(committed) == {}
    finally:
        for path in made:
            path.unlink()


def test_another_clone_with_the_same_outputs_is_up_to_date(committed, tmp_path):
    run(committed, "git", "add", "--all")
    run(committed, "git", "commit", "--quiet", "--message", "lock")
    run(tmp_path, "git", "clone", "--quiet", committed, "clone")
    clone = tmp_path / "clone"
    for folder in ("data", "models", "plots", "reports", "metrics", ".dvc/cache"):
        shutil.copytree(committed / folder, clone / folder, dirs_exist_ok=True)
    for path in (clone / "stages").rglob("*.py"):
        os.utime(path, (1, 1))
    assert stale(clone) == {}


def test_a_clone_has_the_folder_that_dataset_knobs_name(committed, tmp_path):
    run(tmp_path, "git", "clone", "--quiet", committed, "clone")
    assert (tmp_path / "clone" / "data" / "source").is_dir()
