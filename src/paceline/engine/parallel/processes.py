"""The other ranks as processes: started here or met from other hosts, watched, and ended with their engine."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.config import EngineOptions
from paceline.engine.parallel.calls import Call, Described
from paceline.engine.parallel.meeting import LOOK, START, Meeting, address, meet
from paceline.errors import ConfigError, ParallelError
from paceline.parallel.communicator import Communicator
from paceline.parallel.processes import ProcessRank
from paceline.process import OwnProcess

log = logging.getLogger("paceline.engine")
Said = TypeVar("Said")
LEAVE = 5.0
"""Seconds in which a rank ends that was told to; then it is killed."""
NOTICE = 2.0
"""Seconds in which one that is gone is noticed, after an exchange with it has failed."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank is told first: all that it needs to load its share."""

    options: EngineOptions
    path: str | None
    """Of the model; None: on another host, to be found there by its name."""
    rank: int
    device: str
    dtype: torch.dtype
    exact: bool
    """Shard.exact."""
    threads: int
    meeting: Meeting


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank has started, as this version of Paceline."""

    version: str


@dataclass(frozen=True, slots=True)
class Here:
    """A rank waits for the others."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has loaded its share of the model of this revision."""

    revision: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank ends."""

    reason: str


@dataclass(slots=True)
class _Rank:
    number: int
    wire: Connection
    process: subprocess.Popen[bytes] | None = None
    """None: on another host."""
    ahead: Any = None
    """What it has said before it was asked."""

    def hear(self, patience: float) -> Any:
        """What it says next; its end, and silence, are Failed."""
        if self.ahead is not None:
            came, self.ahead = self.ahead, None
            return came
        try:
            return self.wire.recv() if self.wire.poll(patience) else Failed(
                f"nothing was heard of it in {START:.0f} seconds")
        except (EOFError, OSError):
            return Failed(_ending(self))


class ProcessFollowers:
    """Implements Followers. A rank's end is the end of its wire, on whatever host, and that of rank 0 the end of all
    wires: nobody outlives the other, however it was killed."""

    def __init__(self, options: EngineOptions, path: Path, device: torch.device, dtype: torch.dtype,
                 exact: bool) -> None:
        """They start, or come, and load their shares; wait() until they have. `exact`: Shard.exact."""
        self._size = options.tensor_parallel_size
        self._own = OwnProcess()
        self._why: str | None = None
        self._gone = threading.Event()
        self._closing = False
        self._others: list[_Rank] = []
        self._folder: str | None = None
        self._devices = rank_devices(device, self._size, options.tensor_parallel_address is not None)
        try:
            store, meeting = self._gather(options)
            self._await(Hello, lambda hello: None if hello.version == version() else
                        f"it is Paceline {hello.version}, and rank 0 is {version()}: install the same")
            for other in self._others:
                with suppress(OSError):  # gone already, as is seen below
                    other.wire.send(Work(options, str(path) if other.process is not None else None, other.number,
                                         str(self._devices[other.number]), dtype, exact, torch.get_num_threads(),
                                         meeting))
            self._await(Here)
            self._ranks = self._join(store, meeting)
        except BaseException:
            self.close()
            raise
        self.ranks: Communicator = self._ranks

    def wait(self, revision: str) -> None:
        """Until all of them have loaded their shares of the model of this revision. Raises with the reason of one that
        could not."""
        self._await(Ready, lambda ready: None if ready.revision == revision else
                    "its files are of another model, or another version of it: see that all have the same")
        if self._devices[0].type == "cpu":  # NCCL looks into the file now and then
            self._leave_meeting()
        threading.Thread(target=self._watch, name="paceline-ranks", daemon=True).start()

    def tell(self, call: Call, tensors: Described) -> None:
        if self._why is not None:
            raise ParallelError(self._why)
        packed = pickle.dumps((call, tensors), protocol=pickle.HIGHEST_PROTOCOL)
        for other in self._others:
            other.wire.send_bytes(packed)

    @property
    def gone(self) -> str | None:
        return self._why

    def why(self) -> str | None:
        self._gone.wait(NOTICE)
        return self._why

    @property
    def pids(self) -> list[int]:
        return [other.process.pid for other in self._others if other.process is not None]

    def close(self) -> None:
        if self._closing or not self._own.here:
            return
        self._closing = True
        for other in self._others:
            with suppress(OSError):  # gone already
                other.wire.send(None)
        until = time.monotonic() + LEAVE
        for process in [other.process for other in self._others if other.process is not None]:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._leave_meeting()

    # ---------------------------------------------------------------- start

    def _gather(self, options: EngineOptions) -> tuple[Any, Meeting]:
        stores: Any = dist
        if not dist.is_available():
            raise ConfigError("tensor_parallel_size needs torch.distributed, which this build of torch does not have: "
                              "install another one, or leave it out.")
        if options.tensor_parallel_address is None:
            self._folder = tempfile.mkdtemp(prefix="paceline-ranks-")
            meeting = Meeting(file=os.path.join(self._folder, "meeting"))
            self._others = [_start(number) for number in range(1, self._size)]
            return stores.FileStore(meeting.file, self._size), meeting
        host, port = address(options.tensor_parallel_address)
        self._others = [_Rank(number, wire) for number, wire in enumerate(meet(host, port, self._size), 1)]
        # Bound by hand: torch would listen on every interface.
        listening = socket.create_server((host, 0))
        store = stores.TCPStore(host, listening.getsockname()[1], self._size, True, wait_for_workers=False,
                                master_listen_fd=listening.detach())
        return store, Meeting(host=host, port=store.port)

    def _leave_meeting(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _join(self, store: Any, meeting: Meeting) -> ProcessRank:
        """Beside a look at the wires: one that cannot join is not waited for."""
        joined: Future[ProcessRank] = Future()

        def join() -> None:
            try:
                joined.set_result(ProcessRank(store, 0, self._size, self._devices[0], meeting.host))
            except BaseException as problem:
                joined.set_exception(problem)

        threading.Thread(target=join, name="paceline-join", daemon=True).start()
        while not wait([joined], LOOK).done:
            for other in self._others:
                if other.ahead is None and other.wire.poll(0):
                    other.ahead = other.hear(0)
                    if isinstance(other.ahead, Failed):
                        raise self._not_started(other, other.ahead.reason)
        return joined.result()

    def _not_started(self, other: _Rank, reason: str) -> ParallelError:
        return ParallelError(f"Rank {other.number} of {self._size} (tensor_parallel_size) did not start: {reason}.")

    def _await(self, kind: type[Said], wrong: Callable[[Said], str | None] = lambda said: None) -> None:
        """Something of this kind from each, with which nothing is `wrong`."""
        until = time.monotonic() + START
        for other in self._others:
            came = other.hear(max(0.0, until - time.monotonic()))
            reason = wrong(came) if isinstance(came, kind) else \
                came.reason if isinstance(came, Failed) else f"it said {came!r}"
            if reason is not None:
                raise self._not_started(other, reason)

    def _watch(self) -> None:
        """Until one of them ends, or fails and says why."""
        wires = {other.wire: other for other in self._others}
        for wire in connection.wait(list(wires)):
            other = wires[wire]  # type: ignore[index]
            try:
                came = other.wire.recv()
                reason = came.reason if isinstance(came, Failed) else repr(came)
            except (EOFError, OSError):
                reason = _ending(other)
            if not self._closing:
                self._why = f"Rank {other.number} of {self._size} of this model is gone ({reason}), and the others " \
                            "cannot go on without it: make the engine anew."
                log.error("%s", self._why)
                self._ranks.abort()
            break
        self._gone.set()


def version() -> str:
    with suppress(metadata.PackageNotFoundError):  # run from its sources
        return metadata.version("paceline")
    return "from its sources"


def rank_devices(device: torch.device, size: int, elsewhere: bool) -> list[torch.device]:
    """Each rank's: the processor, or a card of its own, those after rank 0's one after the other. `elsewhere`: other
    ranks have other hosts, and use the same card there."""
    if device.type == "cpu" or elsewhere:
        return [device] * size
    first = device.index or 0
    there = torch.cuda.device_count()
    if first + size > there:
        raise ConfigError(f"tensor_parallel_size={size} needs as many cards from cuda:{first} on, and this machine has "
                          f"{there}: lower it.")
    return [torch.device("cuda", first + rank) for rank in range(size)]


def _start(number: int) -> _Rank:
    """One on this host, at the other end of a wire that nobody else has."""
    here, there = connection.Pipe()
    # What this process would import, and nothing else: -m alone would look into the current folder first.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen([sys.executable, "-m", "paceline.engine.parallel", f"fd:{there.fileno()}"],
                               stdin=subprocess.DEVNULL, pass_fds=[there.fileno()],
                               env=os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"})
    there.close()
    return _Rank(number, here, process)


def _ending(other: _Rank) -> str:
    if other.process is None:
        return "its connection ended"
    try:
        code = other.process.wait(NOTICE)
    except subprocess.TimeoutExpired:
        return "it closed its connection"
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with status {code}"


def check_threads(size: int, device: torch.device, cores: Sequence[int] | None = None) -> None:
    """A word where the ranks of one host would wait for each other's threads."""
    there, each = os.cpu_count() or 1 if cores is None else len(cores), torch.get_num_threads()
    if device.type == "cpu" and size * each > there:
        log.warning("%d ranks with %d threads each share %d cores: %s", size, each, there,
                    f"set OMP_NUM_THREADS={there // size}" if there >= size else "use fewer ranks")
