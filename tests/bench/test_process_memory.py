"""What memory consists of: pages of a cache are counted when they are written, and the parts are all there is."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.measure.process_memory import process_memory

MIB = 1 << 20
HUGE = 4 * MIB
"""What the system may give at once: a huge page at either end."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


def test_pages_of_a_cache_count_once_they_are_written() -> None:
    new = mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # of the heap some may have been used before
    reserved = np.frombuffer(new, dtype=np.uint8)
    cache = [torch.from_numpy(reserved[:32 * MIB]), torch.from_numpy(reserved[32 * MIB:])]
    empty = process_memory(cache)
    reserved[16 * MIB:48 * MIB] = 1
    half = process_memory(cache)
    assert empty is not None and half is not None
    assert empty.cache <= HUGE and 32 * MIB <= half.cache <= 32 * MIB + HUGE
    reserved[:] = 1
    full = process_memory(cache)
    assert full is not None and 64 * MIB <= full.cache <= 64 * MIB + 2 * mmap.PAGESIZE


def test_the_parts_are_all_there_is_wherever_the_cache_lies() -> None:
    small = [torch.ones(1000) for _ in range(500)]  # on the heap
    for cache in ([], small, [torch.ones(8 * MIB)]):
        found = process_memory(cache)
        assert found is not None
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        assert abs(found.cache + found.files + found.heap + found.other - resident) < 16 * MIB
        assert found.files > 0 and found.heap >= 0 and found.python_blocks > 10_000


def test_objects_that_are_kept_are_counted() -> None:
    before = process_memory(())
    kept = [[number] for number in range(100_000)]
    after = process_memory(())
    assert before is not None and after is not None and len(kept) == 100_000
    assert after.python_blocks - before.python_blocks > 90_000


def test_where_the_system_does_not_tell_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert process_memory(()) is None


def test_looking_leaves_nothing_behind() -> None:
    """Who looks every second for a leak would find it here."""
    def libraries() -> int:
        return sum(isinstance(one, ctypes.CDLL) for one in gc.get_objects())

    process_memory([torch.ones(1000)])
    before = libraries()
    for _ in range(3):
        process_memory([torch.ones(1000)])
    assert libraries() <= before
