"""AsyncLLM: the engine in a thread of its own, used from any number of coroutines."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

from paceline.config import EngineOptions
from paceline.engine.admission import Prepared, check_streamed
from paceline.engine.build import build_engine
from paceline.engine.core import Engine
from paceline.engine.records.deltas import Delta, DeltaCursor
from paceline.engine.records.record import Record
from paceline.errands import Enquiry, Errand, Question
from paceline.errors import EngineError, PacelineError, RequestError
from paceline.garbage import only_new_objects_are_collected
from paceline.request import RequestOutput, SamplingParams, Tenant
from paceline.text_threads import TextThreads, closed
from paceline.watch.watch import DriftWatch

log = logging.getLogger("paceline.llm")
Prompt = str | list[int] | Prepared
"""A Prepared one has its parameters in it."""
Message = Mapping[str, Any]
Progress = Callable[[str, int, int | None], None]
News = TypeVar("News")
Answer = TypeVar("Answer")
MAX_STEP_MS = 100.0
"""Unless `max_step_ms` is given: who reads a text as it grows notices a gap of more."""
Letter = tuple["Listener[Any]", Any, bool]
"""(to whom, what, whether it is the last)."""


class AsyncLLM:
    """The engine in a thread of its own; requests come and go from any number of coroutines."""

    def __init__(self, model: str | None = None, *, progress: Progress | None = None, engine: Engine | None = None,
                 warm_up: bool = False, **options: Any) -> None:
        """warm_up: Engine.warm_up() before anybody can ask for anything. That runs steps, as later its thread alone
        may."""
        options = {"max_step_ms": MAX_STEP_MS} | options
        self.engine: Engine = engine or build_engine(EngineOptions.of(model=model, **options), progress)
        if warm_up:
            self.engine.warm_up()
        self.watch = DriftWatch.of(self.engine)
        """Where the options ask for it; the engine's thread alone touches it (ask())."""
        self.texts = TextThreads()
        """What a request needs done before the engine hears of it is done there."""
        if self.engine.tokenizer is not None:
            self.engine.tokenizer.check_length("", 0)  # made now and not while somebody waits
        self._inbox: list[Errand] = []
        self._at_hand: deque[Errand] = deque()
        """Taken out of the inbox and not done yet; the engine's thread alone touches it."""
        self._listeners: dict[str, Listener[Any]] = {}
        self._outbox: dict[asyncio.AbstractEventLoop, list[Letter]] = {}
        self._wake = threading.Condition()
        self._closing = False
        self.on_end: Callable[[Record], None] = lambda record: None
        """Called, in the engine's thread, with every request that has ended: served, failed, or left by its client.
        Where it raises, that is logged and nobody's request is harmed."""
        self._thread = threading.Thread(target=self._loop, name="paceline-engine", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- requests

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: Any = ...,
                       request_id: str | None = None, adapter: str | None = None,
                       tenant: Tenant | None = None) -> AsyncIterator[RequestOutput]:
        """Snapshots as the text grows, or one at the end where the request chooses among texts; leaving the loop or
        cancelling the task cancels the request. `tenant`: whose it is; tenants learn nothing of each other's texts."""
        listener = await self._open(_Snapshots(self), prompt, params, speculation, request_id, adapter, tenant)
        try:
            async for snapshot in listener:
                yield snapshot
        finally:
            listener.close()

    async def chat(self, messages: list[Message], params: SamplingParams | None = None, *, speculation: Any = ...,
                   adapter: str | None = None, tenant: Tenant | None = None,
                   **template: Any) -> AsyncIterator[RequestOutput]:
        """Like generate, through the model's chat template."""
        given = {"parse_special": params is not None and params.parse_special,
                 "max_prompt_len": self.engine.config.max_model_len, **template}
        texts = [message.get("content") for message in messages if isinstance(message, Mapping)]
        size = sum(len(text) for text in texts if isinstance(text, str))
        prompt = await self._beside(size, tenant, lambda: self.engine.render(messages, **given))
        async for output in self.generate(prompt, params, speculation=speculation, adapter=adapter, tenant=tenant):
            yield output

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: Any = ...,
                     request_id: str | None = None, adapter: str | None = None,
                     tenant: Tenant | None = None) -> Listener[Delta]:
        """The request is admitted when this returns; iterate over what it returns for what is new, and close() it
        when you leave."""
        check_streamed(prompt.params if isinstance(prompt, Prepared) else params or SamplingParams())
        return await self.deltas(prompt, params, speculation=speculation, request_id=request_id, adapter=adapter,
                                 tenant=tenant)

    async def deltas(self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: Any = ...,
                     request_id: str | None = None, adapter: str | None = None,
                     tenant: Tenant | None = None) -> Listener[Delta]:
        """As stream(), of any request: of one that chooses among texts there is nothing new before its end."""
        return await self._open(_Deltas(self), prompt, params, speculation, request_id, adapter, tenant)

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: Any = ...,
                       request_id: str | None = None, adapter: str | None = None,
                       tenant: Tenant | None = None) -> RequestOutput:
        """The finished output. Nothing is said before: the cheapest way to ask. Cancelling the task cancels the
        request."""
        listener = await self._open(_Result(self), prompt, params, speculation, request_id, adapter, tenant)
        try:
            async for output in listener:
                return output
            raise PacelineError("The engine ended without an answer.")
        finally:
            listener.close()

    async def _open(self, listener: Listener[News], prompt: Prompt, params: SamplingParams | None, speculation: Any,
                    request_id: str | None, adapter: str | None, tenant: Tenant | None) -> Listener[News]:
        """Returns when the engine has admitted the request; raises what it refused it with."""
        def admit(engine: Engine) -> None:
            name = engine.admit(ready, speculation=speculation, request_id=request_id, adapter=adapter, tenant=tenant)
            listener.meet(engine.record(name))
            self._listeners[name] = listener

        try:
            ready = prompt if isinstance(prompt, Prepared) else await self._prepared(prompt, params, tenant)
            await self.ask(admit)
        except BaseException:
            listener.close()
            raise
        return listener

    async def _prepared(self, prompt: str | list[int], params: SamplingParams | None,
                        tenant: Tenant | None) -> Prepared:
        size = len(prompt) if isinstance(prompt, str | list) else 0
        return await self._beside(size, tenant, lambda: self.engine.prepare(prompt, params or SamplingParams()))

    async def _beside(self, characters: int, tenant: Tenant | None, work: Callable[[], Answer]) -> Answer:
        """In a thread for texts, where there are any: a fork leaves them behind, and close() ends them."""
        self._check_open()
        return await self.texts.run(characters, work, tenant.name if tenant else "")

    # ---------------------------------------------------------------- the engine from outside

    async def ask(self, question: Callable[[Engine], Answer]) -> Answer:
        """question(engine), put between two steps, where the engine's state is whole. Keep it short: requests wait."""
        asked = Question(question)
        self._post(asked)
        return await asked.answer

    def cancel_all(self, reason: str = "cancelled") -> None:
        """End every live request soon; each listener hears of it."""

        def cancel(engine: Engine) -> None:
            for name, listener in list(self._listeners.items()):
                engine.cancel(name, reason)
                self._deliver(listener.record)
            self._send()

        self._post(Errand(cancel))

    @property
    def live(self) -> int:
        """Requests that are admitted and have not ended."""
        return len(self._listeners)

    @property
    def live_ids(self) -> list[str]:
        """Their ids."""
        return list(self._listeners)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread can still serve."""
        return not self._closing and self.engine.process.here and self._thread.is_alive()

    @property
    def outage(self) -> str | None:
        """Why nothing can be served now; None: it can."""
        return None if self.alive else "The engine has stopped; the server must be started again."

    def metrics(self) -> dict[str, Any]:
        """What the engine has done since it started and how full it is now; see Engine.report. From any thread: it
        waits for the step that runs. In a coroutine, `await llm.ask(Engine.report)` lets others go on meanwhile."""
        if threading.current_thread() is self._thread:
            return self.engine.report()
        asked = Enquiry(lambda engine: engine.report())
        try:
            self._post(asked)
        except RequestError:  # closed: once the thread has ended nothing changes any more
            self._thread.join()
            return self.engine.report()
        return asked.answer.result()

    def close(self) -> None:
        """Stop the thread; live requests end with finish_reason "cancelled"."""
        if not self.engine.process.here:  # its thread stayed behind
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        self.texts.close()
        self._thread.join()

    # ---------------------------------------------------------------- the engine's thread

    def _post(self, errand: Errand) -> None:
        """Have the engine's thread do something."""
        self.engine.process.check()  # before the lock: a thread of the parent's may have held it at the fork
        with self._wake:
            self._check_open()
            self._inbox.append(errand)
            self._wake.notify()

    def _check_open(self) -> None:
        self.engine.process.check()
        if self._closing:
            raise closed()

    def dismiss(self, listener: Listener[Any]) -> None:
        """Nobody listens any more; the request ends."""
        with suppress(PacelineError):  # closed, or left behind by a fork: all requests have ended
            self._post(Errand(lambda engine: self._drop(listener)))

    def _drop(self, listener: Listener[Any]) -> None:
        """An id may be in use again by now: only the listener's own request is meant."""
        name = listener.name
        if name is not None and self._listeners.get(name) is listener:
            del self._listeners[name]
            self.engine.cancel(name)
            self._tell_end(self.engine.take(name))

    def _loop(self) -> None:
        try:
            with only_new_objects_are_collected():
                self._serve()
        except BaseException as problem:  # native code that panics raises no Exception, and clients wait all the same
            log.error("the engine's thread has ended", exc_info=problem)
            with self._wake:
                self._closing = True
                errands, self._inbox = [*self._at_hand, *self._inbox], []
            error = EngineError("The engine's thread has ended: make a new AsyncLLM.", problem)
            for errand in errands:
                errand.fail(error)
            for listener in self._listeners.values():
                self._mail(listener, error, True)
            self._send()

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not self._inbox and not self._closing and not self.engine.has_work:
                    self._wake.wait()
                self._at_hand.extend(self._inbox)
                self._inbox = []
                closing = self._closing
            while self._at_hand:
                self._at_hand[0].carry_out(self.engine)
                self._at_hand.popleft()
            if closing:
                for name, listener in list(self._listeners.items()):
                    self.engine.cancel(name)
                    self._deliver(listener.record)
                self._send()
                if self.watch is not None:
                    self.watch.stop()
                return
            if self.watch is not None:
                self.watch.make_way()
            for record in self.engine.step():
                self._deliver(record)
            self._send()
            if self.watch is not None:
                self.watch.attend()

    def _deliver(self, record: Record) -> None:
        listener = self._listeners.get(record.request.id)
        if listener is None:
            return
        done = record.open == 0
        if done:
            del self._listeners[record.request.id]
            self._tell_end(self.engine.take(record.request.id))
        news = listener.news(record)
        if news is not None:
            self._mail(listener, news, done)

    def _tell_end(self, record: Record) -> None:
        try:
            self.on_end(record)
        except Exception as problem:
            log.error("the end of request %s could not be told", record.request.id, exc_info=problem)

    def _mail(self, listener: Listener[Any], news: Any, last: bool) -> None:
        self._outbox.setdefault(listener.loop, []).append((listener, news, last))

    def _send(self) -> None:
        """All news of a step go to an event loop in one call: waking it is what costs."""
        if not self._outbox:
            return
        outbox, self._outbox = self._outbox, {}
        for loop, letters in outbox.items():
            try:
                loop.call_soon_threadsafe(_hand_out, letters)
            except RuntimeError:  # that event loop is closed: nobody will ever hear of these requests
                for listener, _, last in letters:
                    if not last:
                        self._drop(listener)


class Listener(Generic[News]):
    """Who waits for a request: made in the coroutine that asks, fed from the engine's thread. An async iterator."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.loop = asyncio.get_running_loop()
        self.name: str | None = None
        """The request's id, once it is admitted."""
        self.record: Record
        self.closed = False
        self._llm = llm
        self._heard: list[News | Exception] = []
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def meet(self, record: Record) -> None:
        """In the engine's thread: the request has been admitted."""
        self.record = record
        self.name = record.request.id

    def news(self, record: Record) -> News | None:
        """In the engine's thread: what to tell after a step that touched the record; None: nothing yet."""
        raise NotImplementedError

    def hear(self, news: News | Exception, last: bool) -> None:
        self._heard.append(news)
        self._ended = last
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Stop listening; a request that still runs is cancelled."""
        if not self.closed:
            self.closed = True
            if not self._ended:
                self._llm.dismiss(self)

    def __aiter__(self) -> Listener[News]:
        return self

    async def __anext__(self) -> News:
        while not self._heard:
            if self._ended:
                raise StopAsyncIteration
            self._waiter = self.loop.create_future()
            await self._waiter
        news = self._heard.pop(0)
        if isinstance(news, Exception):
            raise news
        return news


class _Snapshots(Listener[RequestOutput]):
    def news(self, record: Record) -> RequestOutput | None:
        early = record.open and record.request.params.chosen_at_end
        return None if early else record.snapshot()


class _Deltas(Listener[Delta]):
    def meet(self, record: Record) -> None:
        super().meet(record)
        self._cursor = DeltaCursor(record)

    def news(self, record: Record) -> Delta | None:
        if record.request.params.chosen_at_end:
            return Delta(output=record.snapshot()) if record.open == 0 else None
        return self._cursor.advance()


class _Result(Listener[RequestOutput]):
    def news(self, record: Record) -> RequestOutput | None:
        return record.snapshot() if record.open == 0 else None


def _hand_out(letters: list[Letter]) -> None:
    for listener, news, last in letters:
        listener.hear(news, last)
