"""Derive from the code what dvc.yaml must declare, and write it there.

    python tools/sync_dvc.py            # say what differs
    python tools/sync_dvc.py --write    # mend it

For each stage: the rooms (folders of stages/) that its script imports from, at any depth, its own
module of knobs, and the keys of its `Knobs` (with `whole_file` params.yaml
as a whole). Data, outs and comments stay as they are.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def imported_modules(script: Path, root: Path = ROOT) -> set[Path]:
    """The script and every module of stages/ it imports, at any depth, inside functions too."""
    found, waiting = set(), [script]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        packages = [parent / "__init__.py" for parent in path.parents if root in parent.parents]
        waiting += [package for package in packages if package.is_file()]
        for name in imports_of(ast.parse(path.read_text(encoding="utf-8"))):
            module = root / (name.replace(".", "/") + ".py")
            if module.is_file():
                waiting.append(module)
    return found


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def code_dependencies(script: Path, root: Path = ROOT) -> list[str]:
    """Sorted paths for `deps`: each room that the script imports from, its knobs, itself.

    A room (a folder of stages/) is named whole, so that the folder answers what runs again when a
    module in it is touched. Scripts and knobs, of which a stage has one each, are named singly.
    """
    single = {root / "stages", root / "stages" / "knobs"}
    modules = imported_modules(script, root)
    paths = {module if module.parent in single else module.parent for module in modules}
    return sorted(str(path.relative_to(root)) for path in paths)


def script_of(stage: dict) -> str:
    """Name of the script that a stage of dvc.yaml runs: `python -m stages.<name> ...`."""
    return stage["cmd"].split("-m stages.")[1].split()[0]


def derived(stage: dict, root: Path = ROOT) -> tuple[list[str], list[str]]:
    """A stage of dvc.yaml -> the deps and params that it must have; its data deps come first."""
    from stages.base.params import all_knobs, keys

    script = script_of(stage)
    knobs = all_knobs()[script]
    read = [{"params.yaml": None}] if getattr(knobs, "whole_file", False) else sorted(keys(knobs))
    data = [dep for dep in stage["deps"] if not dep.startswith("stages/")]
    code = code_dependencies(root / "stages" / f"{script}.py", root)
    return data + code, read


def bodies(document: dict) -> Iterator[tuple[str, dict]]:
    """(name, stage) of dvc.yaml, what stands under `do` for stages with foreach."""
    for name, stage in document["stages"].items():
        yield name, stage.get("do", stage)


def main() -> None:
    from ruamel.yaml import YAML

    yaml, path = YAML(), ROOT / "dvc.yaml"
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=2, offset=0)
    document = yaml.load(path.read_text(encoding="utf-8"))
    differs = False
    for name, stage in bodies(document):
        deps, params = derived(stage)
        for key, wanted in (("deps", deps), ("params", params)):
            if list(stage[key]) != wanted:
                differs = True
                missing = [item for item in wanted if item not in stage[key]]
                surplus = [item for item in stage[key] if item not in wanted]
                print(f"{name}: {key}: missing {missing}, surplus {surplus}")
                stage[key] = wanted
    if differs and "--write" in sys.argv:
        yaml.dump(document, path)
    raise SystemExit(1 if differs and "--write" not in sys.argv else 0)


if __name__ == "__main__":
    main()
