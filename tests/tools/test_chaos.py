"""chaos: what it asks a server answers alike each time, and who was accepted is not counted as refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import ServerThread, write_model

import chaos


def answers(transport: httpx.AsyncBaseTransport | None, url: str, asked: list[dict[str, Any]]) -> list[chaos.Answer]:
    async def main() -> list[chaos.Answer]:
        async with httpx.AsyncClient(transport=transport, timeout=60) as client:
            return list(await asyncio.gather(*(chaos.answer(client, url, body) for body in asked)))

    return asyncio.run(main())


def test_every_kind_is_answered_alike_twice(tmp_path: Path) -> None:
    asked = chaos.bodies([f"{place}: hello" for place in range(len(chaos.KINDS))], 60)
    server = ServerThread(write_model(tmp_path), deterministic=True, speculation=None)
    try:
        first, second = (answers(None, server.url, asked) for _ in range(2))
    finally:
        server.stop()
    assert all(one.same_as(other) for one, other in zip(first, second))
    assert all(0 < one.tokens[1] <= 60 * len(one.texts) and one.tokens[0] > 0 for one in first)
    assert [len(one.texts) for one in first] == [body.get("n", 1) for body in asked]
    called = [one.texts[0] for one, body in zip(first, asked) if "tools" in body]
    assert called and all(text.startswith("look_up{") for text in called)


def replying(status: int, events: list[dict[str, Any]] | None = None, message: str = "") -> httpx.MockTransport:
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events or ()) + "data: [DONE]\n\n"
    return httpx.MockTransport(lambda request: httpx.Response(
        status, text=lines if status == 200 else json.dumps({"error": {"message": message}}),
        headers={"retry-after": "3"}))


def said(text: str, prompt: int = 5, answer: int = 2) -> list[dict[str, Any]]:
    return [{"choices": [{"index": 0, "delta": {"content": text}}]},
            {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": answer}}]


def test_who_was_accepted_is_not_refused() -> None:
    with pytest.raises(chaos.Refused, match="3"):
        answers(replying(503, message="No replica is healthy now: try again later."), "http://a", [{}])
    for later in ("No replica is healthy: try again later; their logs say why they ended.",
                  "12 workers were lost one after the other while they had this request"):
        with pytest.raises(RuntimeError, match="503"):
            answers(replying(503, message=later), "http://a", [{}])


def test_tokens_that_are_counted_twice_are_noticed() -> None:
    calm, twice = (answers(replying(200, said("a", answer=count)), "http://a", [{}])[0] for count in (2, 3))
    assert calm.same_as(chaos.Answer({0: "a"}, (5, 2), moved=4)) and not calm.same_as(twice)
    with pytest.raises(RuntimeError, match="without usage"):
        answers(replying(200, said("a")[:1]), "http://a", [{}])
