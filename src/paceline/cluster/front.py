"""ClusterLLM: what answers a server's requests when the engines are elsewhere. Replicas: those, as one worker."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Set
from contextlib import aclosing, suppress
from typing import Any, cast

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from paceline.cluster.calls import Calls, Inbox
from paceline.cluster.features import features
from paceline.cluster.moving import MovingStream
from paceline.cluster.order import Order
from paceline.cluster.reading import FrontModel, Identity, check_identity
from paceline.cluster.worker import Worker, WorkerLost
from paceline.engine.admission import Prepared, check_streamed
from paceline.engine.records.deltas import Delta
from paceline.engine.records.emitter import Emitter
from paceline.engine.records.metrics import RequestMetrics
from paceline.engine.records.record import Record
from paceline.errors import ConfigError, EngineError, NoWorkerError, PacelineError, QueueFullError
from paceline.request import Completion, Request, RequestOutput, SamplingParams, Tenant
from paceline.text_threads import TextThreads, closed

log = logging.getLogger("paceline.cluster")
ROLL_CALL_S = 1.0
ROLL_CALL_ANSWER_S = 10.0
"""Who takes longer to answer the roll call is missing; who is missing twice has no orders of ours any more."""
SILENT_S = 300.0
"""So long such a replica is sent something only where there is no other. If it is still there then, it answers."""
ADMITTED_S = 20.0
"""An order that no replica has taken after so long, and no other order either, is sent anew."""
ADMITTED_AT_MOST_S = 300.0
"""So is one after so long, whatever was taken meanwhile."""
COMING_S = 300.0
"""How long a request that has begun waits for a replica when there is none: Serve may be starting one."""


class Replicas:
    """All replicas that carry out orders: Serve's router chooses among them. Used from one event loop."""

    def __init__(self, handle: DeploymentHandle[Any], model: FrontModel, host: str) -> None:
        """`host`: where replicas find this front."""
        self._model = model
        self.calls = Calls(handle, model.facts.identity, host)
        self.silent: Set[str] = frozenset()
        """Replicas that do not answer the roll call."""

    async def stream(self, order: Order, asked: _ForOne) -> AsyncGenerator[Delta, None]:
        """As Worker.stream(). One whose queue is full is no reason to refuse as long as there is another."""
        full: set[str] = set()
        while True:
            known = len(full)
            try:
                async with aclosing(self._attempt(order, asked, full)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except QueueFullError:
                if asked.here() <= full or len(full) == known:  # or the others take nothing: it was the same again
                    raise

    async def _attempt(self, order: Order, asked: _ForOne, full: set[str]) -> AsyncGenerator[Delta, None]:
        avoid = asked.lost | full | self.silent
        wanted = features(order, self._model.config.block_size, self._model.facts.adapters, avoid)
        call = await self.calls.begin("carry_out", wanted, order)
        try:
            while True:
                news = await (self._taken(call.inbox) if call.inbox.replica is None else call.inbox.next())
                if isinstance(news, Exception):
                    if isinstance(news, WorkerLost | QueueFullError) and wanted.progress.replica is not None:
                        (asked.lost if isinstance(news, WorkerLost) else full).add(wanted.progress.replica)
                    raise news
                if news.samples:
                    wanted.progress.answered = True
                if news.output is not None:
                    wanted.progress.over = True
                yield news
                if news.output is not None:
                    return
        finally:
            if wanted.progress.answered:
                call.end()
            elif (queue_s := await call.farewell()) is not None:
                asked.queue_s = order.age_s + queue_s

    async def _taken(self, inbox: Inbox) -> Any:
        """The first news of an order."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            try:
                return await inbox.next(ADMITTED_S)
            except TimeoutError:
                now = loop.time()
                if self.calls.last_taken < now - ADMITTED_S or now - began >= ADMITTED_AT_MOST_S:
                    return WorkerLost(f"No replica took the order within {now - began:.0f} s.")


class _ForOne:
    """The replicas as a Worker, for one request."""

    name = "replicas"

    def __init__(self, replicas: Replicas, here: Callable[[], Set[str]]) -> None:
        """`here`: the replicas there are."""
        self._replicas = replicas
        self.here = here
        self.lost: set[str] = set()
        """Replicas that were lost over it."""
        self.queue_s: float | None = None
        """Of a request that was given up before its first token: after how long its prompt was computed; None: it was
        not."""

    def stream(self, order: Order) -> AsyncGenerator[Delta, None]:
        return self._replicas.stream(order, self)

    async def cancel(self, request_id: str) -> None:
        """Closing the stream does it."""

    async def report(self) -> dict[str, Any]:
        """Each replica has its own: see ClusterViews."""
        return {}


class ClusterLLM:
    """Offers the server what AsyncLLM does (serve.llm.ServedLLM). A request outlives the replica that has it."""

    def __init__(self, handle: DeploymentHandle[Any], model: FrontModel, host: str = "127.0.0.1",
                 prefill: DeploymentHandle[Any] | None = None) -> None:
        """`handle`: of those that carry out orders. `prefill`: of those that compute prompts for them; orders do not
        go there from here, and what they count is shown."""
        self.engine = model
        self.texts = TextThreads()
        self.on_end: Callable[[Record], None] = lambda record: None
        self.handle = handle
        self.handles = (handle,) if prefill is None else (prefill, handle)
        """Of every deployment there is."""
        self._replicas = Replicas(handle, model, host)
        self._names = itertools.count()
        self._live: dict[int, _LiveStream] = {}
        self._closing = threading.Event()
        self._here: frozenset[str] = frozenset()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._call_roll()
        self._roll_call = threading.Thread(target=self._keep_calling, name="paceline-roll-call", daemon=True)
        self._roll_call.start()

    # ---------------------------------------------------------------- requests

    async def stream(self, prompt: Prepared, params: SamplingParams | None = None, *, speculation: Any = ...,
                     request_id: str | None = None, adapter: str | None = None,
                     tenant: Tenant | None = None) -> MovingStream:
        """As AsyncLLM.stream(): admitted when this returns."""
        check_streamed(prompt.params)
        stream = self._begin(prompt, speculation, request_id, adapter, tenant)
        try:
            await stream.admitted()
        except BaseException:
            stream.close()
            raise
        return stream

    async def complete(self, prompt: Prepared, params: SamplingParams | None = None, *, speculation: Any = ...,
                       request_id: str | None = None, adapter: str | None = None,
                       tenant: Tenant | None = None) -> RequestOutput:
        return await self._begin(prompt, speculation, request_id, adapter, tenant).output()

    def _begin(self, prompt: Prepared, speculation: Any, request_id: str | None, adapter: str | None,
               tenant: Tenant | None) -> _LiveStream:
        if self._closing.is_set():
            raise closed()
        self._loop = asyncio.get_running_loop()
        number = next(self._names)
        order = Order.of(request_id or f"request-{number}", prompt.ids, prompt.params, speculation=speculation,
                         adapter=adapter, tenant=tenant)
        worker = _ForOne(self._replicas, lambda: self._here)

        async def choose(order: Order, lost: Set[str]) -> Worker:
            """Serve's router says which replica; here it is only whether there is any hope for one."""
            await self._any_replica()
            return worker

        stream = _LiveStream(order, choose, lambda: worker.queue_s, lambda ended: self._ended(number, ended))
        self._live[number] = stream
        return stream

    async def _any_replica(self) -> None:
        waited = 0.0
        while not self._here and waited < COMING_S:
            await asyncio.sleep(0.1)
            waited += 0.1
        if not self._here:
            raise NoWorkerError("No replica is healthy: try again later; their logs say why they ended.")

    def _ended(self, number: int, record: Record | None) -> None:
        self._live.pop(number, None)
        if record is None:
            return
        try:
            self.on_end(record)
        except Exception as problem:
            log.error("the end of request %s could not be told", record.request.id, exc_info=problem)

    def cancel_all(self, reason: str = "cancelled") -> None:
        for stream in list(self._live.values()):
            stream.break_off(EngineError("The server is shutting down and ended this request early."))

    # ---------------------------------------------------------------- how it is

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def live_ids(self) -> list[str]:
        return [stream.order.request_id for stream in list(self._live.values())]

    @property
    def alive(self) -> bool:
        """This process can go on; whether anybody is behind it: `outage`."""
        return not self._closing.is_set()

    @property
    def outage(self) -> str | None:
        if self._closing.is_set():
            return "The server is shutting down."
        return None if self._here else "No replica is healthy now: try again later."

    @property
    def replicas(self) -> frozenset[str]:
        """Those that answered the last roll call."""
        return self._here

    def close(self) -> None:
        self._closing.set()
        self.texts.close()
        self._replicas.calls.close()
        self._roll_call.join(5.0)

    # ---------------------------------------------------------------- roll call

    def _keep_calling(self) -> None:
        """In a thread of its own. Who does not answer twice and still has orders of ours, or is to get some, is
        leaving, frozen or lost: Serve takes those that drain off the list first, and waits for them."""
        seen = dict.fromkeys(self._here, time.monotonic())
        before: Set[str] = self._here
        while not self._closing.wait(ROLL_CALL_S):
            self._call_roll()
            now = time.monotonic()
            seen |= dict.fromkeys(self._here, now)
            seen = {name: when for name, when in seen.items() if now - when < SILENT_S}
            silent = seen.keys() - self._here - before
            self._replicas.silent = silent
            for name in silent:
                if self._loop is not None:
                    with suppress(RuntimeError):  # closed
                        self._loop.call_soon_threadsafe(self._replicas.calls.part, name)
            before = self._here

    def _call_roll(self) -> None:
        here = set()
        try:
            for answer in self.handle.broadcast("hello").results(timeout_s=ROLL_CALL_ANSWER_S,
                                                                    return_exceptions=True):
                if not isinstance(answer, BaseException):
                    name, facts = answer
                    if self._fits(name, facts.identity):
                        here.add(name)
        except (RayError, RayServeException, TimeoutError):
            pass
        except Exception as problem:
            log.error("the roll call failed", exc_info=problem)
        self._here = frozenset(here)

    def _fits(self, name: str, identity: Identity) -> bool:
        try:
            check_identity(self.engine.facts.identity, identity)
        except ConfigError as problem:
            log.error("the replica %s is not used. %s", name, problem)
            return False
        return True


class _LiveStream(MovingStream):
    """A request of the server's, and what is to be counted when it ends, however it does."""

    def __init__(self, order: Order, choose: Any, queue_s: Callable[[], float | None],
                 ended: Callable[[Record | None], None]) -> None:
        """`queue_s`: how long it waited, should it end without a token. `ended`: hears of it once; None: it was never
        admitted, and nobody counts it."""
        self.order = order
        self._queue_s = queue_s
        self._when_ended = ended
        self._arrived = time.monotonic()
        self._counted = 0
        self._first_told: float | None = None
        self._over = False
        super().__init__(order, choose)
        self._task.add_done_callback(lambda _: self._end(self._broken("cancelled")))

    def break_off(self, problem: Exception) -> None:
        """Its client hears why."""
        self.close()
        super()._tell(problem)
        self._end(self._broken("cancelled"))

    def _tell(self, news: Delta | Exception) -> None:
        super()._tell(news)
        if isinstance(news, Exception):
            refused = self._first_told is None and not isinstance(news, EngineError)
            self._end(None if refused else self._broken("error", news))
            return
        if self._first_told is None:
            self._first_told = time.monotonic()
        self._counted += sum(len(sample.token_ids) for sample in news.samples)
        if news.output is not None:
            self._end(record_of(self.order, news.output))

    def _broken(self, reason: str, error: Exception | None = None) -> Record:
        """It ended without an output."""
        first, queue_s = self._first_told, self._queue_s()
        scheduled = first if first is not None or queue_s is None else self._arrived + queue_s
        metrics = RequestMetrics(self._arrived, first_scheduled=scheduled, finished=time.monotonic(),
                                 prompt_tokens=len(self.order.prompt), output_tokens=self._counted,
                                 token_times=[] if first is None else [first])
        samples = [Completion(index, finish_reason=reason) for index in range(self.order.params.samples)]
        output = RequestOutput(self.order.request_id, None, list(self.order.prompt), samples, finished=True,
                               seed=self.order.params.seed or 0, metrics=metrics)
        record = record_of(self.order, output)
        record.error = error if isinstance(error, PacelineError) else None
        return record

    def _end(self, record: Record | None) -> None:
        if not self._over:
            self._over = True
            self._when_ended(record)


def record_of(order: Order, output: RequestOutput) -> Record:
    """A request that ended elsewhere, as those who count requests know them."""
    request = Request(order.request_id, list(order.prompt), order.params, order.params.seed or 0,
                      order.params.max_tokens or 0, output.metrics.arrival, prompt_text=output.prompt,
                      tenant=order.tenant)
    record = Record(request, cast("list[Emitter]", output.outputs), output.trace)
    record.metrics, record.speculation, record.error, record.open = output.metrics, output.speculation, output.error, 0
    return record
