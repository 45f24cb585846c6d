"""Prefill and decode apart: one worker computes a prompt, another one takes its blocks over and writes the answer."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any, Protocol

from paceline.async_llm import AsyncLLM
from paceline.cluster.order import FOR_DECODING, Order
from paceline.cluster.transfer.prefix import export_prefix, import_prefix
from paceline.cluster.transfer.transport import LEASE_S, MOST_BYTES, Ticket, Transport
from paceline.cluster.worker import LocalWorker, Worker, cancelled
from paceline.engine.core import Engine
from paceline.engine.exchange import PrefixBlocks
from paceline.engine.records.deltas import Delta
from paceline.errors import RequestError
from paceline.request import SamplingParams, scope_of

log = logging.getLogger("paceline.cluster")

PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""How long nothing is handed over after it failed: the first time, and at most. Each time that it fails again it is
twice as long."""
PATIENCE_S = 60.0
"""How long a prompt may take to be computed elsewhere and handed over, before it is computed where it is decoded."""


class PrefillWorker(Protocol):
    """Computes prompts for others. Prefill in this process, or a stand-in for one elsewhere."""

    @property
    def name(self) -> str: ...

    async def prefill(self, order: Order, first: int = 0) -> Ticket | None:
        """Compute an order's prompt; for its blocks from `first` on, a ticket. None: it has none to give."""

    async def release(self, ticket: Ticket) -> None:
        """The blocks are not needed any more."""


class DecodeWorker(Worker, Protocol):
    """Carries out orders, and takes over what others have computed of their prompts."""

    async def held(self, order: Order) -> tuple[int, int]:
        """Blocks of an order's text that are here already, and tokens of a block."""

    async def receive(self, order: Order, ticket: Ticket) -> int:
        """Take blocks in; how many pieces were new. Raises TransferError."""


class Fetches(Protocol):
    """That much of a Transport: for who offers nothing."""

    async def fetch(self, ticket: Ticket) -> PrefixBlocks: ...


class Prefill:
    """An engine of this process as a PrefillWorker."""

    def __init__(self, llm: AsyncLLM, transport: Transport, name: str = "prefill", *, lease_s: float = LEASE_S,
                 most_bytes: int = MOST_BYTES // 2) -> None:
        """`most_bytes`: of one prompt; what is beyond them is computed where it is decoded."""
        self._llm = llm
        self._transport = transport
        self._lease_s = lease_s
        self._most_bytes = most_bytes
        self.name = name

    async def prefill(self, order: Order, first: int = 0) -> Ticket | None:
        engine, asked = self._llm.engine, order.params
        most = first + self._most_bytes // sum(engine.storage.block_bytes)
        tokens = list(order.text[:most * engine.config.block_size + 1])
        # One token is the least that can be asked for. Nobody reads it, and nothing that chooses it touches a block.
        params = SamplingParams(max_tokens=1, temperature=0.0, cache_salt=asked.cache_salt, priority=asked.priority,
                                timeout_s=order.left_s)
        name = f"{order.name}{FOR_DECODING}{secrets.token_hex(4)}"  # it may come again before an earlier one has ended
        await self._llm.complete(tokens, params, speculation=None, request_id=name, adapter=order.adapter,
                                 tenant=order.tenant)
        scope = await scope_in(self._llm, order)
        blocks = await export_prefix(self._llm, tokens, scope, first, on_device=self._transport.on_device)
        return None if blocks is None else await self._transport.offer(blocks, self._lease_s)

    async def release(self, ticket: Ticket) -> None:
        self._transport.withdraw(ticket)


class Decode(LocalWorker):
    """An engine of this process as a DecodeWorker."""

    def __init__(self, llm: AsyncLLM, transport: Fetches, name: str = "decode") -> None:
        super().__init__(llm, name)
        self._transport = transport

    async def held(self, order: Order) -> tuple[int, int]:
        scope = await scope_in(self._llm, order)
        count = await self._llm.ask(lambda engine: engine.exchange.held(order.text, scope))
        return count, self._llm.engine.config.block_size

    async def receive(self, order: Order, ticket: Ticket) -> int:
        blocks = await self._transport.fetch(ticket)
        return await import_prefix(self._llm, blocks, order.text, await scope_in(self._llm, order))


async def scope_in(llm: AsyncLLM, order: Order) -> str:
    """By which an engine keeps an order's blocks. Raises a RequestError where it has no such adapter."""

    def scope(engine: Engine) -> str:
        adapter = engine.adapters.get(order.adapter)
        return scope_of(order.tenant, order.params.cache_salt, None if adapter is None else adapter.revision)

    return await llm.ask(scope)


class Disaggregated:
    """A prefill and a decode worker, as one worker. Whatever becomes of the prefill worker or of the blocks on their
    way, the decode worker computes what it lacks: texts are the same, and so are errors."""

    def __init__(self, prefill: PrefillWorker, decode: DecodeWorker, *, least_tokens: int = 0,
                 patience_s: float = PATIENCE_S, pause_s: float = PAUSE_S,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`least_tokens`: prompts that leave the decode worker fewer to compute are not worth the way. `pause_s`: so
        long after a failure nobody else waits for the same."""
        self._prefill = prefill
        self._decode = decode
        self._least = least_tokens
        self._patience_s = patience_s
        self._pause_s = self._next_pause_s = pause_s
        self._paused_until = -math.inf
        self._in_vain_s = 0.0
        """How long orders have waited for blocks since any came last."""
        self._clock = clock
        self.handed_over = 0
        """Orders whose blocks came from the prefill worker."""
        self.failures: dict[str, int] = {}
        """How often they did not although they should have, by kind of error."""
        self._handing: dict[str, asyncio.Task[None]] = {}
        """By request."""
        self._cancelled: set[str] = set()
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return f"{self._prefill.name}+{self._decode.name}"

    async def stream(self, order: Order) -> AsyncGenerator[Delta, None]:
        await self._unless_cancelled(order)
        async with aclosing(self._decode.stream(order)) as stream:
            async for delta in stream:
                yield delta

    async def cancel(self, request_id: str) -> None:
        handing = self._handing.get(request_id)
        if handing is not None:
            self._cancelled.add(request_id)
            handing.cancel()
        await self._decode.cancel(request_id)

    async def report(self) -> dict[str, Any]:
        return await self._decode.report()

    def hands_over(self, request_id: str) -> bool:
        """Whether its prompt is computed elsewhere at the moment."""
        return request_id in self._handing

    async def _unless_cancelled(self, order: Order) -> None:
        """Hand over what there is; who cancels the request meanwhile need not wait for it."""
        handing = self._handing[order.request_id] = asyncio.ensure_future(self._hand_over(order))
        try:
            await handing
            if order.request_id in self._cancelled:  # just when they had been handed over
                raise cancelled()
        except asyncio.CancelledError:
            if order.request_id not in self._cancelled:
                raise
            raise cancelled() from None
        finally:
            self._cancelled.discard(order.request_id)
            if self._handing.get(order.request_id) is handing:
                del self._handing[order.request_id]

    async def _hand_over(self, order: Order) -> None:
        if order.params.prompt_logprobs is not None or order.params.pooling == "mean":
            return  # every token of it has to be computed
        if self._clock() < self._paused_until:
            return
        left = self._patience_s if order.left_s is None else min(self._patience_s, order.left_s / 2)
        ticket = None
        try:
            async with asyncio.timeout(left):
                held, size = await self._decode.held(order)
                if len(order.text) - 1 - held * size < max(self._least, size):
                    return
                ticket = await self._prefill.prefill(order, held)
                if ticket is not None and await self._decode.receive(order, ticket):
                    self.handed_over += 1
                    self._next_pause_s = self._pause_s
                    self._in_vain_s = 0.0
        except Exception as problem:  # a worker that died, blocks that do not fit or did not come, a queue that is full
            kind = type(problem).__name__
            self.failures[kind] = self.failures.get(kind, 0) + 1
            late = isinstance(problem, TimeoutError)
            self._in_vain_s += max(0.0, left) if late else 0.0
            # Nobody else's business: an error of the request's own, a queue that is full now, a deadline that was near.
            if not isinstance(problem, RequestError) and not (late and self._in_vain_s < self._patience_s):
                self._paused_until = self._clock() + self._next_pause_s
                self._next_pause_s = min(2 * self._next_pause_s, LONGEST_PAUSE_S)
            log.warning("request %s: %s computes its prompt itself, for there came no blocks from %s (%s: %s)",
                        order.request_id, self._decode.name, self._prefill.name, kind, problem)
        finally:
            if ticket is not None:
                task = asyncio.ensure_future(self._release(ticket))
                self._releases.add(task)
                task.add_done_callback(self._releases.discard)

    async def _release(self, ticket: Ticket) -> None:
        with suppress(Exception):  # who cannot be told lets them go when the lease ends
            await self._prefill.release(ticket)
