"""Errands: what others have the engine's thread do between two steps, and how they hear of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from paceline.engine.core import Engine
from paceline.errors import EngineError

log = logging.getLogger("paceline.llm")
Answer = TypeVar("Answer")


class Errand:
    """Something for the engine's thread to do."""

    __slots__ = ("_action",)

    def __init__(self, action: Callable[[Engine], Any]) -> None:
        self._action = action

    def carry_out(self, engine: Engine) -> None:
        self._action(engine)

    def fail(self, problem: Exception) -> None:
        """The thread ends and will not do it."""


def _bearable(problem: BaseException) -> Exception:
    """What a future may hold and a coroutine may get without taking its event loop down."""
    if isinstance(problem, Exception) and not isinstance(problem, StopIteration):
        return problem
    log.error("the engine failed on what it was asked", exc_info=problem)
    return EngineError("The engine failed on this.", problem)


class Enquiry(Errand, Generic[Answer]):
    """Something another thread wants to know from the engine's, and waits for."""

    __slots__ = ("answer",)

    def __init__(self, question: Callable[[Engine], Answer]) -> None:
        super().__init__(question)
        self.answer: Future[Answer] = Future()

    def carry_out(self, engine: Engine) -> None:
        try:
            self.answer.set_result(self._action(engine))
        except BaseException as problem:
            self.fail(_bearable(problem))

    def fail(self, problem: Exception) -> None:
        self.answer.set_exception(problem)


class Question(Errand, Generic[Answer]):
    """Something a coroutine wants to know from the engine's thread, and awaits."""

    __slots__ = ("_loop", "answer")

    def __init__(self, question: Callable[[Engine], Answer]) -> None:
        super().__init__(question)
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Answer] = self._loop.create_future()

    def carry_out(self, engine: Engine) -> None:
        try:
            answer = self._action(engine)
        except BaseException as problem:
            self.fail(_bearable(problem))
        else:
            self._settle(lambda: self.answer.set_result(answer))

    def fail(self, problem: Exception) -> None:
        self._settle(lambda: self.answer.set_exception(problem))

    def _settle(self, settle: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # that event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(lambda: None if self.answer.done() else settle())
