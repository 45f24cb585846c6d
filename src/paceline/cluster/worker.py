"""Worker: who carries out orders; LocalWorker: an engine in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from paceline.async_llm import AsyncLLM, Listener
from paceline.cluster.order import Order
from paceline.engine.admission import Prepared
from paceline.engine.core import Engine
from paceline.engine.records.deltas import Delta
from paceline.engine.records.record import Record
from paceline.errors import EngineError, PacelineError, RequestError
from paceline.sampling.state import GREEDY_BELOW
from paceline.so_far import Moved, Past

LEFT = "cancelled"
"""How an engine ends requests that nobody cancelled: it is about to leave."""


class WorkerLost(EngineError):
    """The worker cannot go on with an order, whoever's fault that is: its process is gone, the connection broke, or it
    is leaving. The order may be sent to another one. Whatever else a worker raises is the request's own error."""


class Worker(Protocol):
    """Carries out orders. In this process, or a stand-in for one elsewhere."""

    @property
    def name(self) -> str: ...

    def stream(self, order: Order) -> AsyncGenerator[Delta, None]:
        """What is new of an order, and nothing that it has said already. The first Delta is empty: the order has been
        admitted; the last one has the whole output. Leaving the iterator (aclose) ends the request."""

    async def cancel(self, request_id: str) -> None:
        """End the request of an order (Order.request_id), if it is there."""

    async def report(self) -> dict[str, Any]:
        """As Engine.report()."""


class LocalWorker:
    """An engine in this process, as a worker."""

    def __init__(self, llm: AsyncLLM, name: str = "local") -> None:
        self._llm = llm
        self._name = name
        self._live: dict[str, Listener[Delta]] = {}
        """By Order.request_id."""
        self._opening: dict[str, Order] = {}
        """Orders that are not yet admitted, and that nobody has cancelled meanwhile."""
        self.draining = False
        """It takes no more orders."""

    @property
    def name(self) -> str:
        return self._name

    async def stream(self, order: Order) -> AsyncGenerator[Delta, None]:
        try:
            listener = await self._open(order)
            try:
                yield Delta()
                async for delta in listener:
                    if delta.output is not None and any(one.finish_reason == LEFT for one in delta.output.outputs):
                        raise self._lost("is leaving")
                    if delta.output is not None and delta.output.error is not None and not self._llm.alive:
                        raise self._lost("has stopped") from delta.output.error  # a rank of its model is gone
                    yield self._told(delta, order, listener)
            finally:
                self._close(order.request_id, listener)
        except WorkerLost:
            raise
        except PacelineError as problem:
            if not self._llm.alive:  # whatever it said about the order
                raise self._lost("has stopped") from problem
            raise

    async def cancel(self, request_id: str) -> None:
        self._opening.pop(request_id, None)
        listener = self._live.get(request_id)
        if listener is not None:
            self._close(request_id, listener)
            listener.hear(cancelled(), True)

    async def report(self) -> dict[str, Any]:
        return await self._llm.ask(Engine.report)

    def queue_s(self, request_id: str) -> float | None:
        """How long a request waited until it was computed; None: it waits still, or is not here."""
        listener = self._live.get(request_id)
        return None if listener is None else listener.record.metrics.queue_time

    def leave(self) -> None:
        """Give up all orders now: whoever sent them hears WorkerLost, and sends them elsewhere."""
        self.draining = True
        with suppress(PacelineError):  # closed: they have been given up
            self._llm.cancel_all(LEFT)

    async def _open(self, order: Order) -> Listener[Delta]:
        if self.draining:
            raise self._lost("is leaving")
        self._opening[order.request_id] = order
        try:
            listener = await self._admitted(order)
            wanted = self._opening.get(order.request_id) is order
        finally:
            if self._opening.get(order.request_id) is order:
                del self._opening[order.request_id]
        if not wanted or self.draining:
            listener.close()
            raise self._lost("is leaving") if wanted else cancelled()
        self._live[order.request_id] = listener
        return listener

    async def _admitted(self, order: Order) -> Listener[Delta]:
        llm = self._llm
        past = Past(order.so_far, llm.engine.clock() - order.age_s, accepted=order.moves > 0)

        def prepare() -> Prepared:
            return llm.engine.prepare(list(order.prompt), order.params, past=past)

        size = len(order.prompt) + sum(len(one.token_ids) for one in order.so_far)
        prepared = await llm.texts.run(size, prepare, order.tenant.name)
        return await llm.deltas(prepared, speculation=order.speculation, request_id=order.name, adapter=order.adapter,
                                tenant=order.tenant)

    def _close(self, request_id: str, listener: Listener[Delta]) -> None:
        if self._live.get(request_id) is listener:
            del self._live[request_id]
        listener.close()

    def _told(self, delta: Delta, order: Order, listener: Listener[Delta]) -> Delta:
        """The whole output bears the name that the client knows, and says what moving did to the text."""
        delta.exact = self._llm.engine.kernels.deterministic and follows_noise(listener.record)
        if delta.output is None or not order.moves:
            return delta
        moved = Moved(order.moves, exact=delta.exact)
        return replace(delta, output=replace(delta.output, request_id=order.request_id, moved=moved))

    def _lost(self, why: str) -> WorkerLost:
        return WorkerLost(f"The worker {self._name!r} {why}.")


def cancelled() -> RequestError:
    return RequestError("This request was cancelled.")


def follows_noise(record: Record) -> bool:
    """Whether its text is a function of seed and positions alone, wherever drafts began."""
    stats = record.speculation
    if stats is None or stats.rule == "coupled":
        return True
    return record.request.params.temperature < GREEDY_BELOW and not stats.lossy
