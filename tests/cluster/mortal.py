"""Workers that die when they are told to, around engines of random weights, and what a client hears meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Set
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from engine.whole import check_at_rest
from grammar.structured import structured_llm
from paceline.async_llm import AsyncLLM
from paceline.cluster.moving import MovingStream
from paceline.cluster.order import Order
from paceline.cluster.worker import LocalWorker, WorkerLost
from paceline.engine.records.deltas import Delta
from paceline.errors import NoWorkerError
from paceline.request import RequestOutput, TokenLogprob

NEVER = 1 << 30
UNBORN = -1
"""Dies before it has admitted the order."""
SILENT = -2
"""Admits the order and dies before it says anything."""


class Mortal:
    """A worker whose next streams break after so many tokens each; then they do not."""

    def __init__(self, inner: LocalWorker) -> None:
        self.inner = inner
        self.orders: list[Order] = []

    @property
    def name(self) -> str:
        return self.inner.name

    async def stream(self, order: Order, dies_after: int = NEVER) -> AsyncGenerator[Delta, None]:
        self.orders.append(order)
        tokens = 0
        if dies_after == UNBORN:
            raise self.die()
        async with aclosing(self.inner.stream(order)) as deltas:
            async for delta in deltas:
                if tokens >= dies_after and (delta.samples or dies_after == 0):
                    raise self.die()
                yield delta
                tokens += sum(len(sample.token_ids) for sample in delta.samples)

    def die(self) -> WorkerLost:
        return WorkerLost(f"{self.name} is gone")

    async def cancel(self, request_id: str) -> None:
        await self.inner.cancel(request_id)

    async def report(self) -> dict[str, Any]:
        return await self.inner.report()


@dataclass
class Doomed:
    """A worker for one order, which will break after so many tokens."""

    worker: Mortal
    dies_after: int

    @property
    def name(self) -> str:
        return self.worker.name

    def stream(self, order: Order) -> AsyncGenerator[Delta, None]:
        return self.worker.stream(order, self.dies_after)

    async def cancel(self, request_id: str) -> None:
        await self.worker.cancel(request_id)

    async def report(self) -> dict[str, Any]:
        return await self.worker.report()


class Crew:
    """Some workers, chosen in turns; each stream breaks after the next of `deaths`, while there are any."""

    def __init__(self, workers: list[Mortal], deaths: list[int]) -> None:
        self._workers = workers
        self._deaths = list(deaths)
        self.chosen: list[str] = []

    async def choose(self, order: Order, lost: Set[str]) -> Doomed:
        if not self._workers:
            raise NoWorkerError("There is no worker: start one.")
        worker = self._workers[len(self.chosen) % len(self._workers)]
        self.chosen.append(worker.name)
        return Doomed(worker, self._deaths.pop(0) if self._deaths else NEVER)


@dataclass
class Heard:
    """What a client has heard of one request, put together."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    ends: dict[int, tuple[str, str | int | None]] = field(default_factory=dict)
    told: dict[tuple[int, int], str] = field(default_factory=dict)
    """Text by sample and number of tokens."""
    output: RequestOutput | None = None

    def add(self, delta: Delta) -> None:
        for sample in delta.samples:
            index = sample.index
            assert index not in self.ends, "a sample goes on after its end"
            self.tokens.setdefault(index, []).extend(sample.token_ids)
            self.texts[index] = self.texts.get(index, "") + sample.text
            self.logprobs.setdefault(index, []).extend(sample.logprobs or ())
            assert sample.logprobs is None or len(sample.logprobs) == len(sample.token_ids)
            if sample.finish_reason is not None:
                self.ends[index] = sample.finish_reason, sample.stop_reason
            self.told[index, len(self.tokens[index])] = self.texts[index]
        assert self.output is None
        self.output = delta.output

    def check_same(self, calm: Heard) -> None:
        """It heard what the other did, whatever came between."""
        assert self.tokens == calm.tokens
        assert self.texts == calm.texts
        assert self.logprobs == calm.logprobs
        assert self.ends == calm.ends
        for place, text in self.told.items():
            assert calm.told.get(place, text) == text, "what is told after some tokens depends on who said them"
        ours, theirs = self.output, calm.output
        assert ours is not None and theirs is not None
        assert ours.outputs == theirs.outputs
        assert (ours.request_id, ours.seed, ours.error) == (theirs.request_id, theirs.seed, theirs.error)
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert ours.prompt_logprobs == theirs.prompt_logprobs
        assert ours.metrics.output_tokens == theirs.metrics.output_tokens == sum(map(len, self.tokens.values()))
        assert ours.metrics.prompt_tokens == theirs.metrics.prompt_tokens
        assert len(ours.metrics.token_times) == len(self.tokens.get(0, ()))
        assert ours.metrics.token_times == sorted(ours.metrics.token_times)
        if ours.speculation is not None:
            assert len(ours.speculation.provenance) == len(self.tokens[0])


def mortal(name: str, engine: Any = None, **options: Any) -> Mortal:
    """With `engine`, or one of random weights and a trained tokenizer."""
    return Mortal(LocalWorker(AsyncLLM(engine=engine or structured_llm(**options).engine), name))


async def hear(stream: MovingStream) -> Heard:
    heard = Heard()
    async for delta in stream:
        heard.add(delta)
    return heard


def follow(order: Order, workers: list[Mortal], deaths: list[int]) -> tuple[Heard, Crew]:
    """One order from beginning to end, while workers die."""
    crew = Crew(workers, deaths)

    async def main() -> Heard:
        return await hear(MovingStream(order, crew.choose))

    return asyncio.run(main()), crew


async def check_nothing_runs(workers: list[Mortal]) -> None:
    """Soon nobody's request is left on any of them, and all blocks are free."""
    for worker in workers:
        llm = worker.inner._llm
        while llm.live or (await llm.ask(lambda engine: engine.has_work)):
            await asyncio.sleep(0.001)
        await llm.ask(check_at_rest)
        assert not worker.inner._live
