"""tools/disk.py: what it calculates is what is written, and by hand what a formula gives."""

import importlib.util

import pytest

from tests.helpers.tiny import ROOT

spec = importlib.util.spec_from_file_location("disk", ROOT / "tools" / "disk.py")
disk = importlib.util.module_from_spec(spec)
spec.loader.exec_module(disk)

SMALL = disk.llama(300, 64, 192, 2, 4, 2)
OTHERS = 60_000  # tokenizer, config and headers


@pytest.mark.parametrize("way", disk.WAYS, ids=lambda way: way.name)
def test_what_is_calculated_is_what_is_written(way):
    told, written = disk.calculated(SMALL, way), disk.measured(SMALL, way)
    for size, found in zip(told, written, strict=True):
        assert size <= found < size + OTHERS


def test_the_sizes_are_those_of_the_shape():
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64
    weights = 300 * 64 + 2 * layer + 64
    full, rounded, lora, _ = (disk.calculated(SMALL, way) for way in disk.WAYS)
    assert full == (12 * weights, 8 * weights, 4 * weights)
    assert rounded == (6 * weights, 4 * weights, 2 * weights)
    sides = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192)  # of q, o; k, v; gate, up, down
    adapters = 2 * 16 * sides
    assert lora == (12 * adapters, 8 * adapters, 4 * weights)


def test_six_rounds_without_old_moments_keep_those_of_the_last():
    line = disk.line("m", disk.WAYS[0], (12_000_000_000, 8_000_000_000, 4_000_000_000), "measured")
    assert line == "| m | all weights | 12 | 72 | 32 | 12 | measured |"
