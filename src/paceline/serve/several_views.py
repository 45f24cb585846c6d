"""What operators and the page see of a server with several models: of those that are loaded now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paceline.engine.observe.timeline import Timelines
from paceline.errors import PacelineError
from paceline.measure.process_memory import process_memory
from paceline.serve.keys import Caller
from paceline.serve.metrics import HERE, LABEL, HttpMetrics, Report, ServerMetrics, exposition
from paceline.serve.pool import LOADED, ModelPool
from paceline.serve.snapshot import EngineState
from paceline.serve.together import newest, together
from paceline.serve.views import TraceFound, Views

if TYPE_CHECKING:
    from paceline.serve.calls import Service

Seen = TypeVar("Seen")
WHOLE = ""
"""The name under which the server as a whole reports."""


class SeveralMetrics:
    """Every model's series have its name in the label that all have; those of the server as a whole have none in it."""

    def __init__(self, pool: ModelPool[Service]) -> None:
        self._pool = pool
        self._http = HttpMetrics(WHOLE, CollectorRegistry())
        self._whole = ServerMetrics(WHOLE, self._http)
        self._models = {place.name: ServerMetrics(place.name, self._http) for place in pool}

    def of(self, name: str) -> ServerMetrics:
        return self._models[name]

    @property
    def lag(self) -> Any:
        return self._http.lag

    def responded(self, status: int) -> None:
        self._http.responded(status)
        for metrics in self._models.values():
            metrics.count_ended()

    def expositions(self, reports: Mapping[str, Report]) -> bytes:
        return exposition(self._families(reports))

    def _families(self, reports: Mapping[str, Report]) -> Iterator[Metric]:
        yield from self._http.registry.collect()
        if WHOLE in reports:
            yield from self._whole.memory(reports[WHOLE].memory)
        yield from self._loads()
        for name, metrics in self._models.items():
            report = reports.get(name)
            yield from metrics.families({} if report is None else {HERE: report})

    def _loads(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily("paceline_model_loaded", "Whether the model is loaded.", labels=(LABEL,))
        size = GaugeMetricFamily("paceline_model_bytes", "What it takes when it is loaded, roughly.", labels=(LABEL,))
        waiting = GaugeMetricFamily("paceline_model_waiting", "Requests that wait for it to be loaded.",
                                    labels=(LABEL,))
        loads = CounterMetricFamily("paceline_model_loads", "How often it was loaded.", labels=(LABEL,))
        failures = CounterMetricFamily("paceline_model_load_failures", "How often that failed.", labels=(LABEL,))
        for place in self._pool:
            for family, value in ((loaded, place.state == LOADED), (size, place.size), (waiting, len(place.waiters)),
                                  (loads, place.loads), (failures, place.failures)):
                family.add_metric((place.name,), float(value))
        yield from (loaded, size, waiting, loads, failures)


class SeveralViews:
    def __init__(self, pool: ModelPool[Service]) -> None:
        self._pool = pool
        self.timelines = Timelines()
        """Empty: models keep their own."""
        self.clock: Callable[[], float] = time.monotonic

    async def _ask(self, question: Callable[[Views], Awaitable[Seen]]) -> dict[str, Seen]:
        """Every model's answer; one that is just being unloaded has none."""
        async def ask(name: str, views: Views) -> dict[str, Seen]:
            try:
                return {name: await question(views)}
            except PacelineError:  # closed, or broken: the others answer all the same
                return {}

        found = await asyncio.gather(*(ask(place.name, place.loaded.views) for place in self._pool
                                       if place.loaded is not None))
        return {name: seen for own in found for name, seen in own.items()}

    async def reports(self) -> Mapping[str, Report]:
        """By model; the memory is that of all."""
        reports = {name: own[HERE]._replace(memory=None)
                   for name, own in (await self._ask(lambda views: views.reports())).items()}
        engines: list[Any] = [place.loaded.llm.engine for place in self._pool if place.loaded is not None]
        cache = [tensor for engine in engines for storage in engine.storages for tensor in storage.on_host]
        memory = await asyncio.to_thread(lambda: process_memory(cache))
        return reports | {WHOLE: Report({}, memory)}

    async def state(self) -> EngineState:
        return together(await self._ask(lambda views: views.state()), self.clock())

    async def requests(self, viewer: Caller) -> list[dict[str, Any]]:
        return newest((await self._ask(lambda views: views.requests(viewer))).values())

    async def story(self, request_id: str, viewer: Caller) -> dict[str, Any] | None:
        found = await self._ask(lambda views: views.story(request_id, viewer))
        return next((told for told in found.values() if told is not None), None)

    async def trace(self, request_id: str, viewer: Caller) -> TraceFound | None:
        found = await self._ask(lambda views: views.trace(request_id, viewer))
        return next((told for told in found.values() if told is not None), None)
