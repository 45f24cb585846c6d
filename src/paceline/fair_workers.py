"""FairWorkers: a few threads for work that would hold up the event loop or the engine's; owners take turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

THREADS = 2
IDLE = 5.0
"""Seconds without work after which a thread ends."""


class FairWorkers:
    """Runs one piece of work of each owner after the other. Threads are started when there is work, and end without."""

    def __init__(self, name: str, threads: int = THREADS) -> None:
        """`name`: of the threads."""
        self._name = name
        self._most = threads
        self._alive = self._idle = 0
        self._lines: dict[str, deque[Callable[[], None]]] = {}
        """By owner; who has had a turn goes to the end."""
        self._changed = threading.Condition()

    def submit(self, owner: str, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as problem:  # native code that panics raises no Exception
                future.set_exception(problem)

        with self._changed:
            self._lines.setdefault(owner, deque()).append(run)
            if self._idle:
                self._changed.notify()
            # One that was woken a moment ago still counts as idle: it can take one piece of work, not all of them.
            if sum(map(len, self._lines.values())) > self._idle and self._alive < self._most:
                self._start()
            alone = not self._alive
        while alone and (first := self._take()) is not None:
            first()
        return future

    def _start(self) -> None:
        try:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        except RuntimeError:  # none can be had just now: others do the work, or who asked for it
            return
        self._alive += 1

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            work()
            del work  # whoever waits for the next keeps nothing of this one

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._lines:
                self._idle += 1
                told = self._changed.wait(IDLE)
                self._idle -= 1
                if not told and not self._lines:
                    self._alive -= 1
                    return None
            return self._take()

    def _take(self) -> Callable[[], None] | None:
        """Whose turn it is; None: nobody waits."""
        with self._changed:
            if not self._lines:
                return None
            owner = next(iter(self._lines))
            line = self._lines.pop(owner)
            work = line.popleft()
            if line:
                self._lines[owner] = line
            return work
