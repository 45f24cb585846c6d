"""Replica: an engine in a process of its own, as Ray Serve runs and restarts it. Nothing here imports Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.async_llm import AsyncLLM
from paceline.cluster.features import published
from paceline.cluster.mail import Address, Farewell, Sender, Stranger
from paceline.cluster.order import Order
from paceline.cluster.reading import Facts, Identity, check_identity
from paceline.cluster.routing import Features
from paceline.cluster.worker import LocalWorker, Worker, WorkerLost
from paceline.engine.observe.timeline import Timelines
from paceline.engine.records.record import Record
from paceline.errors import ConfigError, PacelineError
from paceline.serve.views import EngineViews

log = logging.getLogger("paceline.cluster")
LOOK_BACK_S = 60.0
"""How far back missed targets count."""
VIEWS = frozenset({"report", "state", "requests", "story", "trace"})

Post = Callable[[Any], None]
"""Mails what is new to who ordered something."""
Work = Callable[[Post], Awaitable[None]]


@dataclass(frozen=True)
class ReplicaOptions:
    """What every replica of a deployment is made of."""

    engine: Mapping[str, Any]
    """As AsyncLLM takes them."""
    threads: int | None = None
    timelines: bool = True
    """Keep what recent requests went through, for the page and for spans."""
    role: str = ""
    """Where replicas differ in what they do: shown with their names."""


class Replica:
    """Carries out orders and mails what is new of them to the front that sent them. Serve sees a call that takes as
    long as the request does, so that what it counts, drains and scales by is right."""

    def __init__(self, options: ReplicaOptions, name: str | None = None) -> None:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self.name = name or _own_name()
        self._llm = AsyncLLM(**{"warm_up": True, "threads": options.threads, **options.engine})
        self._llm.on_end = self._ended
        self.label = f"{options.role}-{self.name}" if options.role else self.name
        self._local = LocalWorker(self._llm, self.name)
        self._worker: Worker = self._local
        self._views = EngineViews(self._llm, Timelines())
        if options.timelines:
            self._llm.engine.observers.add(self._views.timelines)
        self._facts = Facts.of(self._llm.engine)
        self._senders: dict[Address, asyncio.Future[Sender]] = {}
        self._orders: dict[tuple[Address, int], Order] = {}
        self._tasks: dict[tuple[Address, int], asyncio.Task[Any]] = {}
        self._late: deque[tuple[float, bool]] = deque(maxlen=1000)
        """(when, whether a target was missed) of requests that had one."""

    # ---------------------------------------------------------------- orders

    async def carry_out(self, features: Features, order: Order, sender: Address, key: int,
                        identity: Identity) -> Exception | None:
        """`features` is read on the way here. Returns when the order has ended: None, or what went wrong, as a value,
        for it is no failure of this process."""
        async def work(post: Post) -> None:
            async for delta in self._worker.stream(order):
                post(delta)

        self._orders[sender, key] = order
        try:
            return await self._until_given_up(work, sender, key, identity)
        finally:
            del self._orders[sender, key]

    async def _until_given_up(self, work: Work, sender: Address, key: int, identity: Identity) -> Exception | None:
        """A call of somebody's, who may give it up by mail, or be gone."""
        task = self._tasks[sender, key] = asyncio.ensure_future(self._for(work, sender, key, identity))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:  # the front has given it up, or Serve has
            task.cancel()
            return None
        finally:
            del self._tasks[sender, key]

    async def _for(self, work: Work, address: Address, key: int, identity: Identity) -> Exception | None:
        try:
            check_identity(identity, self._facts.identity)
            sender = await self._sender(address)
            await work(lambda news: sender.post(key, news))
        except ConfigError as problem:
            return WorkerLost(f"The replica {self.name} cannot serve this front. {problem}")
        except PacelineError as problem:
            return problem
        except (OSError, EOFError, Stranger) as problem:
            return WorkerLost(f"The replica {self.name} cannot reach its front ({problem or type(problem).__name__}).")
        return None

    async def _sender(self, address: Address) -> Sender:
        """One connection a front, however many orders come at once, and whichever of them are given up meanwhile."""
        found = self._senders.get(address)
        if found is None:
            found = self._senders[address] = asyncio.ensure_future(self._connect(address))
        return await asyncio.shield(found)

    async def _connect(self, address: Address) -> Sender:
        try:
            made = await Sender.connect(address, self.name, lambda key: self._give_up(address, key))
        except BaseException:
            self._senders.pop(address, None)
            raise
        made.when_closed(lambda: self._part(address))
        return made

    def _give_up(self, address: Address, key: int) -> None:
        if (order := self._orders.get((address, key))) is not None:
            self._senders[address].result().post(key, Farewell(self._queue_s(order.request_id)))
        if (task := self._tasks.get((address, key))) is not None:
            task.cancel()

    def _queue_s(self, request_id: str) -> float | None:
        return self._local.queue_s(request_id)

    def _part(self, address: Address) -> None:
        """A front is gone: nobody wants what it ordered."""
        self._senders.pop(address, None)
        for (other, _), task in list(self._tasks.items()):
            if other == address:
                task.cancel()

    # ---------------------------------------------------------------- what others may know

    async def hello(self) -> tuple[str, Facts]:
        return self.name, self._facts

    async def view(self, what: str, *arguments: Any) -> tuple[str, Any]:
        """One of VIEWS, of this engine."""
        if what not in VIEWS:
            raise ValueError(what)
        return self.label, await getattr(self._views, what)(*arguments)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Asked for by Serve, which hands it to the routers of all fronts."""
        return await self._llm.ask(published)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked for by Serve; see autoscaling.py."""
        report = await self._worker.report()
        since = time.monotonic() - LOOK_BACK_S
        recent = [missed for when, missed in self._late if when >= since]
        return {"running": float(report["running"]), "waiting": float(report["waiting"]),
                "late": sum(recent) / len(recent) if recent else 0.0}

    def _ended(self, record: Record) -> None:
        """In the engine's thread."""
        request, metrics = record.request, record.metrics
        wanted = ((request.target_ttft_s, metrics.ttft), (request.target_tpot_s, metrics.tpot))
        had = [(target, time) for target, time in wanted if target is not None and time is not None]
        if had:
            self._late.append((time.monotonic(), any(time > target for target, time in had)))

    def check_health(self) -> None:
        """Asked for by Serve, which replaces who raises."""
        if not self._llm.alive:
            raise RuntimeError("the engine has stopped")

    def __del__(self) -> None:
        """Serve calls this when a replica leaves in good order: what is left is given up, and goes on elsewhere."""
        if hasattr(self, "_local"):
            self._local.leave()
            self._llm.close()


def _own_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)
