"""Workers as the parent sees them: started, asked what they have made, lost, told to stop."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from paceline.training.interrupts import held_back
from paceline.training.shards import Text, unpack
from paceline.training.worker import Failed, Message, Parcel, Ready, Work, work

PATIENCE = 5.0
"""Seconds that workers have for sending what they made when they are told to stop."""


@dataclass
class Came:
    """What the workers sent since they were last asked."""

    texts: list[Text] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Of each worker that ended before its work did: which, and why."""


@dataclass
class _Worker:
    number: int
    process: SpawnProcess
    wire: Connection
    ready: bool = False
    reason: str | None = None
    """It failed, and says why."""


class Workers:
    """There is no thread here that could take time from training: what workers send waits with them until `take`."""

    def __init__(self, given: Work) -> None:
        """They start, and load their engines while the caller goes on."""
        self.stopped = False
        self._given = given
        self._since: float | None = None
        self._until = 0.0
        self._left: list[_Worker] = []
        self._leaving: list[_Worker] = []
        """They have sent their last, and give back what they hold: on a card that takes a second."""
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # which would let the signals through again if it had to be started below
        with held_back():
            for number in range(given.workers):
                here, there = context.Pipe()
                process = context.Process(target=work, args=(number, there), daemon=True,
                                          name=f"paceline-train-{number}")
                process.start()
                there.close()  # so that the end of the process is the end of the wire
                self._left.append(_Worker(number, process, here))
        # A wire takes so many prompts only as fast as they are read, which is seconds from now.
        self._handing = threading.Thread(target=self._hand_out, args=(list(self._left),), daemon=True)
        self._handing.start()

    def _hand_out(self, workers: list[_Worker]) -> None:
        packed = pickle.dumps(self._given)
        for worker in workers:
            try:
                worker.wire.send_bytes(packed)
            except OSError:  # that one is gone, as `take` will see
                continue

    @property
    def alive(self) -> bool:
        """Is there one that has not ended?"""
        return bool(self._left or self._leaving)

    @property
    def seconds(self) -> float:
        """By the clock: since the first was ready, until the last had ended."""
        if self._since is None:
            return 0.0
        return (time.monotonic() if self.alive else self._until) - self._since

    def take(self, wait: float = 0.0) -> Came:
        """What has come; where nothing has, after `wait` seconds at most."""
        came = Came()
        wires: dict[Any, _Worker] = {worker.wire: worker for worker in self._left}
        ends = [worker.process.sentinel for worker in self._leaving]
        for ready in connection.wait([*wires, *ends], wait):
            if ready in wires:
                self._read(wires[ready], came)
        for worker in [one for one in self._leaving if one.process.exitcode is not None]:
            self._bury(worker, came)
        return came

    def _read(self, worker: _Worker, came: Came) -> None:
        try:
            while worker.wire.poll():
                message: Message = worker.wire.recv()
                if isinstance(message, Parcel):
                    came.texts += unpack(message.texts)
                    came.left_out += message.left_out
                elif isinstance(message, Ready):
                    worker.ready, self._since = True, self._since or time.monotonic()
                elif isinstance(message, Failed):
                    worker.reason = message.reason
        except (EOFError, OSError):
            worker.wire.close()
            self._left.remove(worker)
            self._leaving.append(worker)

    def _bury(self, worker: _Worker, came: Came) -> None:
        code = worker.process.exitcode
        if code != 0 and not self.stopped:
            came.lost.append(f"worker {worker.number + 1} of {self._given.workers} "
                             f"{'is lost' if worker.ready else 'could not start'}: {worker.reason or _ending(code)}")
        self._leaving.remove(worker)
        self._until = time.monotonic()

    def stop(self) -> None:
        """They send what they have made, and end. Those that have not begun end at once."""
        if self.stopped:
            return
        self.stopped = True
        for worker in self._left:
            if not worker.ready:
                worker.process.kill()
        self._handing.join(PATIENCE)  # nothing may be said on a wire while the work is handed out on it
        for worker in self._left:
            try:
                if worker.ready:
                    worker.wire.send_bytes(b"stop")
            except OSError:  # it has ended
                continue

    def close(self) -> None:
        """They are gone when this returns."""
        self.stopped = True
        for worker in self._left + self._leaving:
            worker.process.kill()
        self._handing.join(PATIENCE)
        for worker in self._left + self._leaving:
            worker.process.join(PATIENCE)
            worker.wire.close()
        self._left, self._leaving = [], []


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"it ended with status {code}"
    return f"it was ended by {signal.Signals(-code).name}"
