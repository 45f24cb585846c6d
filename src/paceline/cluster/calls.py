"""Calls: what is asked of a deployment's replicas, each by a call of Ray Serve's that takes as long as it is under way;
what comes of it arrives by mail. Nothing here imports Ray."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import Any

from paceline.cluster.mail import Address, Farewell, Letter, MailRoom
from paceline.cluster.order import Order
from paceline.cluster.reading import Identity
from paceline.cluster.routing import Features, Progress
from paceline.cluster.worker import WorkerLost
from paceline.engine.records.deltas import Delta

LETTERS_S = 10.0
"""A call that has ended: how long its last letter may take."""

FAREWELL_S = 0.5
"""So long who gives an order up waits to hear whether anything was computed of it."""


class Calls:
    """To the replicas of one deployment: Serve's router chooses among them. Used from one event loop."""

    def __init__(self, handle: Any, identity: Identity, host: str) -> None:
        """`handle`: Serve's, of the deployment. `host`: where its replicas find this process."""
        self._handle = handle
        self._identity = identity
        self._host = host
        self._keys = itertools.count()
        self._inboxes: dict[int, Inbox] = {}
        self.last_taken = -math.inf
        """When any replica took an order, on the event loop's clock: with a thousand at once the last of them waits
        its turn."""
        self._room = MailRoom(self._deliver, self.lost)
        self._address: asyncio.Future[Address] | None = None

    async def begin(self, what: str, wanted: Features, order: Order, *more: Any) -> Call:
        """Have a replica do `what`, a method of its. Whoever begins a call ends it."""
        if self._address is None:
            self._address = asyncio.ensure_future(self._room.open(self._host))
        address = await asyncio.shield(self._address)  # whoever asked first may leave meanwhile
        key, inbox = next(self._keys), Inbox(wanted.progress)
        self._inboxes[key] = inbox
        response = getattr(self._handle, what).remote(wanted, order, address, key, self._identity, *more)
        return Call(wanted, inbox, response, lambda: self._give_up(key, inbox, response),
                    lambda: self._inboxes.pop(key, None))

    def _give_up(self, key: int, inbox: Inbox, response: Any) -> None:
        if key not in self._inboxes:
            return
        if inbox.replica is None:
            response.cancel()  # also where somebody else has it by now: who wakes up late is not to begin
        elif not inbox.ended:
            self._room.cancel(inbox.replica, key)

    def _deliver(self, replica: str, letters: list[Letter]) -> None:
        for key, news in letters:
            if (inbox := self._inboxes.get(key)) is not None:
                if inbox.replica is None:
                    self.last_taken = asyncio.get_running_loop().time()
                inbox.replica = replica
                inbox.hear(news)
            elif not is_last(news):  # it took an order that was given up meanwhile
                self._room.cancel(replica, key)

    def lost(self, replica: str) -> None:
        """Its connection has ended, and with that the orders it had: they go elsewhere."""
        for inbox in list(self._inboxes.values()):
            if inbox.replica == replica:
                inbox.hear(WorkerLost(f"The replica {replica} is gone."))

    def part(self, replica: str) -> None:
        """It is leaving, or says nothing any more: its orders go elsewhere, and those on their way to it."""
        for inbox in list(self._inboxes.values()):
            if inbox.replica is None and inbox.progress.replica == replica:
                inbox.hear(WorkerLost(f"The replica {replica} did not take the order."))
        self.lost(replica)
        self._room.part(replica)

    def close(self) -> None:
        self._room.close()


class Call:
    """One of them, under way."""

    def __init__(self, wanted: Features, inbox: Inbox, response: Any, give_up: Callable[[], None],
                 forget: Callable[[], object]) -> None:
        self.wanted = wanted
        self.inbox = inbox
        self._give_up = give_up
        self._forget = forget
        self._watching = asyncio.ensure_future(self._watch(response))

    async def _watch(self, response: Any) -> None:
        """Errors, and the death of who has it."""
        try:
            problem: Exception | None = await response
            if problem is None:
                await asyncio.sleep(LETTERS_S)
                problem = WorkerLost("A replica ended an order without its end.")
        except Exception as error:  # whatever it is: nobody else would tell who waits
            problem = WorkerLost(f"A replica was lost ({type(error).__name__}).", None)
        self.inbox.hear(problem)

    def end(self) -> None:
        """Nothing more is wanted of it: who has it hears so, unless it is over. As often as one likes."""
        self.wanted.progress.over = True
        self._watching.cancel()
        self._give_up()
        self._forget()

    async def farewell(self) -> float | None:
        """As end(), and wait for what who has it says of an order that nothing was heard of yet: Farewell.queue_s."""
        if self.inbox.replica is None or self.inbox.ended:
            self.end()
            return None
        try:
            self._give_up()
            async with asyncio.timeout(FAREWELL_S):
                while not self.inbox.ended or not self.inbox.empty:
                    if isinstance(news := await self.inbox.next(), Farewell):
                        return news.queue_s
            return None
        except TimeoutError:
            return None
        finally:
            self.end()


class Inbox:
    """What is new of one call. News after an exception, or after the end, are nobody's."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        """To whom it was sent, as the router knows."""
        self.replica: str | None = None
        """Who has it, once that is known."""
        self.ended = False
        self._heard: list[Any] = []
        self._waiter: asyncio.Future[None] | None = None

    def hear(self, news: Any) -> None:
        if self.ended:
            return
        self.ended = is_last(news)
        self._heard.append(news)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def empty(self) -> bool:
        return not self._heard

    async def next(self, seconds: float | None = None) -> Any:
        """Exceptions are values here. Raises TimeoutError after so many seconds."""
        if not self._heard:
            self._waiter = asyncio.get_running_loop().create_future()
            async with asyncio.timeout(seconds):
                await self._waiter
        return self._heard.pop(0)


def is_last(news: Any) -> bool:
    """Of a call nothing more comes."""
    return isinstance(news, Exception | Farewell) or (isinstance(news, Delta) and news.output is not None)
