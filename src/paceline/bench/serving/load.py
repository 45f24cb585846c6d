"""Load: requests that leave when they should, whoever answers them, and what became of each."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

EVERY_S = 0.5
"""Between two words of how far it is."""


class Sent(Protocol):
    """A request that is on its way, noted at little cost and read when all is over."""

    started: float
    """When somebody took it, by this process's clock."""

    @property
    def done(self) -> asyncio.Future[None]: ...

    def end(self) -> None:
        """Hang up, if it is not over."""

    def read(self) -> dict[str, Any]:
        """What came of it: status (as of HTTP), error, tokens, usage, its text and the thoughts before it, the times
        of every piece of them, in seconds after it started."""


Send = Callable[[], Awaitable[Sent]]


@dataclass
class Attempt:
    """One request, whatever became of it. Times are of this process's clock."""

    at: float
    """When it should have left."""
    begun: float = 0.0
    ended: float = 0.0
    sent: Sent | None = None
    problem: str | None = None
    """What kept it from an answer."""
    timed_out: bool = False


@dataclass
class Load:
    """`arrivals`: when each request leaves, whoever still waits; None: `clients` send them one after another."""

    requests: Sequence[Send]
    arrivals: Sequence[float] | None
    clients: int | None
    timeout_s: float
    progress: Callable[[dict[str, Any]], None]
    attempts: list[Attempt] = field(default_factory=list)
    running: int = 0
    started: float = 0.0

    async def run(self) -> dict[str, Any]:
        """What was seen, requests in their order."""
        loop, before = asyncio.get_running_loop(), cpu_seconds()
        progress = asyncio.create_task(self._progress())
        self.started = time.perf_counter()
        if self.arrivals is None:
            waiting = iter(self.requests)

            async def client() -> None:
                for send in waiting:
                    await self._ask(send, time.perf_counter())

            await asyncio.gather(*(client() for _ in range(self.clients or 1)))
        else:
            tasks = []
            for at, send in zip(self.arrivals, self.requests, strict=True):
                due = self.started + at
                if (wait := due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(loop.create_task(self._ask(send, due)))
            await asyncio.gather(*tasks)
        progress.cancel()
        elapsed, cpu = time.perf_counter() - self.started, cpu_seconds() - before
        return {"elapsed_s": elapsed, "cpu_s": cpu,
                "requests": [tell(attempt, self.started) for attempt in self.attempts]}

    async def _ask(self, send: Send, due: float) -> None:
        attempt = Attempt(due, time.perf_counter())
        self.attempts.append(attempt)
        self.running += 1
        try:
            async with asyncio.timeout(self.timeout_s):
                attempt.sent = await send()
                await attempt.sent.done
        except TimeoutError:
            attempt.timed_out = True
            if attempt.sent is not None:
                attempt.sent.end()
        except OSError as problem:
            attempt.problem = problem.strerror or str(problem) or type(problem).__name__
        attempt.ended = time.perf_counter()
        self.running -= 1

    async def _progress(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self.progress({"elapsed_s": time.perf_counter() - self.started, "begun": len(self.attempts),
                           "of": len(self.requests), "running": self.running})


def tell(attempt: Attempt, started: float) -> dict[str, Any]:
    """What is reported of one. Seconds: `start_s` after the level's start, the others after the request's own, before
    it had a connection."""
    sent = attempt.sent
    seen = sent.read() if sent is not None else {
        "status": 0, "error": None, "times": [], "tokens": None, "usage": None, "text": "", "thoughts": "",
        "calls": ""}
    connect = sent.started - attempt.begun if sent is not None else None
    usage = seen["usage"] or {}
    fault = kind_of(attempt, seen)
    return {"start_s": attempt.begun - started, "late_s": attempt.begun - attempt.at, "connect_s": connect,
            "e2e_s": attempt.ended - attempt.begun, "status": seen["status"], "fault": fault,
            "message": fault and (attempt.problem or seen["error"] or fault),
            "times": [time + (connect or 0.0) for time in seen["times"]], "tokens": seen["tokens"],
            "text": seen["thoughts"] + seen["text"] + seen["calls"],
            "prompt_tokens": usage.get("prompt_tokens"),
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens")}


def kind_of(attempt: Attempt, seen: dict[str, Any]) -> str | None:
    """Of a fault; None: all is well."""
    if attempt.timed_out:
        return "timeout"
    if attempt.problem is not None or not seen["status"]:
        return "connection"
    if seen["status"] != 200:
        return f"http_{seen['status']}"
    return None if seen["error"] is None else "stream"


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
