"""Several: the models of one server, each loaded when somebody asks for it."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.async_llm import AsyncLLM
from paceline.engine.observe.timeline import Timelines
from paceline.engine.records.record import Record
from paceline.errors import ConfigError, PacelineError
from paceline.garbage import collect_everything
from paceline.serve.calls import Service
from paceline.serve.house import House, ModelCard
from paceline.serve.options import ServeOptions
from paceline.serve.pool import MAX_QUEUE, ModelPool, Place
from paceline.serve.quotas import Meters
from paceline.serve.several_views import SeveralMetrics, SeveralViews
from paceline.serve.telemetry import Telemetry
from paceline.serve.views import EngineViews

log = logging.getLogger("paceline.serve")
RECLAIM_TRIES, RECLAIM_S = 20, 0.25
"""How often, and how far apart, it is looked whether an unloaded model is gone."""


@dataclass(frozen=True)
class ModelSpec:
    """A model that may be loaded."""

    name: str
    """What clients call it."""
    load: Callable[[], AsyncLLM]
    weights: int
    """Bytes of its files."""
    cache: int
    """Bytes that its cache may take."""
    adapters: tuple[str, ...] = ()
    """What else clients may call it by."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """ServeOptions of its own."""


class PooledLLM:
    """All models of a pool as what a server drains and closes (serve.llm.Serving)."""

    def __init__(self, pool: ModelPool[Service]) -> None:
        self._pool = pool

    @property
    def _llms(self) -> list[Any]:
        return [place.loaded.llm for place in self._pool if place.loaded is not None]

    @property
    def live(self) -> int:
        return sum(llm.live for llm in self._llms)

    @property
    def live_ids(self) -> list[str]:
        return [name for llm in self._llms for name in llm.live_ids]

    @property
    def alive(self) -> bool:
        """Whether any model can serve, or might if it were loaded now."""
        return any(self._pool.may_serve(place) for place in self._pool)

    @property
    def outage(self) -> str | None:
        return None if self.alive else "No model can be loaded; the server's log says why."

    def cancel_all(self, reason: str = "cancelled") -> None:
        for llm in self._llms:
            with suppress(PacelineError):
                llm.cancel_all(reason)

    def close(self) -> None:
        self._pool.close()


class Several(House):
    """The first model is meant where none is named. Also the pool's Loader: a model that is loaded is a Service."""

    def __init__(self, specs: Sequence[ModelSpec], options: ServeOptions, limit: int, *, idle_s: float = 0.0,
                 max_queue: int = MAX_QUEUE, loaded: Mapping[str, AsyncLLM] | None = None,
                 clock: Callable[[], float] = time.monotonic, spans: Any = None) -> None:
        """`limit`: bytes that all who are loaded may take. `max_queue`: requests that may wait for one of them.
        `loaded`: those that are there from the start."""
        self._specs = {spec.name: spec for spec in specs}
        self._owners = names_of(specs)
        self.pool: ModelPool[Service] = ModelPool(
            ((spec.name, spec.weights + spec.cache) for spec in specs), limit, self, idle_s=idle_s,
            max_queue=max_queue, clock=clock)
        self.meters = Meters(clock)
        self._facts: dict[str, ModelCard] = {}
        """Of models that were loaded once."""
        metrics = SeveralMetrics(self.pool)
        self._metrics = metrics
        telemetry = None if spans is None else Telemetry(spans, Timelines(), time.monotonic, options.page)
        super().__init__(PooledLLM(self.pool), SeveralViews(self.pool), options, metrics, telemetry)
        for name, llm in (loaded or {}).items():
            self.pool.put(name, self._service(self._specs[name], llm))

    # ---------------------------------------------------------------- House

    @property
    def cards(self) -> list[ModelCard]:
        return [card for place in self.pool for card in self._cards(place)]

    def _cards(self, place: Place[Service]) -> Iterable[ModelCard]:
        facts = self._facts.get(place.name, ModelCard(place.name, ""))
        own = facts._replace(state=place.shown, size=place.size)
        yield own
        for adapter in self._specs[place.name].adapters:
            yield own._replace(name=adapter, parent=place.name)

    def peek(self, name: str | None = None) -> Service | None:
        return self.pool[self.owner(name)].loaded

    def begin(self) -> None:
        self.pool.expire()  # looks at the clock from now on

    def begin_drain(self) -> None:
        self.pool.refuse_waiters()

    def unnamed(self) -> str:
        """The model that is meant where it does not matter much: one that is loaded, rather than the first."""
        return next((place.name for place in self.pool if place.loaded is not None), self.owner(None))

    def owner(self, name: str | None) -> str:
        """The model that is meant by a name: its own, an adapter's, or none."""
        if not name:
            return next(iter(self._specs))
        return self._owners.get(name) or self.card(name).name  # which refuses it

    # ---------------------------------------------------------------- Loader

    def load(self, name: str) -> Service:
        spec = self._specs[name]
        llm = spec.load()
        try:
            return self._service(spec, llm)
        except BaseException:
            llm.close()
            raise

    def unload(self, loaded: Service) -> Callable[[], object]:
        loaded.llm.close()
        return weakref.ref(loaded.llm.engine)

    def reclaim(self, name: str, left: Callable[[], object] | None) -> None:
        collect_everything()
        for _ in range(RECLAIM_TRIES):  # whoever looked at it a moment ago lets go of it soon
            if left is None or left() is None or self.pool.closed:
                break
            time.sleep(RECLAIM_S)
            collect_everything()
        else:
            log.warning("the model %s is unloaded and something still refers to it: its memory is not free", name)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def size(self, loaded: Service) -> int:
        engine: Any = loaded.llm.engine
        cache: int = sum(storage.bytes for storage in engine.storages)
        return self._specs[loaded.options.model_name].weights + cache

    def alive(self, loaded: Service) -> bool:
        return loaded.llm.alive

    def _service(self, spec: ModelSpec, llm: AsyncLLM) -> Service:
        timelines = Timelines()
        if self.options.page or self.telemetry is not None:
            llm.engine.observers.add(timelines)
        metrics = self._metrics.of(spec.name)
        meters, telemetry = self.meters, self.telemetry

        def ended(record: Record) -> None:
            metrics.ended(record)
            meters.ended(record)
            if telemetry is not None:
                telemetry.ended(record, timelines)

        llm.on_end = ended
        options = replace(self.options, model_name=spec.name, **spec.settings)
        service = Service(llm, EngineViews(llm, timelines), options, metrics, telemetry, house=self)
        self._facts[spec.name] = service.cards[0]
        return service


def names_of(specs: Sequence[ModelSpec]) -> dict[str, str]:
    """The model that each name stands for."""
    found: dict[str, str] = {}
    for spec in specs:
        for name in (spec.name, *spec.adapters):
            if name in found:
                raise ConfigError(f"Two models or adapters are called {name!r}: clients choose by name, so give one of "
                                  "them another model-name in its table [[models]].")
            found[name] = spec.name
    return found
