"""Processes below this one: what a Ray of our own consists of. It is not left to Ray alone that none stays behind: one
that is ended while it begins loses sight of some."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def descendants() -> dict[int, str]:
    """By process id: when each began, by which it is known not to be another with the same id. Empty where there is no
    /proc."""
    parents: dict[int, int] = {}
    began: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], began[int(folder.name)] = int(fields[1]), fields[19]
    found: set[int] = set()
    fresh = {os.getpid()}
    while fresh:
        found |= fresh
        fresh = {child for child, parent in parents.items() if parent in found} - found
    return {pid: began[pid] for pid in found if pid != os.getpid()}


def end(family: Mapping[int, str]) -> None:
    """Those that are still there."""
    for pid, began in family.items():
        with suppress(OSError, IndexError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19] == began:
                os.kill(pid, signal.SIGKILL)


@contextmanager
def ends_with_signals() -> Iterator[None]:
    """Whoever is told to leave, leaves at once, and takes its family along: nobody is served yet, or no more."""

    def leave(number: int, frame: FrameType | None) -> None:
        end(descendants())
        sys.stdout.flush()
        os._exit(128 + number)

    before: dict[int, Any] = {number: signal.signal(number, leave) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
