"""The load generator, a process of its own that tokenises nothing and reads answers when all of them are there.

`python -m paceline.bench.serving.client` reads a plan as JSON from stdin and writes lines of JSON to stdout: now and
then how far it is, and at last what it saw.
"""

from __future__ import annotations

import asyncio
import json
import resource
import ssl
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.serving.exchange import Exchange, encode, read

EVERY_S = 0.5
"""Between two lines that say how far it is."""


@dataclass
class Attempt:
    """One request, whatever became of it. Times are of this process's clock."""

    at: float
    """When it should have left."""
    begun: float = 0.0
    ended: float = 0.0
    exchange: Exchange | None = None
    problem: str | None = None
    """What kept it from an answer."""
    timed_out: bool = False


@dataclass
class Load:
    plan: dict[str, Any]
    attempts: list[Attempt] = field(default_factory=list)
    running: int = 0
    started: float = 0.0

    async def run(self) -> None:
        """`arrivals`: when each body leaves, whoever still waits; else `clients` take them one after another."""
        loop, plan = asyncio.get_running_loop(), self.plan
        requests = [encode(plan["authority"], body, plan["path"], plan["headers"]) for body in plan["bodies"]]
        tls = ssl.create_default_context() if plan["tls"] else None
        progress = asyncio.create_task(self._progress(len(requests)))
        self.started = time.perf_counter()
        if plan["arrivals"] is None:
            waiting = iter(requests)

            async def client() -> None:
                for request in waiting:
                    await self._ask(request, time.perf_counter(), tls)

            await asyncio.gather(*(client() for _ in range(plan["clients"])))
        else:
            tasks = []
            for at, request in zip(plan["arrivals"], requests, strict=True):
                due = self.started + at
                if (wait := due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(loop.create_task(self._ask(request, due, tls)))
            await asyncio.gather(*tasks)
        progress.cancel()

    async def _ask(self, request: bytes, due: float, tls: ssl.SSLContext | None) -> None:
        plan, attempt = self.plan, Attempt(due, time.perf_counter())
        self.attempts.append(attempt)
        self.running += 1
        try:
            async with asyncio.timeout(plan["timeout_s"]):
                _, attempt.exchange = await asyncio.get_running_loop().create_connection(
                    lambda: Exchange(request), plan["host"], plan["port"], ssl=tls)
                await attempt.exchange.done
        except TimeoutError:
            attempt.timed_out = True
            if attempt.exchange is not None:
                attempt.exchange.end()
        except OSError as problem:
            attempt.problem = problem.strerror or str(problem) or type(problem).__name__
        attempt.ended = time.perf_counter()
        self.running -= 1

    async def _progress(self, count: int) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            say({"elapsed_s": time.perf_counter() - self.started, "begun": len(self.attempts), "of": count,
                 "running": self.running})


def tell(attempt: Attempt, started: float) -> dict[str, Any]:
    """What is reported of one. Seconds: `start_s` after the level's start, the others after the request's own, before
    it had a connection."""
    made = attempt.exchange
    seen = read(made) if made is not None else {"status": 0, "error": None, "times": [], "tokens": None, "usage": None}
    connect = made.started - attempt.begun if made is not None else None
    usage = seen["usage"] or {}
    fault = kind_of(attempt, seen)
    return {"start_s": attempt.begun - started, "late_s": attempt.begun - attempt.at, "connect_s": connect,
            "e2e_s": attempt.ended - attempt.begun, "status": seen["status"], "fault": fault,
            "message": fault and (attempt.problem or seen["error"] or fault),
            "times": [time + (connect or 0.0) for time in seen["times"]], "tokens": seen["tokens"],
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


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a connection is an open file, and a burst may be large
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    load = Load(json.load(sys.stdin))
    before = _cpu()
    asyncio.run(load.run())
    elapsed, cpu = time.perf_counter() - load.started, _cpu() - before
    say({"result": {"elapsed_s": elapsed, "cpu_s": cpu,
                    "requests": [tell(attempt, load.started) for attempt in load.attempts]}})


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
