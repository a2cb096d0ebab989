"""Where the material beside the checkout lies: real rows and peers' numbers, neither committed."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


def needs(path: Path) -> pytest.MarkDecorator:
    """Skip a test, saying so, where a file of the shared folder is absent."""
    return pytest.mark.skipif(not path.exists(), reason=f"{path} is not there")
