"""While requests are served the collector looks at new objects only, and afterwards at all of them again."""

from __future__ import annotations

import gc
import weakref

from engine.tiny import tiny_llm
from paceline import SamplingParams
from paceline.garbage import only_new_objects_are_collected


class Cycle:
    def __init__(self) -> None:
        self.own = self


def test_what_was_there_is_found_when_it_is_over() -> None:
    old = Cycle()
    seen = weakref.ref(old)
    with only_new_objects_are_collected():
        new = weakref.ref(Cycle())
        del old
        gc.collect()
        assert new() is None and seen() is not None
    gc.collect()
    assert seen() is None


def test_requests_are_served_so(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    llm = tiny_llm()
    frozen: list[int] = []
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: frozen.append(gc.get_freeze_count()) or step())
    before = gc.get_freeze_count()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert min(frozen) > before + 1000 and gc.get_freeze_count() <= before
