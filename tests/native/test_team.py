"""What a team of native threads takes of a machine that others use too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from paceline.kernels import cpu

native = cpu.load()
pytestmark = pytest.mark.skipif(native is None, reason="the native kernels are not built here (no C++ compiler)")


@pytest.fixture
def call() -> Callable[[], None]:
    """A product by two threads, of some microseconds."""
    assert native is not None
    workers, matrix = native.Workers(2), native.Matrix("q8", 512, 512)
    if workers.threads < 2:
        pytest.skip("a single core has no teams")
    x, out = np.ones((1, 512), dtype=np.float32), np.zeros((1, 512), dtype=np.float32)
    return lambda: workers.linear(matrix, x, out)


@pytest.fixture
def confined() -> Iterator[Callable[[], None]]:
    """Puts all threads of this process on one core, for the rest of a test."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("threads cannot be put on a core here")
    before: dict[int, set[int]] = {}

    def confine() -> None:
        core = min(os.sched_getaffinity(0))
        for thread in map(int, os.listdir("/proc/self/task")):
            with suppress(ProcessLookupError):
                before[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, {core})

    yield confine
    for thread, cores in before.items():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)


def seconds_of(work: Callable[[], None], times: int) -> float:
    """Of processor time, a call."""
    begun = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - begun) / times


def test_threads_that_share_a_core_do_not_spin_it_away(call, confined):
    """Where others compute too it may be a core that a thread waits for: waiting must not be what keeps it busy."""
    call()
    confined()
    seconds_of(call, 20)  # how long it pays to spin is learnt
    assert min(seconds_of(call, 20) for _ in range(5)) < 1e-3


def test_threads_without_work_leave_their_cores(call):
    def now_and_then() -> None:
        call()
        time.sleep(0.02)

    seconds_of(now_and_then, 10)  # how long it pays to spin is learnt
    assert min(seconds_of(now_and_then, 5) for _ in range(5)) < 0.002
