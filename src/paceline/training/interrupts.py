"""Ctrl-C and a polite kill: the step that runs ends, a checkpoint is written, then the command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Stop:
    raised: bool = False


@contextmanager
def watched() -> Iterator[Stop]:
    """The first signal raises the flag, a second one interrupts at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(number: int, frame: Any) -> None:
        if stop.raised:
            raise KeyboardInterrupt
        stop.raised = True

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
