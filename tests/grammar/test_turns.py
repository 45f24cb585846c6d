"""Structures take turns at being compiled: what nobody waits for is dropped, and nobody's keep others waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grammar.structured import PROMPT, structured_llm
from paceline import SamplingParams
from paceline.errors import QueueFullError
from paceline.grammar.compiler import MOST_EACH, QUICK, SHORT, SLOW, THREADS, Compilation, GrammarCompiler
from paceline.grammar.library import Library
from paceline.grammar.structure import Structure
from paceline.grammar.vocabulary import Vocabulary

BYTES = Vocabulary([bytes([n]) for n in range(256)], lambda text: list(text.encode()))

Make = Callable[..., GrammarCompiler]


class Gates:
    """Structures that begin with "held" are compiled when their gate is opened. Of what other tests have left
    behind nothing is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self._open: dict[str, threading.Event] = {}
        self._all = False
        original = Library.compile

        def gated(library: Library, wanted: Structure) -> Any:
            if wanted.text.startswith(("held", "ready")):
                self.begun.append(wanted.text)
            if wanted.text.startswith("held") and not self._all:
                self._open.setdefault(wanted.text, threading.Event()).wait(60)
            return original(library, wanted)

        monkeypatch.setattr(Library, "compile", gated)

    def open(self, text: str) -> None:
        self._open.setdefault(text, threading.Event()).set()

    def open_all(self) -> None:
        self._all = True
        for event in list(self._open.values()):
            event.set()


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    found = Gates(monkeypatch)
    yield found
    found.open_all()


@pytest.fixture
def compilers(gates: Gates) -> Iterator[Callable[..., GrammarCompiler]]:
    made: list[GrammarCompiler] = []

    def make(**options: Any) -> GrammarCompiler:
        made.append(GrammarCompiler(lambda: BYTES, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0.001)


def regex(text: str) -> Structure:
    return Structure("regex", text)


def begun(*tasks: Compilation) -> bool:
    return all(task._begun is not None for task in tasks)


def test_structures_of_cancelled_requests_keep_nobody_waiting(gates: Gates) -> None:
    """Those that wait are never begun; those that run do not count."""
    engine = structured_llm().engine
    many = [engine.add(PROMPT, SamplingParams(regex=f"held{place}")) for place in range(16)]
    until(lambda: len(gates.begun) == THREADS)
    for request_id in many:
        engine.cancel(request_id)
    quick = engine.add(PROMPT, SamplingParams(regex="ready", max_tokens=20))
    while engine.record(quick).open:
        engine.step()
    assert engine.take(quick).snapshot().outputs[0].text == "ready"
    assert len(gates.begun) == THREADS + 1
    gates.open_all()


def test_a_request_that_is_refused_leaves_nothing_to_compile(gates: Gates) -> None:
    engine = structured_llm(max_queue=1).engine
    first = engine.add(PROMPT, SamplingParams(regex="held"))
    with pytest.raises(QueueFullError):
        engine.add(PROMPT, SamplingParams(regex="ready"))
    engine.cancel(first)
    until(lambda: gates.begun)
    assert gates.begun == ["held"] and not engine.structures.compiler._queue


def test_what_somebody_else_waits_for_too_is_not_dropped(gates: Gates, compilers: Make) -> None:
    compiler = compilers()
    for place in range(THREADS):
        compiler.compile(regex(f"held{place}"), "a")
    shared = compiler.compile(regex("ready"), "a")
    assert compiler.compile(regex("ready"), "b") is shared
    compiler.leave(shared, "a")
    gates.open_all()
    assert shared.future.result(60) is shared.result()


def test_tenants_take_turns(gates: Gates, compilers: Make) -> None:
    compiler = compilers()
    for place in range(5):
        compiler.compile(regex(f"held{place}"), "many")
    until(lambda: len(gates.begun) == THREADS)
    compiler.compile(regex("held of another"), "another")
    gates.open("held0")
    until(lambda: len(gates.begun) > THREADS)
    assert gates.begun[THREADS] == "held of another"


def test_a_tenants_short_structures_go_before_its_long_ones(gates: Gates, compilers: Make) -> None:
    compiler = compilers()
    for place in range(THREADS):
        compiler.compile(regex(f"held{place}"))
    compiler.compile(regex("held" + "x" * SHORT))
    compiler.compile(regex("ready"))
    until(lambda: len(gates.begun) == THREADS)
    gates.open("held0")
    until(lambda: len(gates.begun) > THREADS + 1)
    assert gates.begun[THREADS] == "ready"


def test_quick_ones_are_not_behind_slow_ones_and_nobody_takes_all_threads(gates: Gates, compilers: Make) -> None:
    now = [0.0]
    compiler = compilers(seconds=1000.0, clock=lambda: now[0])
    slow = [compiler.compile(regex(f"held{place}"), "a") for place in range(2 * SLOW)]
    for count in range(THREADS, SLOW):
        until(lambda count=count: begun(*slow[:count]))
        now[0] += 2 * QUICK
        assert not slow[-1].over  # asking gives them their turn
    until(lambda: len(gates.begun) == SLOW - 1)
    now[0] += 2 * QUICK
    assert not slow[-1].over and len(gates.begun) == SLOW - 1, "the last thread is for others"
    other = compiler.compile(regex("ready"), "b")
    assert other.future.result(60) is other.result()


def test_what_is_stuck_is_bounded(gates: Gates, compilers: Make) -> None:
    """Whoever asks for slow ones and leaves, again and again, keeps the threads of its share."""
    compiler = compilers()
    for place in range(3 * MOST_EACH):
        task = compiler.compile(regex(f"held{place}"), "a")
        until(lambda task=task: task._begun is not None or task in compiler._queue)
        if place >= MOST_EACH:
            assert task in compiler._queue
        compiler.leave(task, "a")
    assert len(gates.begun) == MOST_EACH
    other = compiler.compile(regex("ready"), "b")
    assert other.future.result(60) is other.result()


def test_a_structure_for_which_no_thread_can_be_had_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refusals = threading.Thread.start, list[str]()

    def refused(thread: threading.Thread) -> None:
        if thread.name == "paceline-grammar" and len(refusals) < 5:
            refusals.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    found = structured_llm().generate([PROMPT] * 3, [SamplingParams(regex="(x|y){2}z", max_tokens=9)] * 2
                                      + [SamplingParams(max_tokens=3)])
    assert len(refusals) == 5 and all(one.error is None for one in found)
    assert found[0].outputs[0].text[-1] == "z"
