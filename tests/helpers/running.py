"""Stages by their command line, in a folder of a test."""

import importlib
import sys
from contextlib import chdir

from click.testing import CliRunner

from tests.helpers.tiny import command_line, small_params, write


def invoke(folder, stage, options=None, **knobs):
    """Run a stage of dvc.yaml in a folder with small knobs; `options` replace its paths."""
    script, arguments = command_line(stage)
    arguments |= options or {}
    write(folder / "params.yaml", small_params(**knobs))
    main = getattr(importlib.import_module(f"stages.{script}"), script)
    words = [word for pair in arguments.items() for word in map(str, pair)]
    path = list(sys.path)
    try:
        with chdir(folder):
            return CliRunner().invoke(main, words, catch_exceptions=False)
    finally:
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
