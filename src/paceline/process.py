"""The process an engine lives in: the threads it computes with do not come along when that process forks."""

from __future__ import annotations

import os

from paceline.errors import PacelineError


class OwnProcess:
    """The one in which this was made."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        if not self.here:
            raise PacelineError("This engine was made before the process forked, and the threads it computes with "
                                "stayed behind: make it in the process that uses it, or start that one by \"spawn\".")
