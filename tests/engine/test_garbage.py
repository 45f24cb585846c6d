"""While an engine serves the collector looks at new objects only, and afterwards at all of them again."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.tiny import tiny_llm
from paceline import AsyncLLM, SamplingParams
from paceline.garbage import RARELY, Serving, only_new_objects_are_collected


@pytest.fixture(autouse=True)
def _nobody_else() -> Iterator[None]:
    """The suite leaves out what it has imported, and engines of other tests may serve."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


class Cycle:
    def __init__(self) -> None:
        self.own = self


def found(cycle: Cycle) -> bool:
    return any(each is cycle for each in gc.get_objects())


def test_what_was_there_is_found_when_the_last_one_is_over() -> None:
    serving, garbage = Serving(), weakref.ref(Cycle())
    with only_new_objects_are_collected(serving):
        assert garbage() is None, "what is garbage already goes before"
        assert gc.get_freeze_count() > 1000
        new = weakref.ref(Cycle())
        with only_new_objects_are_collected(serving):
            pass
        assert gc.get_freeze_count() > 1000, "somebody else still serves"
        gc.collect()
        assert new() is None
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_has_left_out_stays_so() -> None:
    gc.freeze()
    new = Cycle()  # would be left out by another freeze; others' threads may drop what is left out, so counts say less
    with only_new_objects_are_collected(Serving()):
        assert found(new) and gc.get_freeze_count() > 1000
    assert found(new) and gc.get_freeze_count() > 1000
    gc.unfreeze()


def test_what_python_itself_leaves_out_keeps_nobody_from_leaving_out_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)  # 3.12, at its start
    frozen: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("frozen"))
    monkeypatch.setattr(gc, "unfreeze", lambda: frozen.append("found again"))
    with only_new_objects_are_collected(Serving()):
        assert frozen == ["frozen"]
    assert frozen == ["frozen", "found again"]


def test_full_collections_are_rare_as_long_as_somebody_serves() -> None:
    serving, usual = Serving(), gc.get_threshold()
    with only_new_objects_are_collected(serving):
        assert gc.get_threshold() == (*usual[:2], RARELY)
        with only_new_objects_are_collected(serving):
            pass
        assert gc.get_threshold() == (*usual[:2], RARELY)
    assert gc.get_threshold() == usual


def test_an_engine_that_serves_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def noted() -> Iterator[None]:
        told.append("begun")
        yield
        told.append("over")

    async def ask() -> None:
        llm = AsyncLLM(engine=tiny_llm().engine)
        try:
            await llm.complete([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
            assert told == ["begun"]
        finally:
            llm.close()

    monkeypatch.setattr("paceline.async_llm.only_new_objects_are_collected", noted)
    asyncio.run(ask())
    assert told == ["begun", "over"]
