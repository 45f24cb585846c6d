"""Views: what operators and the page see of what is served. Of an engine in this process, or of several elsewhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from paceline.async_llm import AsyncLLM
from paceline.engine.observe.timeline import Timelines
from paceline.measure.process_memory import process_memory
from paceline.sampling.trace import Trace
from paceline.serve import metrics, snapshot
from paceline.serve.keys import Caller
from paceline.serve.metrics import HERE, Report
from paceline.serve.snapshot import EngineState
from paceline.serve.stories import Glimpse, copied, glimpses, line, lines, story, told_trace


class TraceFound(NamedTuple):
    """Of a request that is known: its trace as clients get it, or why there is none."""

    text: str | None
    missing: str = ""


class Views(Protocol):
    """Nobody's request waits for these for longer than it takes to copy what is shown."""

    @property
    def timelines(self) -> Timelines:
        """What requests went through, as far as that is known here."""

    @property
    def clock(self) -> Callable[[], float]:
        """Whose seconds they are."""

    async def reports(self) -> Mapping[str, Report]:
        """By engine; HERE where there is but one."""

    async def state(self) -> EngineState: ...

    async def requests(self, viewer: Caller) -> list[dict[str, Any]]:
        """A line for each of the recent ones that the viewer may see, newest first."""

    async def story(self, request_id: str, viewer: Caller) -> dict[str, Any] | None: ...

    async def trace(self, request_id: str, viewer: Caller) -> TraceFound | None: ...


@dataclass(frozen=True)
class EngineViews:
    """Of an engine in this process."""

    llm: AsyncLLM
    timelines: Timelines

    @property
    def clock(self) -> Callable[[], float]:
        return self.llm.engine.clock

    async def reports(self) -> Mapping[str, Report]:
        return {HERE: await self.report()}

    async def report(self) -> Report:
        llm = self.llm
        counted = await llm.ask(lambda engine: metrics.engine_state(engine, llm.watch))
        cache = [tensor for storage in llm.engine.storages for tensor in storage.on_host]
        return Report(counted, await asyncio.to_thread(lambda: process_memory(cache)))

    async def state(self) -> EngineState:
        llm = self.llm
        return await llm.ask(lambda engine: snapshot.engine_state(engine, self.timelines, llm.watch))

    async def requests(self, viewer: Caller) -> list[dict[str, Any]]:
        seen: list[Glimpse] = await self.llm.ask(lambda engine: glimpses(self.timelines, engine, viewer))
        return await asyncio.to_thread(lambda: lines(seen, self.llm.engine.tokenizer))

    async def story(self, request_id: str, viewer: Caller) -> dict[str, Any] | None:
        found = await self.llm.ask(lambda engine: copied(self.timelines, request_id, engine, viewer))
        if found is None:
            return None
        seen, events, dropped = found
        tokenizer = self.llm.engine.tokenizer
        return await asyncio.to_thread(lambda: story(line(seen, tokenizer), events, seen.timeline.arrival, dropped,
                                                     tokenizer, seen.timeline.prompt_end))

    async def trace(self, request_id: str, viewer: Caller) -> TraceFound | None:
        found = await self.llm.ask(lambda _: self.timelines.seen_by(viewer.sees, request_id))
        if not found:
            return None
        recorded: Trace | None = found[0].trace
        if recorded is None:
            wait = "it has not ended yet" if found[0].record is not None else \
                'it was not asked for with "trace": true'
            return TraceFound(None, wait)
        return TraceFound(await asyncio.to_thread(
            lambda: json.dumps(told_trace(recorded), indent=1, allow_nan=False)))
