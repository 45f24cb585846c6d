"""Turns: a lock that is handed over in the order in which it was asked for.

Whoever steps an engine takes its lock again at once; with a plain one others might wait for ever.
"""

from __future__ import annotations

import threading
from collections import deque

from paceline.errors import RequestError
from paceline.process import OwnProcess


class Turns:
    """One thread at a time, first come, first served, of one process. Use it in a `with`; it is not to be had twice."""

    def __init__(self) -> None:
        self._process = OwnProcess()
        self._mutex = threading.Lock()
        self._holder: int | None = None
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    @property
    def can_be_mine(self) -> bool:
        """Whether this thread may ask for it: not while it has it, waits for it, or is about to take or to pass it on,
        where the garbage collector may call somebody who would like to know."""
        if not self._process.here or not self._mutex.acquire(blocking=False):
            return False
        try:
            me = threading.get_ident()
            return self._holder != me and all(waits != me for waits, _ in self._waiting)
        finally:
            self._mutex.release()

    def __enter__(self) -> None:
        self._process.check()  # a lock that somebody held when the process forked is never released here
        me = threading.get_ident()
        with self._mutex:
            if self._holder is None:
                self._holder = me
                return
            if self._holder == me:
                raise RequestError("The LLM was called by what it calls itself (interrupt, progress): it is in the "
                                   "middle of a step; ask when the call has returned.")
            called = threading.Lock()
            called.acquire()
            entry = (me, called)
            self._waiting.append(entry)
        try:
            called.acquire()
        except BaseException:  # Ctrl-C: nobody must wait for a thread that has left the queue
            with self._mutex:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                    raise
            self._pass_on()
            raise

    def __exit__(self, *_: object) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        with self._mutex:
            if not self._waiting:
                self._holder = None
                return
            self._holder, called = self._waiting.popleft()
            called.release()
