"""ModelThreads: models come and go in threads, beside the event loop that serves."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

log = logging.getLogger("paceline.serve")
Then = Callable[[Any, BaseException | None], None]
"""What becomes of work that was done elsewhere: its result, or what it raised."""
Run = Callable[[Callable[[], Any], Then], None]


class ModelThreads:
    """Work in threads of their own, for it may take minutes; what becomes of it is told in the event loop."""

    def __init__(self) -> None:
        self._running: set[threading.Thread] = set()
        self._untold: list[tuple[Then, Any, BaseException | None]] = []
        self._lock = threading.Lock()

    def run(self, work: Callable[[], Any], then: Then) -> None:
        loop = asyncio.get_running_loop()

        def do() -> None:
            result, problem = None, None
            try:
                result = work()
            except BaseException as raised:  # native code that panics raises no Exception, and clients wait
                problem = raised
            with self._lock:
                self._untold.append((then, result, problem))
            with suppress(RuntimeError):  # the loop has ended: close() tells
                loop.call_soon_threadsafe(self._tell)

        thread = threading.Thread(target=do, name="paceline-models", daemon=True)
        try:
            thread.start()
        except RuntimeError as problem:  # none can be had just now
            loop.call_soon(then, None, problem)
            return
        self._running = {one for one in self._running if one.is_alive()} | {thread}

    def _tell(self) -> None:
        with self._lock:
            told, self._untold = self._untold, []
        for then, result, problem in told:
            try:
                then(result, problem)
            except Exception:
                log.exception("what became of a model could not be told")

    @property
    def busy(self) -> bool:
        return any(thread.is_alive() for thread in self._running)

    def close(self, seconds: float) -> None:
        """Wait for what runs, though not for ever, and tell what nobody has heard of."""
        end = time.monotonic() + seconds
        for thread in self._running:
            thread.join(max(0.0, end - time.monotonic()))
        self._tell()
