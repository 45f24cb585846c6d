"""Responses that clients may come back to: kept in memory, each key's own apart, within limits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Stored:
    response: Mapping[str, Any]
    """As its client got it."""
    messages: tuple[dict[str, Any], ...]
    """The conversation up to and with it, but for instructions: those are of one turn."""
    size: int
    """Roughly, in bytes."""
    items: tuple[dict[str, Any], ...] = ()
    """What this one response was asked."""


class ResponseStore:
    """Every tenant has room of its own, so nobody's responses make way for another's, and an id is looked for among the
    tenant's own alone."""

    def __init__(self, most: int, most_bytes: int) -> None:
        """Of each tenant."""
        self._most = most
        self._most_bytes = most_bytes
        self._kept: dict[str, OrderedDict[str, Stored]] = {}

    def put(self, tenant: str, response_id: str, stored: Stored) -> None:
        """The oldest go until it fits; one that alone is too large is not kept."""
        kept = self._kept.setdefault(tenant, OrderedDict())
        kept[response_id] = stored
        size = sum(one.size for one in kept.values())
        while kept and (len(kept) > self._most or size > self._most_bytes):
            size -= kept.popitem(last=False)[1].size

    def get(self, tenant: str, response_id: str) -> Stored | None:
        kept = self._kept.get(tenant)
        return None if kept is None else kept.get(response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        return self._kept.get(tenant, OrderedDict()).pop(response_id, None) is not None
