"""While an engine serves the collector looks at new objects only, and afterwards at all of them again."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from engine.tiny import tiny_llm
from paceline import AsyncLLM, SamplingParams
from paceline.garbage import only_new_objects_are_collected


@pytest.fixture(autouse=True)
def _nobody_else() -> Iterator[None]:
    """The suite leaves out what it has imported, too."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


class Cycle:
    def __init__(self) -> None:
        self.own = self


def test_what_was_there_is_found_when_the_last_one_is_over() -> None:
    garbage = weakref.ref(Cycle())
    with only_new_objects_are_collected():
        assert garbage() is None, "what is garbage already goes before"
        frozen = gc.get_freeze_count()
        assert frozen > 1000
        new = weakref.ref(Cycle())
        with only_new_objects_are_collected():
            pass
        assert gc.get_freeze_count() == frozen, "somebody else still serves"
        gc.collect()
        assert new() is None
    assert gc.get_freeze_count() == 0


def test_an_engine_that_serves_does_so() -> None:
    frozen: list[int] = []

    async def ask() -> None:
        llm = AsyncLLM(engine=tiny_llm().engine)
        try:
            await llm.complete([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
            frozen.append(gc.get_freeze_count())
        finally:
            llm.close()

    asyncio.run(ask())
    assert frozen[0] > 1000 and gc.get_freeze_count() == 0


def test_what_somebody_else_has_left_out_stays_so() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with only_new_objects_are_collected():
        assert gc.get_freeze_count() == before
    assert gc.get_freeze_count() == before
    gc.unfreeze()
