"""One tiny run of the pipeline, which all tests here start from."""

import pytest

from tests.helpers.clone import commit, copy_of_working_tree
from tests.helpers.tiny import small_params, write
from tests.pipeline.running import duplicate, dvc


@pytest.fixture(scope="session")
def first(tmp_path_factory):
    """A repository after its first `dvc repro`, committed, and what that printed. Read only."""
    folder = copy_of_working_tree(tmp_path_factory.mktemp("pipeline"))
    write(folder / "params.yaml", small_params())
    commit(folder, "tiny params")
    output = dvc(folder, "repro").stdout
    commit(folder, "first run")
    return folder, output


@pytest.fixture
def copy(first, tmp_path):
    """The repository after its first run, to do with as one likes."""
    return duplicate(first[0], tmp_path / "copy")
