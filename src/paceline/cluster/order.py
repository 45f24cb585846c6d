"""Order: everything that decides a request's text, to be sent to any worker, as often as it takes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import RequestError
from paceline.request import SamplingParams, Tenant
from paceline.so_far import SampleSoFar

__all__ = ["FOR_DECODING", "Order", "SampleSoFar"]

FOR_DECODING = "#prefill"
"""In the name of what a prefill worker computes for an order, after the order's own."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """A request as it travels. Two workers with the same model write the same text for it."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    """With a seed: whoever makes the order chooses it. `timeout_s` counts from when the client asked (age_s)."""
    speculation: Any = ...
    """As a request names it; `...`: what the worker does for those who name nothing."""
    adapter: str | None = None
    tenant: Tenant = field(default_factory=Tenant)
    age_s: float = 0.0
    """Seconds since the client asked, at the moment of sending: no two machines have the same clock."""
    moves: int = 0
    """How many workers had it before."""
    so_far: tuple[SampleSoFar, ...] = ()
    """One a sample, in their order; empty: nothing has been said."""

    def __post_init__(self) -> None:
        if self.params.seed is None:
            raise ValueError("an order has a seed: make it with Order.of()")
        if self.params.interrupt is not None:
            raise RequestError("interrupt is a callable and cannot be sent to another process: leave it out.",
                               "interrupt")
        if self.so_far and len(self.so_far) != self.params.samples:
            raise ValueError(f"{self.params.samples} samples have as many beginnings, got {len(self.so_far)}")

    @classmethod
    def of(cls, request_id: str, prompt: Sequence[int], params: SamplingParams, *, speculation: Any = ...,
           adapter: str | None = None, tenant: Tenant | None = None) -> Order:
        """A new request's. Where it names no seed one is chosen, once for all workers."""
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(64))
        return cls(request_id=request_id, prompt=tuple(prompt), params=params, speculation=speculation,
                   adapter=adapter, tenant=tenant or Tenant())

    @property
    def left_s(self) -> float | None:
        """Seconds until its deadline; None: it has none."""
        return None if self.params.timeout_s is None else self.params.timeout_s - self.age_s

    @property
    def name(self) -> str:
        """What a worker knows it by. A worker may get it back before it has noticed that it lost it; and no client's
        id has this sign in it."""
        return f"{self.request_id}#moved{self.moves}" if self.moves else self.request_id

    @property
    def text(self) -> tuple[int, ...]:
        """Prompt and the first sample's output: what a worker would best find in its cache."""
        return self.prompt + self.so_far[0].token_ids if self.so_far else self.prompt
