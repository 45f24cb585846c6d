"""MovingStream: one request as its client sees it, whatever happens to the workers that carry it out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Set
from contextlib import aclosing
from dataclasses import replace

from paceline.cluster.order import Order
from paceline.cluster.story import Story
from paceline.cluster.worker import Worker, WorkerLost
from paceline.engine.records.deltas import Delta
from paceline.errors import NoWorkerError, PacelineError
from paceline.request import RequestOutput

log = logging.getLogger("paceline.cluster")

Choose = Callable[[Order, Set[str]], Awaitable[Worker]]
"""(what is to be done, names of workers that were lost over it) -> who does it. Waits for a worker as long as there is
hope for one, then raises NoWorkerError. One that was lost may be chosen again: it may have come back."""

ATTEMPTS = 12
"""Workers that may be lost one after another while they had the request, without a single new token: then it may be the
request that ends them. Not fewer: with many at once most wait in a worker's queue, and whatever ended it was not
they."""
PATIENCE_S = 300.0
"""So long a request goes from one worker to the next where none takes it."""
GRACE_S = 1.0
"""A worker that has not ended a request so long after its deadline is not waited for."""
PAUSE_S = 0.1
"""Before the second attempt that brings nothing, and twice as long before each further one, up to LONGEST_PAUSE_S."""
LONGEST_PAUSE_S = 3.0


class MovingStream:
    """An async iterator over what is new of a request: no gap, nothing twice. Made in the coroutine that asks.

    It keeps what has been said. Where a worker is lost the next one is sent the same order with that in it, so it has
    to be computed again and not to be chosen again: noise is keyed by seed and position.
    """

    def __init__(self, order: Order, choose: Choose, *, attempts: int = ATTEMPTS,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._first = order
        self._choose = choose
        self._attempts = attempts
        self._clock = clock
        self._story = Story(order, clock)
        self._lost: set[str] = set()
        self._heard: list[Delta | Exception] = []
        self._ended = False
        self._taken = False
        """By the worker of the present attempt."""
        self._admitted = asyncio.Event()
        self._waiter: asyncio.Future[None] | None = None
        self._task = asyncio.ensure_future(self._run())

    @property
    def moves(self) -> int:
        """How many workers it has lost."""
        return self._story.moves

    async def admitted(self) -> None:
        """Returns when a worker has accepted the request; raises what it was refused with."""
        await self._admitted.wait()
        if self._heard and isinstance(self._heard[0], Exception):
            raise self._heard[0]

    async def output(self) -> RequestOutput:
        """What it comes to, for those who do not listen meanwhile. Being cancelled ends the request."""
        try:
            async for delta in self:
                if delta.output is not None:
                    return delta.output
            raise PacelineError("The request was closed before its end.")
        finally:
            self.close()

    def close(self) -> None:
        """Stop listening; wherever the request runs it is cancelled soon."""
        self._task.cancel()
        self._hush()  # a task that is cancelled before it begins says nothing

    async def aclose(self) -> None:
        """As close(), and returns when the worker has been told."""
        self.close()
        await asyncio.wait([self._task])

    def __aiter__(self) -> MovingStream:
        return self

    async def __anext__(self) -> Delta:
        while not self._heard:
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        news = self._heard.pop(0)
        if isinstance(news, Exception):
            raise news
        return news

    def _tell(self, news: Delta | Exception) -> None:
        self._heard.append(news)
        self._admitted.set()
        self._wake()

    def _hush(self) -> None:
        """There is nothing more to hear."""
        self._ended = True
        self._admitted.set()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---------------------------------------------------------------- the workers

    async def _run(self) -> None:
        """Beside the client: what it does not read waits for it."""
        try:
            await self._carry_out()
        except Exception as problem:
            self._tell(problem)
        finally:
            self._hush()

    async def _carry_out(self) -> None:
        lost = fruitless = 0
        since = self._clock()
        while True:
            said, self._taken = self._story.tokens, False
            problem = await self._attempt(self._story.order())
            if problem is None:
                return
            if self._story.tokens != said:
                lost, fruitless, since = 0, 0, self._clock()
            else:
                lost, fruitless = lost + self._taken, fruitless + 1
            if lost >= self._attempts or self._clock() - since > PATIENCE_S:
                raise NoWorkerError(f"{fruitless} workers were lost one after the other while they had this request: "
                                    "try it again later; the workers' logs say why they ended.") from problem
            log.info("request %s goes on with another worker: %s", self._first.request_id, problem)
            if fruitless > 1:
                await asyncio.sleep(min(PAUSE_S * 2 ** (fruitless - 2), LONGEST_PAUSE_S))

    async def _attempt(self, order: Order) -> WorkerLost | None:
        """Have one worker carry the order out; why it has to go elsewhere, or None: it is over."""
        loop, story = asyncio.get_running_loop(), self._story
        limit = asyncio.timeout(order.left_s)
        worker: Worker | None = None
        try:
            async with limit:
                worker = await self._choose(order, self._lost)
                if order.left_s is not None:  # the worker knows of the deadline too, and says best how far it came
                    limit.reschedule(max(limit.when() or 0.0, loop.time()) + GRACE_S)
                order = replace(order, age_s=story.age_s)  # there may have been nobody for a while
                async with aclosing(worker.stream(order)) as deltas:
                    async for delta in deltas:
                        self._taken = True
                        self._admitted.set()
                        if delta.samples or delta.output is not None:
                            self._tell(story.told(delta))
                        if delta.output is not None:
                            return None
                raise WorkerLost(f"The worker {worker.name!r} ended a stream without its end.")
        except WorkerLost as problem:
            if worker is not None:
                self._lost.add(worker.name)
            story.moves += 1
            return problem
        except TimeoutError:
            if not limit.expired():
                raise
            self._tell(story.expired())
            return None
