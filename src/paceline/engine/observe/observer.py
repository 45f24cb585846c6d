"""Observers: who wants to see what the engine does, as it does it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from paceline.engine.decide.decision import Decision
from paceline.engine.records.metrics import StepTimes
from paceline.engine.records.record import Record
from paceline.engine.schedule.step import Step

log = logging.getLogger("paceline.engine")


class Observer(Protocol):
    """Called on the engine's thread, between steps: no request makes progress meanwhile. It changes nothing."""

    def admitted(self, record: Record) -> None:
        """A request entered the queue."""

    def stepped(self, step: Step, decisions: Sequence[Decision], started: float, times: StepTimes) -> None:
        """A step is committed, one decision per group. `started`: seconds on the engine's clock."""

    def closed(self, record: Record) -> None:
        """The last sample of a request ended. The step that ended it, if one did, is reported after this."""


class Observers:
    """All observers of an engine; none, most of the time. One that raises is called no more, and the engine goes on."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: list[Observer] = []

    def __bool__(self) -> bool:
        """Whether anybody watches."""
        return bool(self._all)

    def add(self, observer: Observer) -> None:
        self._all.append(observer)

    def admitted(self, record: Record) -> None:
        for observer in tuple(self._all):
            try:
                observer.admitted(record)
            except Exception as problem:
                self._drop(observer, problem)

    def stepped(self, step: Step, decisions: Sequence[Decision], started: float, times: StepTimes) -> None:
        for observer in tuple(self._all):
            try:
                observer.stepped(step, decisions, started, times)
            except Exception as problem:
                self._drop(observer, problem)

    def closed(self, record: Record) -> None:
        for observer in tuple(self._all):
            try:
                observer.closed(record)
            except Exception as problem:
                self._drop(observer, problem)

    def _drop(self, observer: Observer, problem: Exception) -> None:
        log.error("an observer failed and is called no more", exc_info=problem)
        self._all.remove(observer)
