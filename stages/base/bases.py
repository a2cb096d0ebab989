"""Which whole model lies below a folder of adapters; stages/models/adapters.py has the rest."""

from collections.abc import Iterable
from pathlib import Path

from stages.base.errors import InputError
from stages.base.trust import object_of

CONFIG = "adapter_config.json"


def base_of(folder: Path) -> Path:
    """The folder of the whole model that adapters are for; a folder of whole weights is its own."""
    if not (folder / CONFIG).is_file():
        return folder
    base = object_of(folder / CONFIG).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise InputError(
            f"{folder / CONFIG}: base_model_name_or_path is {base!r}, expected a folder"
        )
    if not (Path(base) / "config.json").is_file() or (Path(base) / CONFIG).is_file():
        raise InputError(
            f"{folder}: its adapters are for {base}, where no whole model lies; expected one, seen"
            " from the folder of dvc.yaml (`dvc checkout` brings it back)"
        )
    return Path(base)


def with_bases(inputs: Iterable[Path]) -> list[Path]:
    """Sorted inputs of a stage, and the bases of those that are folders of adapters."""
    given = list(inputs)
    return sorted({*given, *map(base_of, given)})
