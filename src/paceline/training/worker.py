"""A worker: a process beside training that makes its share of the answers, with an engine of its own.

Making answers keeps one core busy with Python while training keeps the card busy, so they go on side by side. What a
worker makes follows from the jobs' numbers alone: whoever does a job gets the same text.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import sys
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.training.generate import AnswerMaker, Order
from paceline.training.interrupts import leave_to_parent
from paceline.training.jobs import Jobs, encoder
from paceline.training.prompts import Prompt
from paceline.training.shards import Packed, Text, pack, token_dtype

EVERY = 1.0
"""Seconds between two parcels."""


@dataclass(frozen=True)
class Work:
    """The same for all workers: each does the jobs whose number leaves its own as the remainder by `workers`."""

    engine: dict[str, Any]
    """Arguments of its LLM."""
    prompts: list[Prompt]
    seed: int
    temperatures: tuple[float, ...]
    prompt_tokens: int
    new_tokens: int
    first: int
    last: int
    done: np.ndarray
    """Jobs that need not be done again."""
    workers: int
    threads: int
    """Of torch, on the host."""

    def first_of(self, number: int) -> int:
        return self.first + (number - self.first) % self.workers


@dataclass(frozen=True)
class Ready:
    """The engine is there: answers are being made."""


@dataclass(frozen=True)
class Parcel:
    texts: Packed
    left_out: list[int]


@dataclass(frozen=True)
class Failed:
    reason: str


Message = Ready | Parcel | Failed


class Outbox:
    """A keeper that sends texts to the parent, which looks between two of its steps, or after minutes of compiling: a
    thread waits for it, the engine does not."""

    def __init__(self, wire: Connection, stop: threading.Event) -> None:
        self.done: set[int] = set()
        self.dtype = token_dtype(1 << 32)
        self._wire = wire
        self._stop = stop
        self._waiting: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def add(self, texts: list[Text], left_out: list[int]) -> None:
        if texts or left_out:
            self.put(Parcel(pack(texts, self.dtype), left_out))

    def put(self, message: Message) -> None:
        self._waiting.put(message)

    def _send(self) -> None:
        try:
            while (message := self._waiting.get()) is not None:
                self._wire.send(message)
        except OSError:  # there is no parent any more
            self._stop.set()

    def close(self) -> None:
        """When everything is with the parent."""
        self._waiting.put(None)
        self._thread.join()


def work(number: int, wire: Connection) -> None:
    """The whole life of a worker. It ends when its jobs are done, when it is told to, or when the parent is gone."""
    leave_to_parent()
    _be_quiet()
    stop = threading.Event()
    outbox = Outbox(wire, stop)
    try:
        packed = wire.recv_bytes()
    except (EOFError, OSError):  # the parent has gone before it began
        return
    failed = False
    try:
        given: Work = pickle.loads(packed)
        threading.Thread(target=_heed, args=(wire, stop), daemon=True).start()
        _make(given, number, outbox, stop)
    except BaseException as error:
        outbox.put(Failed(_reason(error)))
        failed = True
    outbox.close()
    if failed:
        sys.exit(1)


def _make(given: Work, number: int, outbox: Outbox, stop: threading.Event) -> None:
    torch.set_num_threads(given.threads)
    llm = LLM(**given.engine)
    outbox.done.update(given.done.tolist())
    outbox.dtype = token_dtype(llm.engine.model.config.vocab_size)
    jobs = Jobs(given.prompts, encoder(llm), given.seed, given.temperatures, given.prompt_tokens)
    order = Order(jobs, outbox, given.first_of(number), given.last, stride=given.workers)
    maker = AnswerMaker(llm, [order], given.new_tokens)
    outbox.put(Ready())
    while not maker.finished and not stop.is_set():
        end = time.monotonic() + EVERY
        maker.run(lambda end=end: stop.is_set() or time.monotonic() > end)  # type: ignore[misc]


def _heed(wire: Connection, stop: threading.Event) -> None:
    """Anything that is said means: stop. So does silence for ever."""
    with suppress(EOFError, OSError):
        wire.recv_bytes()
    stop.set()


def _be_quiet() -> None:
    """The terminal is the parent's, which has said already what there is to say about this model; what goes wrong here
    is sent to it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    logging.basicConfig(level=logging.CRITICAL)
    warnings.simplefilter("ignore")


def _reason(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, PacelineError) else f"{type(error).__name__}: {text}"
