"""What routing goes by: made of an order by who sends it, of an engine by the replica that has it."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from paceline.cache.prefix import chain
from paceline.cluster.order import FOR_DECODING, Order
from paceline.cluster.routing import Candidate, Features, short
from paceline.engine.core import Engine
from paceline.request import scope_of

MOST_BLOCKS = 1 << 15
"""Blocks that a replica publishes: four bytes each, every second."""


def features(order: Order, block_size: int, adapters: Mapping[str, str],
             avoid: AbstractSet[str] = frozenset()) -> Features:
    """`adapters`: their revisions, by name. Where something has been said already it is looked for too."""
    revision = None if order.adapter is None else adapters.get(order.adapter, "")
    scope = scope_of(order.tenant, order.params.cache_salt, revision)
    text = order.text
    return Features(len(text), tuple(short(one) for one in chain(text, scope, block_size)), block_size,
                    order.adapter, order.params.priority, frozenset(avoid), order_id(order.name))


def order_id(name: str) -> int:
    """Of an order, or of what a prefill worker computes for one. Two that look alike cost a detour at most."""
    return zlib.crc32(name.partition(FOR_DECODING)[0].encode())


def published(engine: Engine) -> dict[str, Any]:
    """What a replica says of itself; between two steps. Hashes of text, never tokens."""
    waiting: dict[int, int] = {}
    orders: dict[int, int] = {}
    for seq in (*engine.scheduler.waiting, *engine.scheduler.running):
        if seq.request.shadow:
            continue
        left, own = max(0, seq.prompt_len - seq.computed), order_id(seq.request.id)
        priority = seq.request.params.priority
        waiting[priority] = waiting.get(priority, 0) + left
        orders[own] = orders.get(own, 0) + left
    digests = engine.cache.prefix.digests()[-MOST_BLOCKS:]
    return {"blocks": array("I", map(short, digests)).tobytes(), "waiting": waiting,
            "orders": orders, "running": sum(not seq.request.shadow for seq in engine.scheduler.running),
            "adapters": engine.adapters.names}


def candidate(name: str, said: Mapping[str, Any]) -> Candidate:
    """A replica that published `said`; nothing yet: it is idle and empty, as new ones are."""
    return Candidate(name, block_set(said.get("blocks", b"")), said.get("running", 0), said.get("waiting", {}),
                     frozenset(said.get("adapters", ())), orders=said.get("orders", {}))


def block_set(packed: bytes) -> frozenset[int]:
    numbers = array("I")
    numbers.frombytes(packed)
    return frozenset(numbers)
