"""Ctrl-C and a polite kill: the step that runs ends, a checkpoint is written, then the command."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

SAME = 1.0
"""Seconds within which signals are one wish: `timeout` sends its own to the command and to the group it is in."""


class Interrupted(Exception):
    """Asked to stop; what there is has been saved."""


@dataclass
class Stop:
    raised: bool = False


@contextmanager
def watched() -> Iterator[Stop]:
    """The first signal raises the flag, a later one interrupts at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    first = 0.0

    def on_signal(number: int, frame: Any) -> None:
        nonlocal first
        if not stop.raised:
            stop.raised, first = True, time.monotonic()
        elif time.monotonic() - first > SAME:
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def held_back() -> Iterator[None]:
    """Signals that ask to stop wait until this is over. A process started meanwhile begins with them held back, so that
    none breaks into its first lines."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """In a worker: signals that reach everybody, at a terminal or from `timeout`, are the parent's to answer. A worker
    that died of one in the midst of its kernels took the parent along where processes share a card (CUDA's MPS)."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


ASKING = frozenset({signal.SIGINT, signal.SIGTERM})
