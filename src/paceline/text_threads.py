"""TextThreads: where texts are read and written beside the event loop and the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from paceline.errors import RequestError

SHORT = 1 << 16
"""Characters: some tens of milliseconds of tokenising. What is longer has threads of its own, so that nobody's short
prompt waits behind somebody else's long ones."""
THREADS = 2

Done = TypeVar("Done")


class TextThreads:
    """A few threads for templates, tokenising and long answers: however many ask, no more of them run at once."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(THREADS, thread_name_prefix="paceline-text")
        self._long = ThreadPoolExecutor(THREADS, thread_name_prefix="paceline-long-text")

    async def run(self, characters: int, work: Callable[[], Done]) -> Done:
        """work(), which reads or writes about so many characters."""
        threads = self._short if characters <= SHORT else self._long
        try:
            begun = threads.submit(work)
        except RuntimeError:  # closed a moment ago
            raise closed() from None
        return await asyncio.wrap_future(begun)

    def close(self) -> None:
        """Nothing more is taken; what was taken is done, and its threads end."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False)


def closed() -> RequestError:
    """The error for whoever comes after close()."""
    return RequestError("This AsyncLLM is closed; make a new one.")
