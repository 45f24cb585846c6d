"""Places where an engine can be made to fail, and whom that may cost what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any
from unittest.mock import patch

import torch

from paceline.cache.host_storage import HostStorage
from paceline.engine.core import Engine
from paceline.engine.drafting.heads import HeadModel
from paceline.engine.drafting.runner import DraftRunner
from paceline.engine.execute.graphs import in_flight
from paceline.engine.execute.graphs.capture import GraphCapture
from paceline.grammar.library import Library
from paceline.grammar.sequence import SequenceGrammar
from paceline.models.detokenizer import _ByteDetokenizer
from paceline.sampling.state import SampleState
from paceline.speculation.control import AdaptiveController
from paceline.speculation.drafters.auto import AutoDrafter
from paceline.speculation.drafters.lookahead import LookaheadDrafter
from paceline.speculation.drafters.ngram import NgramDrafter
from paceline.speculation.drafters.suffix import SuffixDrafter
from paceline.speculation.model_drafter import ModelDrafter


class Cost(Enum):
    """Who may end with an error. Everybody else says what it says without the fault."""

    NOBODY = "nobody"
    ONE = "the request it is about"
    SOME = "those of a step"


@dataclass(frozen=True)
class Point:
    name: str
    where: Callable[[Engine], tuple[Any, str]]
    """The owner, an object or a class, and the name of its function."""
    cost: Cost
    problem: Callable[[], BaseException] | None = None
    """What it raises; None: it returns None, as where there is nothing to be had."""
    later: bool = False
    """Not the call fails, but a call of what it returns (a graph that is replayed)."""


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("no memory (injected)")


def broken() -> BaseException:
    return RuntimeError("broken (injected)")


def full() -> BaseException:
    return MemoryError("no room (injected)")


def _at(owner: Any, name: str) -> Callable[[Engine], tuple[Any, str]]:
    return lambda engine: (owner, name)


STEPS = [
    Point("forward breaks", lambda engine: (engine.runner, "forward"), Cost.SOME, broken),
    Point("forward without host memory", lambda engine: (engine.runner, "forward"), Cost.SOME, full),
    Point("forward without memory", lambda engine: (engine.runner, "forward"), Cost.NOBODY, out_of_memory),
    Point("moves and copies without memory", lambda engine: (engine.storage, "apply"), Cost.NOBODY, out_of_memory),
    Point("moves and copies break", lambda engine: (engine.storage, "apply"), Cost.SOME, broken),
    Point("layout breaks", lambda engine: (engine.batches, "of_step"), Cost.SOME, full),
    Point("planning breaks", lambda engine: (engine.scheduler, "schedule"), Cost.SOME, full),
    Point("sampling breaks", lambda engine: (engine.decider, "decide"), Cost.SOME, broken),
    Point("commit breaks", lambda engine: (engine.scheduler, "commit"), Cost.SOME, broken),
    Point("a half committed step", lambda engine: (engine.cache, "commit"), Cost.SOME, broken),
    Point("bookkeeping breaks", lambda engine: (engine._bookkeeping, "decided"), Cost.SOME, full),
    Point("counts break", lambda engine: (engine._bookkeeping, "stepped"), Cost.SOME, broken),
]
BLOCKS = [
    Point("no blocks", lambda engine: (engine.cache, "reserve"), Cost.NOBODY),
    Point("blocks break", lambda engine: (engine.cache, "reserve"), Cost.SOME, full),
    Point("no host memory", _at(HostStorage, "__init__"), Cost.NOBODY, full),
    Point("host memory cannot be tried", _at(HostStorage, "measure"), Cost.NOBODY, broken),
    Point("copies to the host without memory", _at(HostStorage, "copy"), Cost.NOBODY, out_of_memory),
    Point("copies to the host break", _at(HostStorage, "copy"), Cost.SOME, broken),
]
DRAFTERS = [
    *(Point(f"{kind.__name__} {name}", _at(kind, name), Cost.NOBODY, broken)
      for kind in (NgramDrafter, SuffixDrafter, LookaheadDrafter, AutoDrafter, ModelDrafter)
      for name in ("begin", "propose", "observe", "release")),
    *(Point(f"controller {name}", _at(AdaptiveController, name), Cost.NOBODY, broken)
      for name in ("drafted", "judge", "learn")),
    Point("a draft model breaks", _at(DraftRunner, "run_rows"), Cost.NOBODY, broken),
    Point("a draft model without memory", _at(DraftRunner, "run_rows"), Cost.NOBODY, out_of_memory),
    Point("a head breaks", _at(HeadModel, "open"), Cost.NOBODY, broken),
    Point("a head without memory", _at(HeadModel, "open"), Cost.NOBODY, out_of_memory),
]
TEXTS = [
    Point("compilation", _at(Library, "compile"), Cost.ONE, broken),
    Point("mask", _at(SequenceGrammar, "mask"), Cost.ONE, broken),
    Point("end of a structure", _at(SequenceGrammar, "closed"), Cost.ONE, broken),
    Point("forced tokens", _at(SequenceGrammar, "forced"), Cost.NOBODY, broken),
    Point("detokenizer", _at(_ByteDetokenizer, "push"), Cost.ONE, broken),
    Point("end of a text", _at(_ByteDetokenizer, "flush"), Cost.ONE, broken),
    Point("counts of a text", _at(SampleState, "append"), Cost.SOME, broken),
]
POINTS = {point.name: point for point in [*STEPS, *BLOCKS, *DRAFTERS, *TEXTS]}


def _graphs(*names: str) -> Callable[[Engine], tuple[Any, str]]:
    """Of an engine whose steps are captured: something in its graphs."""
    def find(engine: Engine) -> tuple[Any, str]:
        owner: Any = engine.executor.graphs  # type: ignore[union-attr]
        for name in names[:-1]:
            owner = getattr(owner, name)
        return owner, names[-1]

    return find


DEVICE = {point.name: point for point in [
    Point("capture without memory", _at(GraphCapture, "capture"), Cost.NOBODY, out_of_memory),
    Point("capture breaks", _at(GraphCapture, "capture"), Cost.SOME, broken),
    Point("replay without memory", _at(GraphCapture, "capture"), Cost.NOBODY, out_of_memory, later=True),
    Point("replay breaks", _at(GraphCapture, "capture"), Cost.SOME, broken, later=True),
    Point("copies to the host without memory", _at(in_flight, "Fetched"), Cost.NOBODY, out_of_memory),
    Point("copies of moves without memory", lambda engine: (engine.storage, "apply"), Cost.NOBODY, out_of_memory),
    Point("seats without memory", _graphs("seats", "seat_all"), Cost.NOBODY, out_of_memory),
    Point("tables without memory", _graphs("seats", "state", "assign"), Cost.NOBODY, out_of_memory),
    Point("controls without memory", _graphs("seats", "prepare"), Cost.NOBODY, out_of_memory),
    Point("samples without memory", _graphs("samples", "ready"), Cost.NOBODY, out_of_memory),
    Point("repeated steps without memory", _graphs("decode", "ready"), Cost.NOBODY, out_of_memory),
    Point("a repeated step without memory", _graphs("decode", "launch"), Cost.NOBODY, out_of_memory),
    Point("a repeated step breaks", _graphs("decode", "launch"), Cost.SOME, broken),
    Point("prompts without memory", _graphs("prefill", "launch"), Cost.NOBODY, out_of_memory),
    Point("drafts without memory", _graphs("verify", "launch"), Cost.NOBODY, out_of_memory),
    Point("a launch without memory", lambda engine: (engine.runner, "forward"), Cost.NOBODY, out_of_memory),
    Point("reading breaks", _at(in_flight, "Fetched"), Cost.SOME, broken),
]}
"""Where steps are captured and replayed."""


class Injected:
    """One fault: the first call of a point from some step boundary on."""

    def __init__(self, point: Point) -> None:
        self._point = point
        self.armed = self.fired = False

    def call(self, real: Callable[..., Any], given: tuple[Any, ...], more: dict[str, Any]) -> Any:
        if self._point.later:
            returned = real(*given, **more)
            return lambda: self.fail() if self.armed and not self.fired else returned()
        if not self.armed or self.fired:
            return real(*given, **more)
        return self.fail()

    def fail(self) -> None:
        self.fired = True
        if self._point.problem is None:
            return None
        raise self._point.problem()


@contextmanager
def injected(point: Point, engine: Engine) -> Iterator[Injected]:
    owner, name = point.where(engine)
    real, fault = getattr(owner, name), Injected(point)

    def faulty(*given: Any, **more: Any) -> Any:
        return fault.call(real, given, more)

    with patch.object(owner, name, faulty):
        yield fault
