"""Where the ranks of one model find each other: on this host by a file, on several at an address, with a token."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import torch.distributed as dist

from paceline.errors import ConfigError, ParallelError

log = logging.getLogger("paceline.engine")
START = 600.0
"""Seconds in which a rank has to be there: a large model may lie on a slow disk."""
LOOK = 0.1
"""Seconds between two looks, where there is more than one thing to wait for."""
TOKEN_VARIABLE = "PACELINE_RANKS_TOKEN"
"""What ranks on other hosts have to know."""
EVERYWHERE = ("0.0.0.0", "::", "*")
"""Can be listened at, but who goes there finds itself."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks find each other: a file on this host, or an address."""

    file: str | None = None
    host: str = "127.0.0.1"
    port: int = 0

    def store(self, size: int) -> Any:
        """For ranks other than rank 0."""
        stores: Any = dist
        if self.file is not None:
            return stores.FileStore(self.file, size)
        return stores.TCPStore(self.host, self.port, size, False)


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"tensor_parallel_address must be HOST:PORT, got {text!r}.")
    host = host.strip("[]")
    if host in EVERYWHERE:
        raise ConfigError(f"tensor_parallel_address is where the other ranks go, and {host} is nowhere: name the "
                          "address of rank 0's host in the network between them.")
    return host, int(port)


def token() -> bytes:
    found = os.environ.get(TOKEN_VARIABLE, "")
    if len(found) < 16:
        raise ConfigError(f"Ranks on several hosts need a secret of at least 16 characters in {TOKEN_VARIABLE}, the "
                          "same on each: whoever knows it can run code as these processes.")
    return found.encode()


def meet(host: str, port: int, size: int, patience: float = START) -> list[Connection]:
    """Wires to those from other hosts, as they come. Whoever else calls, or calls and says nothing, keeps nobody
    waiting: each is heard beside the others, and nothing is read of it but the proof that it knows the token."""
    secret, until = token(), time.monotonic() + patience
    coming: list[_Caller] = []
    try:
        listening = socket.create_server((host, port))
    except OSError as problem:
        raise ConfigError(f"Cannot wait for other ranks at {host}:{port} ({problem.strerror}): choose another "
                          "tensor_parallel_address.") from problem
    log.info("waiting for %d ranks at %s:%d", size - 1, host, port)
    try:
        with listening:
            listening.settimeout(LOOK)
            while sum(caller.known for caller in coming) < size - 1 and time.monotonic() < until:
                with suppress(TimeoutError):
                    coming.append(_Caller(listening.accept()[0], secret))
                for caller in [caller for caller in coming if caller.refused]:
                    coming.remove(caller)
                    caller.hang_up()
        found = [caller for caller in coming if caller.known][:size - 1]
        if len(found) < size - 1:
            raise ParallelError(f"Of {size - 1} other ranks {len(found)} came to {host}:{port} in {patience:.0f} "
                                "seconds: start the others (docs/cluster.md).")
        coming = [caller for caller in coming if caller not in found]
        return [caller.taken() for caller in found]
    finally:
        for caller in coming:
            caller.hang_up()


class _Caller:
    """Somebody who has called, and may or may not know the token."""

    def __init__(self, end: socket.socket, secret: bytes) -> None:
        self._end = end
        self._wire = Connection(os.dup(end.fileno()))
        self._proven: Future[bool] = Future()
        threading.Thread(target=self._ask, args=(secret,), name="paceline-caller", daemon=True).start()

    def _ask(self, secret: bytes) -> None:
        try:
            deliver_challenge(self._wire, secret)
            answer_challenge(self._wire, secret)
            self._proven.set_result(True)
        except Exception as problem:  # whatever a stranger may send
            if isinstance(problem, AuthenticationError):
                log.warning("somebody who does not know the ranks' token tried to join")
            self._proven.set_result(False)

    @property
    def known(self) -> bool:
        return self._proven.done() and self._proven.result()

    @property
    def refused(self) -> bool:
        return self._proven.done() and not self._proven.result()

    def taken(self) -> Connection:
        self._end.close()
        return self._wire

    def hang_up(self) -> None:
        """Who reads from the wire hears of its end."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        wait([self._proven], LOOK)
        self._end.close()
        self._wire.close()
