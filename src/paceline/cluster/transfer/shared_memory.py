"""SharedMemoryTransport: blocks between processes of one machine, in files that live in memory.

Files rather than multiprocessing's segments: those are looked after by a helper of each process that opens one, which
may die with it, or unlink what another still needs. Here a lock says whether the owner of a file lives.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import stat
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from paceline.cluster.transfer.transport import LEASE_S, MOST_BYTES, Leases, Ticket
from paceline.cluster.transfer.wire import digest_of, pack, unpack
from paceline.engine.exchange import PrefixBlocks
from paceline.errors import TransferError

PREFIX = "paceline-blocks-"
UNFINISHED = "paceline-unfinished-"
NAME = re.compile(PREFIX + "[0-9a-f]{32}")
OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Others may write to that folder too: a pipe by the name of a file would keep who opens it waiting."""
STALE_S = 3600.0
"""A file that nobody has finished for so long never will be."""


def memory_folder() -> Path:
    """Where files live in memory; elsewhere where the system has no such place."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


class Written(NamedTuple):
    """A file of blocks, held by its lock."""

    digest: str
    path: Path
    opened: int

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()
        os.close(self.opened)


class Writing:
    """A file that a thread writes for somebody who may not wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: Written | None = None
        self._wanted = True

    def done(self, written: Written) -> Written:
        with self._lock:
            self._written = written
            if not self._wanted:
                written.remove()
        return written

    def drop(self) -> None:
        with self._lock:
            self._wanted = False
            if self._written is not None:
                self._written.remove()


class SharedMemoryTransport:
    """Implements Transport."""

    name = "shared-memory"
    on_device = False

    def __init__(self, folder: Path | None = None, most_bytes: int = MOST_BYTES) -> None:
        self._folder = folder or memory_folder()
        self._leases = Leases(most_bytes)
        self.sweep()

    async def offer(self, blocks: PrefixBlocks, lease_s: float = LEASE_S) -> Ticket:
        parts = pack(blocks)
        size = sum(part.nbytes for part in parts)
        self._leases.check(size)
        writing = Writing()
        try:
            written = await asyncio.to_thread(lambda: writing.done(self._write(parts)))
        except BaseException:  # where the wait is broken off, the thread goes on
            writing.drop()
            raise
        try:
            key = self._leases.begin(size, lease_s, written.remove)
        except TransferError:
            written.remove()
            raise
        return Ticket(self.name, written.path.name, key, size, written.digest, len(blocks.tokens))

    async def fetch(self, ticket: Ticket) -> PrefixBlocks:
        return await asyncio.to_thread(self._read, ticket)

    def withdraw(self, ticket: Ticket) -> None:
        self._leases.end(ticket.key)

    def close(self) -> None:
        self._leases.close()

    def sweep(self) -> None:
        """Remove what processes have left that died with offers: nobody holds their locks any more."""
        for path in [*self._folder.glob(f"{PREFIX}*"), *self._folder.glob(f"{UNFINISHED}*")]:
            with suppress(OSError):
                if path.name.startswith(UNFINISHED) and path.stat().st_mtime > time.time() - STALE_S:
                    continue
                opened = os.open(path, OPEN)
                try:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(opened)

    def _write(self, parts: list[memoryview]) -> Written:
        """In a thread. The file has its name once it is locked and whole."""
        self.sweep()
        name = secrets.token_hex(16)
        made = self._folder / f"{UNFINISHED}{name}"
        try:
            opened = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as problem:
            raise TransferError(f"No file for blocks in {self._folder} ({problem.strerror}).") from None
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            for part in parts:
                left = part.cast("B")
                while left:
                    left = left[os.write(opened, left):]
            path = made.with_name(PREFIX + name)
            made.rename(path)
        except BaseException as problem:
            with suppress(OSError):
                made.unlink()
            os.close(opened)
            if isinstance(problem, OSError):
                raise TransferError(f"{sum(part.nbytes for part in parts)} bytes of blocks do not fit into "
                                    f"{self._folder} ({problem.strerror}): make it larger.") from None
            raise
        return Written(digest_of(parts), path, opened)

    def _read(self, ticket: Ticket) -> PrefixBlocks:
        ticket.check(self.name)
        if not NAME.fullmatch(ticket.address):
            raise TransferError("The ticket names no file of blocks.")
        try:
            opened = os.open(self._folder / ticket.address, OPEN)
        except OSError:
            raise TransferError("The blocks are gone: their lease has ended, or their worker has.") from None
        with os.fdopen(opened, "rb", buffering=0) as file:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_size != ticket.size:
                raise TransferError("The file of blocks is not the one that was announced.")
            received = bytearray(ticket.size)
            view, at = memoryview(received), 0
            while at < ticket.size:
                count = file.readinto(view[at:])
                if not count:
                    raise TransferError("The file of blocks is cut off.")
                at += count
        return unpack(received, ticket.digest)
