"""adapter_speed: every way is measured in turn, and the requests have the adapters that their row says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import adapter_speed
from engine.tiny import tiny_llm
from paceline import LLM
from paceline.errors import RequestError


def test_requests_without_adapters_with_one_and_with_several(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[LLM] = []
    asked: list[tuple[int, list[str | None]]] = []

    def build(model: str | None, device: str, **options: Any) -> LLM:
        llm = tiny_llm(enable_prefix_caching=False, **options)
        built.append(llm)
        inner, number = llm.generate, len(built)

        def generate(*given: Any, adapter: list[str | None], **more: Any) -> Any:
            asked.append((number, adapter))
            return inner(*given, adapter=adapter, **more)

        monkeypatch.setattr(llm, "generate", generate)
        return llm

    monkeypatch.setattr(adapter_speed, "build", build)
    monkeypatch.setattr(adapter_speed, "prompt_of", lambda length, vocab, salt: [(i * 7 + salt) % 50 for i in range(9)])
    result = adapter_speed.run(concurrency=(1, 3), new_tokens=4, rounds=2, loaded=2)
    assert [row["case"] for row in result["rows"]] == [
        "none named, 1 at once", "one adapter, 1 at once",
        "none named, 3 at once", "one adapter, 3 at once", "2 adapters mixed, 3 at once"]
    assert all(row["paceline"] > 0 and row["peers"]["no adapters"] > 0 for row in result["rows"])
    one, two = "adapter-0", "adapter-1"
    alone = [(1, [None]), (2, [None]), (2, [one])]
    crowd = [(1, [None] * 3), (2, [None] * 3), (2, [one] * 3), (2, [one, two, one])]
    assert asked == 3 * alone + 3 * crowd, "three rounds, of which the first warms up"
    assert built[0].engine.adapters.names == [] and built[1].engine.adapters.names == [one, two]
    first, second = (built[1].engine.adapters.get(name) for name in (one, two))
    assert first is not None and second is not None and first.revision != second.revision
    linears = [linear for linear in built[1].engine.model.linears() if linear.modules[0].name != "lm_head"]  # type: ignore[attr-defined]
    for linear in linears:
        slots = built[1].engine.adapters.slots.get(linear.weight)
        assert slots is not None
        assert slots.host_ranks[first.slot] == slots.host_ranks[second.slot] == 16 * len(linear.modules)


def test_a_request_that_fails_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    monkeypatch.setattr(llm, "generate", lambda *given, **more: [SimpleNamespace(error=RequestError("broken"))])
    with pytest.raises(RequestError, match="broken"):
        adapter_speed.decode_rate(llm, [None], 1, 4)
