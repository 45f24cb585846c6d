"""Quotas: how much each key may use; requests and tokens a minute, and requests at once."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.engine.records.record import Record
from paceline.errors import ConfigError
from paceline.serve.errors import ApiError

METERED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/messages",
                     "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/completion"})
"""What makes the engine work."""
LOADING = frozenset({"/tokenize", "/detokenize", "/apply-template", "/v1/messages/count_tokens", "/props",
                     "/paceline/about"})
"""What else needs a model: where there are several, it may have to be loaded."""
ROUNDING = 1e-6
"""Who comes back just in time is not refused for the last bits of a sum."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What a key may use; infinity: as much as there is."""

    requests_per_minute: float = math.inf
    tokens_per_minute: float = math.inf
    """Of prompts and answers."""
    concurrent_requests: float = math.inf

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
                raise ConfigError(f"{one.name} must be at least 1, got {value!r}; leave it out for no limit.")


UNLIMITED = Quota()


class Bucket:
    """A token bucket: what a minute allows fits in, and flows in again as time passes. It can be in debt, which is paid
    off first."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._most = self._level = per_minute
        self._clock = clock
        self._filled = clock()

    def seconds_until(self, amount: float) -> float:
        """How long it takes until so much is there; 0: it is."""
        if self._most == math.inf:
            return 0.0
        self._fill(self._clock())
        missing = amount - self._level
        return missing * 60 / self._most if missing > ROUNDING else 0.0

    def take(self, amount: float, at: float | None = None) -> None:
        """`at`: when, where that was a while ago. What has flowed in by then comes first, and what has flowed in since
        comes on top: the bucket is never more than full."""
        if self._most != math.inf:
            self._fill(self._clock() if at is None else at)
            self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self._most, self._level + max(0.0, now - self._filled) * self._most / 60)
        self._filled = max(self._filled, now)


class Meter:
    """What one key has used."""

    def __init__(self, quota: Quota, clock: Callable[[], float]) -> None:
        self._quota = quota
        self._requests = Bucket(quota.requests_per_minute, clock)
        self._tokens = Bucket(quota.tokens_per_minute, clock)
        self._running = 0

    def begin(self) -> None:
        """Another request; a refusal costs nothing. How many tokens one will take is not known before: it is let in
        where any are left, and what it takes beyond is paid off before the next."""
        if self._running >= self._quota.concurrent_requests:
            raise _refusal(f"has {self._running} requests under way, and {self._quota.concurrent_requests:g} are the "
                           "limit: wait until one of them has ended.", 1.0)
        if wait := self._requests.seconds_until(1):
            raise _refusal(f"may send {self._quota.requests_per_minute:g} requests a minute and has sent them: try "
                           f"again in {math.ceil(wait)} s.", wait)
        if wait := self._tokens.seconds_until(1):
            raise _refusal(f"may use {self._quota.tokens_per_minute:g} tokens a minute, of prompts and answers, and "
                           f"has used them: try again in {math.ceil(wait)} s.", wait)
        self._requests.take(1)
        self._running += 1

    def spend(self, tokens: int, at: float | None = None) -> None:
        self._tokens.take(tokens, at)

    def end(self) -> None:
        self._running -= 1


def _refusal(message: str, seconds: float) -> ApiError:
    return ApiError(429, f"This key {message}", code="rate_limit_exceeded",
                    headers={"retry-after": str(max(1, math.ceil(seconds)))})


class Meters:
    """Those of all keys, by tenant."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meters: dict[str, Meter] = {}
        self._ended: deque[tuple[str, int, float]] = deque()

    def of(self, tenant: str, quota: Quota) -> Meter:
        while self._ended:
            name, tokens, when = self._ended.popleft()
            if name in self._meters:
                self._meters[name].spend(tokens, when)
        meter = self._meters.get(tenant)
        if meter is None:
            meter = self._meters[tenant] = Meter(quota, self._clock)
        return meter

    def ended(self, record: Record) -> None:
        """A request has ended, however it did. In the engine's thread: it is counted when somebody next asks, as
        of now: it is paid off from now on, not from when its key comes back."""
        metrics = record.metrics
        prompt = 0 if metrics.first_scheduled is None else len(record.request.prompt)
        self._ended.append((record.request.tenant.name, prompt + metrics.output_tokens, self._clock()))


class QuotaGate:
    """Lets requests through as far as the quota of their key goes. Stands behind ApiKeys, which says whose they are."""

    def __init__(self, app: ASGIApp, meters: Meters, paths: frozenset[str] = METERED) -> None:
        self._app = app
        self._meters = meters
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("GET", "POST") or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        caller = scope["state"]["caller"]
        meter = self._meters.of(caller.tenant.name, caller.quota)
        try:
            meter.begin()
        except ApiError as refusal:
            await refusal.response()(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            meter.end()
