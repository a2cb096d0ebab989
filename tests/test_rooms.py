"""The house: rooms in the order of the data, and which of their modules touch disk."""

import ast
from pathlib import Path

import pytest

from tests.helpers.tiny import ROOT
from tools.sync_dvc import imports_of

ORDER = "base text rows models training reward rollouts sources rl direct page viewer".split()
ROOMS = sorted(p.name for p in (ROOT / "stages").iterdir() if p.is_dir() and list(p.glob("*.py")))
MODULES = sorted((ROOT / "stages").rglob("*.py"))

# Knobs whose values are the names of a registry.
REGISTRIES = {("optimize.py", "rl"), ("train_direct.py", "direct")}

# The modules that may open, list or write files; all others take and give values.
DISK = {
    "base/bases.py",
    "base/clones.py",
    "base/files.py",
    "base/kept.py",
    "base/metrics.py",
    "base/params.py",
    "base/positions.py",
    "base/scratch.py",
    "base/tables.py",
    "base/tokenizers.py",
    "base/trust.py",
    "base/verifiers.py",
    "models/adapters.py",
    "models/checkpoints.py",
    "models/trainer_state.py",
    "rows/formats.py",
    "rows/readers.py",
    "sources/published.py",
    "sources/weights.py",
    "page/excerpts.py",
    "page/page.py",  # its own template
    "viewer/decoding.py",
    "viewer/models.py",
    "viewer/places.py",
    "viewer/rows.py",
    "viewer/storage.py",
}
TOUCHES = {
    *("open", "read_text", "write_text", "read_bytes", "write_bytes", "mkdir", "unlink", "glob"),
    *("rglob", "iterdir", "exists", "is_file", "is_dir", "rmtree", "copyfile", "replace_file"),
    *("connect", "ParquetFile", "ParquetWriter", "from_pretrained", "save_pretrained", "safe_open"),
    *("save_file", "load_dataset", "load_from_disk", "snapshot_download", "FileSystemLoader"),
}


def room_of(module: Path) -> str:
    """The folder of a module below stages/; "" for a script."""
    folder = module.relative_to(ROOT / "stages").parent
    return folder.parts[0] if folder.parts else ""


def test_the_rooms_are_those_in_the_order_of_the_data():
    assert ROOMS == sorted([*ORDER, "knobs"])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_earlier_rooms_alone(room):
    """base and knobs stand before all; base/params.py finds the knobs by name, not by import."""
    allowed = {"base", "knobs", room, *ORDER[: ORDER.index(room) if room in ORDER else 1]}
    for module in (ROOT / "stages" / room).glob("*.py"):
        for name in imports_of(ast.parse(module.read_text(encoding="utf-8"))):
            parts = name.split(".")
            if parts[0] == "stages" and len(parts) > 1:
                found = ROOT / "stages" / f"{parts[1]}.py"
                assert not found.is_file(), f"{module} calls back into a script: {name}"
                assert parts[1] in allowed or (module.name, parts[1]) in REGISTRIES, module


def touches(module: Path) -> set[str]:
    """Names of calls in a module that read or write files."""
    calls = [n.func for n in ast.walk(ast.parse(module.read_text())) if isinstance(n, ast.Call)]
    names = {c.attr if isinstance(c, ast.Attribute) else getattr(c, "id", "") for c in calls}
    return names & TOUCHES


def test_the_modules_that_touch_disk_are_listed():
    found = {str(m.relative_to(ROOT / "stages")) for m in MODULES if room_of(m) and touches(m)}
    assert found == DISK


# What libraries and terminals are told by; our own variables stand in base/environment.py.
FOREIGN_VARIABLES = {"rows/workers.py"}


def test_no_room_but_base_reads_the_environment():
    found = {
        str(m.relative_to(ROOT / "stages"))
        for m in MODULES
        if room_of(m) != "base" and "os.environ" in m.read_text(encoding="utf-8")
    }
    assert found == FOREIGN_VARIABLES


def test_no_room_but_base_says_params_yaml():
    """Messages about a knob are `BadKnob`s; the viewer reads the keys of dvc.lock."""
    for module in MODULES:
        if room_of(module) not in ("", "base", "viewer"):
            words = strings_of(ast.parse(module.read_text(encoding="utf-8")))
            assert "params.yaml" not in "".join(words), module


def strings_of(tree: ast.AST) -> list[str]:
    """The text of every string in a module, docstrings apart."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    constants = [n for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    return [n.value for n in constants if isinstance(n.value, str) and id(n) not in docs]
