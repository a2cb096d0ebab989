"""A stage run by its command line in a folder, as dvc.yaml has it, with small knobs."""

import importlib
import json
import sys
from contextlib import chdir, nullcontext

from click.testing import CliRunner

from stages.base import command
from tests.helpers.tiny import command_line, small_params, write


def invoke(folder, stage, options=None, around=None, **knobs):
    """Run a stage of dvc.yaml in a folder with small knobs; `options` replace its paths."""
    script, arguments = command_line(stage)
    arguments |= options or {}
    write(folder / "params.yaml", small_params(**knobs))
    main = getattr(importlib.import_module(f"stages.{script}"), script)
    words = [word for pair in arguments.items() for word in map(str, pair)]
    path, stop = list(sys.path), command.stop_with_parent
    command.stop_with_parent = lambda: None  # the tests themselves must outlive what started them
    try:
        with chdir(folder), around or nullcontext():
            return CliRunner().invoke(main, words, catch_exceptions=False)
    finally:
        # As in a process of its own: data/source is another folder in the next test.
        command.stop_with_parent = stop
        sys.path[:] = path
        sys.path_importer_cache.pop("data/source", None)


def succeed(folder, stage, options=None, **knobs):
    """What a stage prints that ends well."""
    result = invoke(folder, stage, options, **knobs)
    assert result.exit_code == 0, result.output
    return result.output


def refuse(folder, stage, options=None, **knobs):
    """The one line on which a stage ends with exit code 1."""
    result = invoke(folder, stage, options, **knobs)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    lines = [line for line in result.output.splitlines() if line.startswith("Error: stage ")]
    assert len(lines) == 1
    return result.output[result.output.index("Error: stage ") :]


def figures(folder, name):
    """A stage's figures; they must be strict JSON."""

    def refuse_constant(word):
        raise AssertionError(f"{name}: {word} is not JSON")

    text = (folder / "data" / "figures" / f"{name}.json").read_text()
    return json.loads(text, parse_constant=refuse_constant)
