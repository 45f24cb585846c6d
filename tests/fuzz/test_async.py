"""AsyncLLM under random tasks that listen, leave and are cancelled: who stays hears what it hears alone."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from typing import Any

import pytest

from engine.whole import check_at_rest, check_nobody_is_remembered
from fuzz.mixes import Ask, Said, alone, llm_of, mix
from paceline.async_llm import AsyncLLM

FEW, MANY = (1, 2), range(3, 203)
KINDS = ("native", "native", "llama", "stepped")
WAIT = 120.0
"""Generous: the machine may be busy."""


async def served(llm: AsyncLLM, kind: str, ask: Ask, luck: random.Random, name: str) -> None:
    """One client, in one of the ways to ask; some leave after some news."""
    given: dict[str, Any] = {"speculation": ask.wish, "adapter": ask.adapter, "tenant": ask.tenant, "request_id": name}
    way = luck.choice(["complete", "generate"] + ["stream"] * (not ask.sampling.chosen_at_end))
    news = luck.randint(0, 6) if luck.random() < 0.3 else None
    await asyncio.sleep(luck.random() * 0.05)
    want = alone(kind, ask, kind != "stepped")
    if way == "complete":
        out = await llm.complete(ask.prompt, ask.sampling, **given)
        assert Said.of(out, kind != "stepped") == want
    elif way == "generate":
        snapshots = []
        async for snapshot in llm.generate(ask.prompt, ask.sampling, **given):
            snapshots.append(snapshot)
            if len(snapshots) == news:
                return
        assert Said.of(snapshots[-1], kind != "stepped") == want
    else:
        texts = [""] * ask.sampling.n
        listener = await llm.stream(ask.prompt, ask.sampling, **given)
        try:
            heard = 0
            async for delta in listener:
                for sample in delta.samples:
                    texts[sample.index] += sample.text
                heard += 1
                if heard == news:
                    return
            assert texts == [text for _, text, *_ in want.samples]
        finally:
            listener.close()


async def all_served(llm: AsyncLLM, kind: str, asks: list[Ask], seed: int) -> list[str]:
    luck = random.Random(seed)
    names = [f"async-{seed}-{id(llm)}-{place}" for place in range(len(asks))]
    tasks = [asyncio.create_task(served(llm, kind, ask, random.Random(f"{seed} {place}"), names[place]))
             for place, ask in enumerate(asks)]
    for task in tasks:
        if luck.random() < 0.25:
            asyncio.get_running_loop().call_later(luck.random() * 0.3, task.cancel)
    for outcome in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT):
        if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
    return names


def check(seed: int) -> None:
    drawn = mix(seed, KINDS, most=9)
    asks = [replace(ask, params={name: value for name, value in ask.params.items() if name != "timeout_s"}, leaves=None)
            for ask in drawn.asks]
    for ask in asks:
        alone(drawn.kind, ask)
    before = threading.active_count()
    llm = AsyncLLM(engine=llm_of(drawn.kind, asks, **drawn.options).engine)
    try:
        names = asyncio.run(all_served(llm, drawn.kind, asks, seed))
        asyncio.run(llm.ask(lambda engine: None))  # behind all who have left
        assert llm.live == 0 and not llm._outbox
    finally:
        llm.close()
    assert threading.active_count() <= before + 2, "grammars may still be compiled, the engine's thread has ended"
    check_at_rest(llm.engine)
    check_nobody_is_remembered(llm.engine, set(names))


@pytest.mark.parametrize("seed", FEW)
def test_who_stays_hears_what_it_hears_alone(seed: int) -> None:
    check(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", MANY)
def test_who_stays_hears_what_it_hears_alone_many_times(seed: int) -> None:
    check(seed)
