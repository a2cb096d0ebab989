"""Fixtures that several modules of tests share."""

import sys

import pytest


@pytest.fixture
def modules_cache(tmp_path, monkeypatch):
    """An empty folder for transformers to keep the code of models in, and nothing imported yet."""
    folder = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
    path = list(sys.path)
    yield folder
    sys.path[:] = path
    forget_code()


def forget_code() -> None:
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=12, help="runs of test_random_kills.py")
