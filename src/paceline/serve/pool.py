"""ModelPool: which of several models are loaded, within a limit of memory, and who may use them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from paceline.errors import EngineError, QueueFullError
from paceline.serve.model_threads import ModelThreads, Run

log = logging.getLogger("paceline.serve")
Loaded = TypeVar("Loaded")

RETRY_S = 10.0
"""A model that could not be loaded is not tried again before: whoever keeps asking for it would have others unloaded
each time."""

MAX_QUEUE = 256
"""Requests that wait for one model, unless somebody says otherwise."""

PATIENCE_S = 60.0
"""A model that is to make way, and is in use for so long, lets others in again for as long, and so on in turns: one
slow reader keeps nobody from a model that is loaded, and those who wait for its room have their chances."""

UNLOADED, LOADING, LOADED, UNLOADING, FAILED = "unloaded", "loading", "loaded", "unloading", "failed"
CLOSE_S = 10.0
"""How long a server that leaves waits for models that come or go."""

PRESENT = (LOADING, LOADED, UNLOADING)
"""States in which a model takes memory."""


class LoadError(EngineError):
    """A model could not be loaded. `retry_s`: when it is tried again."""

    def __init__(self, name: str, retry_s: float) -> None:
        super().__init__(f"The model {name!r} could not be loaded; the server's log says why.")
        self.retry_s = retry_s


class PoolClosed(EngineError):
    """The server leaves: nothing is loaded any more."""


class Loader(Protocol[Loaded]):
    """How models come and go. All but alive() are called in threads of their own."""

    def load(self, name: str) -> Loaded: ...

    def unload(self, loaded: Loaded) -> Callable[[], object] | None:
        """Returns a weak reference to what takes its memory, where there is one."""

    def reclaim(self, name: str, left: Callable[[], object] | None) -> None:
        """After unload(), whose result this is, or after a load that failed, when nothing here refers to the model any
        more: have its memory back."""

    def size(self, loaded: Loaded) -> int:
        """Bytes it takes."""

    def alive(self, loaded: Loaded) -> bool:
        """Whether it can serve; one that cannot is loaded anew."""


@dataclass(eq=False)
class Place(Generic[Loaded]):
    """A model of the pool's, loaded or not."""

    name: str
    size: int
    """Bytes it takes; before it was ever loaded, an estimate."""
    state: str = UNLOADED
    loaded: Loaded | None = None
    users: int = 0
    waiters: deque[tuple[int, asyncio.Future[Loaded]]] = field(default_factory=deque)
    """Each with a number by which it is known who came first."""
    used: float = 0.0
    """When somebody last came or went."""
    leaving: float | None = None
    """In use, and to be unloaded for somebody who waits: since when."""
    failed: float | None = None
    """When it could not be loaded; None: it could, or nobody has tried."""
    loads: int = 0
    failures: int = 0

    @property
    def oldest(self) -> float:
        """The number of who has waited for longest."""
        return self.waiters[0][0] if self.waiters else math.inf

    @property
    def shown(self) -> str:
        return FAILED if self.state == UNLOADED and self.failed is not None else self.state


class ModelPool(Generic[Loaded]):
    """Loads models when they are asked for, and unloads those that were not used for longest to make room. A model in
    use is never unloaded. Where its room is wanted by somebody who waits, those who come for it later wait in turn, so
    models that do not fit beside each other take turns. Used from one event loop."""

    def __init__(self, sizes: Iterable[tuple[str, int]], limit: int, loader: Loader[Loaded], *, idle_s: float = 0.0,
                 max_queue: int = MAX_QUEUE, clock: Callable[[], float] = time.monotonic,
                 run: Run | None = None) -> None:
        """`sizes`: every model with the bytes it will take, roughly. `idle_s`: after which a model that nobody uses is
        unloaded; 0: never. `max_queue`: requests that may wait for one model. `run`: does work elsewhere, and says when
        it is done."""
        self._places = {name: Place[Loaded](name, size) for name, size in sizes}
        self._limit = limit
        self._loader = loader
        self._idle_s = idle_s
        self._max_queue = max_queue
        self._clock = clock
        self._threads = ModelThreads()
        self._run = run or self._threads.run
        self._numbers = itertools.count()
        self._leaving: set[Place[Loaded]] = set()
        """In use, and to be unloaded for somebody who waits: no more are let in, as long as patience lasts."""
        self._alarm: asyncio.TimerHandle | None = None
        self._closed = False

    def __iter__(self) -> Iterator[Place[Loaded]]:
        return iter(self._places.values())

    def __getitem__(self, name: str) -> Place[Loaded]:
        return self._places[name]

    @property
    def taken(self) -> int:
        """Bytes that models take now."""
        return sum(place.size for place in self if place.state in PRESENT)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def busy(self) -> bool:
        """Whether a thread is loading or unloading a model."""
        return self._threads.busy

    def put(self, name: str, loaded: Loaded) -> None:
        """One that was loaded before the pool began."""
        place = self._places[name]
        place.state, place.loaded, place.size = LOADED, loaded, self._loader.size(loaded)
        place.loads, place.used = 1, self._clock()

    # ---------------------------------------------------------------- those who use models

    async def acquire(self, name: str) -> Loaded:
        """The model, which stays loaded until release(). Whoever is cancelled while it waits leaves nothing behind."""
        if self._closed:
            raise PoolClosed("The server is shutting down.")
        place = self._places[name]
        if self._welcomes(place) and not place.waiters:
            return self._admit(place)
        if (wait := self._retry_s(place)) > 0:
            raise LoadError(name, wait)
        if len(place.waiters) >= self._max_queue:
            raise QueueFullError(f"{len(place.waiters)} requests wait for the model {name!r} to be loaded, and no more "
                                 "may: try again later, or have the server's operator raise --max-queue.")
        waiter: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        place.waiters.append((next(self._numbers), waiter))
        self._advance()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(name)  # its turn came in the same moment
            else:
                place.waiters = deque(one for one in place.waiters if one[1] is not waiter)
                self._advance()
            raise

    def release(self, name: str) -> None:
        place = self._places[name]
        place.users -= 1
        place.used = self._clock()
        self._advance()

    def refuse_waiters(self) -> None:
        """Whoever waits hears that the server leaves; nobody else is let in."""
        self._closed = True
        for place in self:
            self._refuse(place, PoolClosed("The server is shutting down."))

    def dismiss(self, name: str) -> bool:
        """Unload it if nobody uses it; returns whether it is gone, or about to be."""
        place = self._places[name]
        if place.state == LOADED and self._idle(place) and not self._closed:
            self._unload(place)
        return place.state in (UNLOADED, UNLOADING)

    def expire(self) -> None:
        """Time has passed: unload what nobody has used for `idle_s`, and look whose patience is over."""
        now = self._clock()
        for place in self:
            if self._idle_s and place.state == LOADED and self._idle(place) and now - place.used >= self._idle_s:
                self._unload(place)
        self._advance()

    def close(self, seconds: float = CLOSE_S) -> None:
        """When the event loop has ended. What is being loaded is waited for, but not for longer than `seconds`: then
        `busy` says so."""
        self._closed = True
        self._threads.close(seconds)
        for place in self:
            if self.busy and place.state in (LOADING, UNLOADING):
                log.warning("the server leaves, and the model %s is still %s", place.name, place.state)
        for place in self:
            if place.loaded is not None:
                loaded, place.loaded, place.state = place.loaded, None, UNLOADED
                self._ended(place.name, [loaded])

    def _welcomes(self, place: Place[Loaded]) -> bool:
        return (place.loaded is not None and (place not in self._leaving or not self._patient(place))
                and self._loader.alive(place.loaded))

    def _patient(self, place: Place[Loaded]) -> bool:
        """Whether those who come for one that is leaving have to wait at the moment."""
        return place.leaving is None or (self._clock() - place.leaving) // PATIENCE_S % 2 == 0

    def _admit(self, place: Place[Loaded]) -> Loaded:
        assert place.loaded is not None
        place.users += 1
        place.used = self._clock()
        return place.loaded

    def _admit_waiters(self, place: Place[Loaded]) -> None:
        while place.waiters:
            _, waiter = place.waiters.popleft()
            if not waiter.done():
                waiter.set_result(self._admit(place))

    def _refuse(self, place: Place[Loaded], problem: Exception) -> None:
        while place.waiters:
            _, waiter = place.waiters.popleft()
            if not waiter.done():
                waiter.set_exception(problem)

    def may_serve(self, place: Place[Loaded]) -> bool:
        """Whether it can, or is worth a try."""
        return self._loader.alive(place.loaded) if place.loaded is not None else self._retry_s(place) <= 0

    def _retry_s(self, place: Place[Loaded]) -> float:
        return 0.0 if place.failed is None or place.state != UNLOADED else place.failed + RETRY_S - self._clock()

    @staticmethod
    def _idle(place: Place[Loaded]) -> bool:
        return not place.users and not place.waiters

    # ---------------------------------------------------------------- who is loaded

    def _advance(self) -> None:
        """Something has changed: whoever can be served, is. Those who wait get room in the order in which they came;
        nobody takes what was promised to an earlier one."""
        if self._closed:
            return
        for place in self:
            if place.loaded is not None and not place.users and not self._loader.alive(place.loaded):
                self._unload(place)
        self._trim()
        self._leaving = set()
        promised = 0
        for place in sorted((one for one in self if one.waiters and one.state in (UNLOADED, UNLOADING)),
                            key=lambda one: one.oldest):
            self._make_room(place, promised)
            others = sum(one.size for one in self if one.state in PRESENT and one is not place)
            if place.state == UNLOADED and (not others or others + promised + place.size <= self._limit):
                self._load(place)
            else:
                promised += place.size
        for place in self:
            if place not in self._leaving:
                place.leaving = None
            elif place.leaving is None:
                place.leaving = self._clock()
            if place.waiters and self._welcomes(place):
                self._admit_waiters(place)
        self._set_alarm()

    def _trim(self) -> None:
        """Where models took more than was thought: those that nobody uses go, but for the last."""
        stays = [one for one in self if one.state in (LOADING, LOADED)]
        idle = (one for one in stays if one.state == LOADED and self._idle(one))
        for place in sorted(idle, key=lambda one: one.used):
            if len(stays) == 1 or sum(one.size for one in stays) <= self._limit:
                return
            stays.remove(place)
            self._unload(place)

    def _make_room(self, wanting: Place[Loaded], promised: int) -> None:
        """Unload idle models, those not used for longest first, and after them have busy ones leave, until there is
        room for one that is wanted beside what was promised to others. Where even that is of no use, nobody has to.
        Those for whom somebody has waited for longer stay."""
        stays = [one for one in self if one.state in (LOADING, LOADED) and one not in self._leaving]
        order = sorted((one for one in stays if one.state == LOADED and one.oldest > wanting.oldest),
                       key=lambda one: (one.users > 0, one.used))
        left = sum(one.size for one in stays)
        going: list[Place[Loaded]] = []

        def fits() -> bool:
            return not left + promised or left + promised + wanting.size <= self._limit

        while order and not fits():
            going.append(order.pop(0))
            left -= going[-1].size
        for place in going if fits() else ():
            if place.users:
                self._leaving.add(place)
            else:
                self._unload(place)

    def _load(self, place: Place[Loaded]) -> None:
        place.state, place.failed = LOADING, None
        log.info("loading the model %s", place.name)
        began = self._clock()

        def then(made: Any, problem: BaseException | None) -> None:
            if problem is not None:
                place.state, place.failed, place.failures = UNLOADED, self._clock(), place.failures + 1
                if not isinstance(problem, LoadError):  # of that the log has heard
                    log.error("the model %s could not be loaded", place.name, exc_info=problem)
                self._refuse(place, LoadError(place.name, RETRY_S))
            else:
                place.loaded, place.size = made
                place.state, place.used, place.loads = LOADED, self._clock(), place.loads + 1
                log.info("the model %s is loaded after %.1f s", place.name, place.used - began)
                self._admit_waiters(place)
            self._advance()

        self._run(lambda: self._made(place.name), then)

    def _made(self, name: str) -> tuple[Loaded, int]:
        """A model with the bytes it takes. What is left of one that failed is gone when this raises."""
        if (made := self._attempt(name)) is not None:
            return made
        self._loader.reclaim(name, None)
        raise LoadError(name, RETRY_S)

    def _attempt(self, name: str) -> tuple[Loaded, int] | None:
        """None: it failed, which the log is told. As text: what was raised refers to all that was made by then."""
        try:
            loaded = self._loader.load(name)
            try:
                return loaded, self._loader.size(loaded)
            except BaseException:
                self._loader.unload(loaded)
                raise
        except BaseException:  # native code that panics raises no Exception, and clients wait
            log.error("the model %s could not be loaded:\n%s", name, traceback.format_exc())
            return None

    def _unload(self, place: Place[Loaded]) -> None:
        held, place.loaded, place.state = [place.loaded], None, UNLOADING
        log.info("unloading the model %s", place.name)

        def then(_: Any, problem: BaseException | None) -> None:
            if problem is not None:
                log.error("the model %s was not unloaded in good order", place.name, exc_info=problem)
            if held:  # there was no thread to unload it in: it stays, and is tried again
                place.loaded, place.state = held.pop(), LOADED
                asyncio.get_running_loop().call_later(RETRY_S, self._advance)
                return
            place.state = UNLOADED
            self._advance()

        self._run(lambda: self._loader.reclaim(place.name, self._ended(place.name, held)), then)

    def _ended(self, name: str, held: list[Any]) -> Callable[[], object] | None:
        try:
            return self._loader.unload(held.pop())
        except BaseException:
            log.error("the model %s was not unloaded in good order:\n%s", name, traceback.format_exc())
            return None

    def _set_alarm(self) -> None:
        """Have expire() called when the next model has been idle for long enough, or patience with one ends."""
        now = self._clock()
        waits = [PATIENCE_S - (now - place.leaving) % PATIENCE_S for place in self if place.leaving is not None]
        if self._idle_s:
            waits += [max(0.0, place.used + self._idle_s - now) for place in self
                      if place.state == LOADED and self._idle(place)]
        if not waits or self._closed:
            return
        loop = asyncio.get_running_loop()
        if self._alarm is not None:
            if self._alarm.when() <= loop.time() + min(waits):
                return
            self._alarm.cancel()

        def wake() -> None:
            self._alarm = None
            if not self._closed:
                self.expire()

        self._alarm = loop.call_later(min(waits), wake)
