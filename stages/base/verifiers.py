"""What can be said of a verifier without running it: whether it is there, and what it needs."""

import ast
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def can_verify(name: str, answer: str | None, entry: dict | None) -> bool:
    """Whether a prompt brings what a verifier needs; one of your own is taken to know."""
    if ":" in name:
        return True
    if name == "task":
        return entry is not None
    return answer is not None and (name != "numeric" or re.search(r"\d", answer) is not None)


def problem_with(name: str, folder: Path) -> str | None:
    """What is wrong with `module:function`, looked for in `folder` and among installed modules.

    Nothing of the module is run.
    """
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
