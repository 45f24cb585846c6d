"""TextThreads: where texts are read and written beside the event loop and the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from paceline.errors import RequestError
from paceline.fair_workers import FairWorkers

SHORT = 1 << 16
"""Characters: some tens of milliseconds of tokenising. What is longer has threads of its own, so that nobody's short
prompt waits behind somebody else's long ones."""

Done = TypeVar("Done")


class TextThreads:
    """A few threads for templates, tokenising and long answers: however many ask, no more of them run at once, and
    owners take turns."""

    def __init__(self) -> None:
        self._short = FairWorkers("paceline-text")
        self._long = FairWorkers("paceline-long-text")
        self._closed = False

    async def run(self, characters: int, work: Callable[[], Done], owner: str = "") -> Done:
        """work(), which reads or writes about so many characters for that tenant."""
        if self._closed:
            raise closed()
        threads = self._short if characters <= SHORT else self._long
        return await asyncio.wrap_future(threads.submit(owner, work))

    def close(self) -> None:
        """Nothing more is taken; what was taken is done, and its threads end."""
        self._closed = True


def closed() -> RequestError:
    """The error for whoever comes after close()."""
    return RequestError("This AsyncLLM is closed; make a new one.")
