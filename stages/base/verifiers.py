"""Whether a verifier `module:function` is there, found out without running a line of the module."""

import ast
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def problem_with(name: str, folder: Path) -> str | None:
    """What is wrong with `module:function`, looked for in `folder` and among installed modules."""
    module, _, function = name.partition(":")
    places, spec = [str(folder.resolve()), *sys.path], None
    for end, part in enumerate(module.split("."), start=1):
        spec = PathFinder.find_spec(".".join(module.split(".")[:end]), places) if part else None
        if spec is None:
            return f"found {name!r}, but neither {folder} nor Python has a module {module!r}"
        places = list(spec.submodule_search_locations or [])
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (SyntaxError, ValueError) as error:
        return f"found {name!r}, but module {module!r} is no Python: {error}"
    if function in _names(tree) or "*" in _names(tree):
        return None
    return f"found {name!r}, but module {module!r} defines no {function!r}"


def _names(tree: ast.AST) -> set[str]:
    """Every name that a module defines, assigns or imports, at whatever depth."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
    return found
