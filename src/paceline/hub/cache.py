"""The folder in which fetched models lie, and how processes that share it keep out of each other's way."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""(stage, bytes done, bytes in all). Stages: "wait" (another process fetches), "download", "extract", "verify"."""

_POLL_S = 0.1


def cache_dir() -> Path:
    """Where fetched models live: $PACELINE_CACHE/models, else paceline/models in the user's cache folder."""
    own = os.environ.get("PACELINE_CACHE")
    if own:
        return Path(own).expanduser() / "models"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "paceline" / "models"


def silent(stage: str, done: int, total: int) -> None:
    """The Progress of those who do not ask."""


def folder_bytes(folder: Path) -> int:
    """Of all files below; what vanishes meanwhile counts for nothing."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total


@contextlib.contextmanager
def locked(path: Path, report: Progress = silent) -> Iterator[None]:
    """Hold `path` exclusively; the system lets go of it when the process ends, however it ends."""
    with open(path, "a+b") as file:
        waiting = False
        while not _try_lock(file.fileno()):
            if not waiting:
                report("wait", 0, 0)
                waiting = True
            time.sleep(_POLL_S)
        yield


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            return True
        except OSError:
            return False
else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
