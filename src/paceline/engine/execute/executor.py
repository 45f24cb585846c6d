"""Executor: carries steps out, in the order in which they were submitted."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.cache.storage import KVStorage
from paceline.cache.transfers import BlockCopy, SlotMove
from paceline.engine.decide.decision import Decision
from paceline.engine.records.metrics import RepeatTimes
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import Sequence, Status
from paceline.engine.schedule.step import Planned, Step


@dataclass(slots=True)
class Settled:
    """What came of a step."""

    step: Step
    decisions: Seq[Decision]
    """One per group."""
    forward_s: float = 0.0
    """Seconds in which it ran, or in which the host waited for it."""
    sample_s: float = 0.0
    """Seconds in which the host decided."""
    by_itself: bool = True
    """Nothing else was in flight meanwhile, nor was anything captured: the times are what such a step takes."""
    device_s: float | None = None
    """Seconds in which a device ran it, whatever was in flight; None: nobody knows, or something was captured."""
    repeats: RepeatTimes | None = None
    """Of a repeated step."""
    stale: bool = False
    """Everybody in it had ended: nobody looked at what it yielded."""


class StepDropped(BaseException):
    """There was no memory for a step, or for what the cache needs before one: it was not carried out, nor will those
    submitted after it be. Plan anew. Not an Exception: who guards against drafters that fail must not swallow it."""

    def __init__(self, step: Step | None, too_large: bool) -> None:
        """`too_large`: smaller ones may find memory. Else the same rows will be run in another way."""
        super().__init__("no memory for a step" if step is None else f"no memory for a step of {step.rows} rows")
        self.step = step
        self.too_large = too_large


@contextmanager
def dropped_without_memory(step: Step | None) -> Iterator[None]:
    """While nothing that a step yields has been decided: without memory for it, it is dropped."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        raise StepDropped(step, too_large=True) from problem


def bring_into_place(storage: KVStorage, moves: Seq[SlotMove], copies: Seq[BlockCopy]) -> None:
    """Carry out, between steps, what the cache needs before a drafter reads it. Whatever keeps it from that, half of it
    may be done, and nobody else knows of it any more: everybody's cache is lost. torch says in more than one way that
    there is no memory."""
    try:
        storage.apply(moves, copies)
    except Exception as problem:
        raise StepDropped(None, too_large=True) from problem


class Executor(Protocol):
    """What one engine's steps run on. Whatever is settled must be committed before the next call."""

    looks_up: bool
    """Whether drafts that are looked up in a text can be found where the steps run, without the host."""

    goes_on: bool
    """Whether steps run while whoever drives the loop does something else (tells clients what is new): then the next
    one is submitted before that."""

    def make_room(self, seq: Sequence) -> bool:
        """Before a sequence queues: allocate what sampling its tokens takes. False: its tokens are the host's."""

    def start(self) -> None:
        """A pass begins, and all that was settled is committed: before another step is planned, which may use the
        cache, the oldest one runs. Raises StepDropped."""

    @property
    def underway(self) -> bool:
        """Whether all steps that were submitted have begun: what is done to the cache now comes after them."""

    def has_room(self, scheduler: Scheduler) -> bool:
        """Whether another step may be submitted now."""

    def plan(self, scheduler: Scheduler, since_arrival: float) -> Planned | None:
        """How the next step should run; None: there should be none now. `since_arrival`: seconds since the last request
        came."""

    def submit(self, step: Step) -> None:
        """Carry a step out, now or when those before it are settled and committed. Raises StepDropped."""

    @property
    def oldest(self) -> Step | None:
        """The step that is settled next; None: none is in flight."""

    @property
    def stale(self) -> bool:
        """Whether everybody in the oldest step has ended, so that settling it takes no time."""

    def settle(self) -> Settled:
        """What came of the oldest step. Waits for it. Raises StepDropped."""

    def advance(self) -> None:
        """A pass ends, and all that was settled is committed: what a device can do by itself meanwhile goes on. Raises
        StepDropped."""

    def forget(self) -> None:
        """No step in flight is to be settled any more."""


def over(step: Step) -> bool:
    """Whether everybody in a step has ended since it was planned."""
    return all(group.seq.status is Status.FINISHED for group in step.groups)


def nothing(step: Step) -> Settled:
    """What comes of a step that is over."""
    return Settled(step, [Decision([]) for _ in step.groups], by_itself=False, stale=True)
