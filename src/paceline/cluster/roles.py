"""PrefillReplica and DecodeReplica: replicas that share a request's work. Nothing here imports Ray."""

from __future__ import annotations

import asyncio
from typing import Any

from paceline.cluster.calls import Call, Calls
from paceline.cluster.disaggregated import Decode, Disaggregated, Prefill
from paceline.cluster.features import features
from paceline.cluster.mail import Address
from paceline.cluster.order import Order
from paceline.cluster.reading import Facts, Identity
from paceline.cluster.replica import Post, Replica, ReplicaOptions
from paceline.cluster.routing import Features
from paceline.cluster.transfer.chosen import TransferOptions, Transports, place
from paceline.cluster.transfer.transport import LEASE_S, Ticket
from paceline.errors import TransferError

PREFILL, DECODE = "prefill", "decode"
TAKEN_S = 3.0
"""So long a prefill replica may take to say that it has an order. Where there is none, Serve's router would wait for
one."""


class PrefillReplica(Replica):
    """Computes prompts for decode replicas. What it offers is theirs until they say that they have it, are gone, or the
    lease ends: the call takes as long, so that Serve lets nobody leave who is waited for."""

    def __init__(self, options: ReplicaOptions, transfer: TransferOptions, name: str | None = None) -> None:
        super().__init__(options, name)
        self._transports = Transports(transfer, own_host(transfer))

    async def prefill(self, features: Features, order: Order, sender: Address, key: int, identity: Identity,
                      first: int, there: str) -> Exception | None:
        """As carry_out(): None is mailed when it has the order, then a Ticket, or None. `first`: block from which on
        they are wanted. `there`: the place() of who wants them."""
        async def work(post: Post) -> None:
            post(None)
            worker = Prefill(self._llm, await self._transports.towards(there), self.name)
            ticket = await worker.prefill(order, first)
            try:
                post(ticket)
                if ticket is not None:
                    await asyncio.sleep(LEASE_S)
            finally:
                if ticket is not None:
                    await worker.release(ticket)

        return await self._until_given_up(work, sender, key, identity)

    def __del__(self) -> None:
        if hasattr(self, "_transports"):
            self._transports.close()
        super().__del__()


class DecodeReplica(Replica):
    """Carries out orders, and has prefill replicas compute their prompts."""

    def __init__(self, options: ReplicaOptions, transfer: TransferOptions, prefill: Any,
                 name: str | None = None) -> None:
        """`prefill`: Serve's handle of the prefill replicas."""
        super().__init__(options, name)
        host = own_host(transfer)
        self._transports = Transports(transfer, host)
        self._local = Decode(self._llm, self._transports, self.name)
        self._pair = Disaggregated(PrefillCalls(Calls(prefill, self._facts.identity, host), self._facts), self._local)
        self._worker = self._pair

    def _queue_s(self, request_id: str) -> float | None:
        return 0.0 if self._pair.hands_over(request_id) else super()._queue_s(request_id)

    async def view(self, what: str, *arguments: Any) -> tuple[str, Any]:
        name, found = await super().view(what, *arguments)
        if what == "report":
            found.engine["handovers"] = {"done": self._pair.handed_over, "failed": dict(self._pair.failures)}
        return name, found

    def __del__(self) -> None:
        if hasattr(self, "_transports"):
            self._transports.close()
        super().__del__()


class PrefillCalls:
    """Prefill replicas as a PrefillWorker: Serve's router chooses among them."""

    name = PREFILL

    def __init__(self, calls: Calls, facts: Facts) -> None:
        """`facts`: of who calls."""
        self._calls = calls
        self._facts = facts
        self._offered: dict[str, Call] = {}
        """By the keys of their tickets."""

    async def prefill(self, order: Order, first: int = 0) -> Ticket | None:
        wanted = features(order, self._facts.config.block_size, self._facts.adapters)
        call = await self._calls.begin("prefill", wanted, order, first, place())
        ticket: Ticket | None = None
        try:
            await self._news(call, TAKEN_S)
            ticket = await self._news(call)
            wanted.progress.answered = True
        except TimeoutError:
            raise TransferError(f"no prefill replica took the order within {TAKEN_S:g} s") from None
        finally:
            if ticket is None:
                call.end()
            else:
                self._offered[ticket.key] = call
        return ticket

    async def _news(self, call: Call, seconds: float | None = None) -> Any:
        news = await call.inbox.next(seconds)
        if isinstance(news, Exception):
            raise news
        return news

    async def release(self, ticket: Ticket) -> None:
        if (call := self._offered.pop(ticket.key, None)) is not None:
            call.end()


def own_host(transfer: TransferOptions) -> str:
    """Where workers of other machines reach this process, or of this machine alone."""
    if not transfer.beyond:
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())
