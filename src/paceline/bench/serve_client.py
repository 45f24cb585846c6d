"""Clients of `bench serve-cost`: all at once, or again and again, some of whom hang up.

`python -m paceline.bench.serve_client` reads a plan as JSON from stdin and writes what it saw as JSON to stdout.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from typing import Any

from paceline.bench.serving.exchange import Exchange, encode, read


async def exchange(host: str, port: int, body: dict[str, Any], hang_up_after: int | None = None) -> Exchange:
    loop = asyncio.get_running_loop()
    _, made = await loop.create_connection(lambda: Exchange(encode(host, body), hang_up_after), host, port)
    await made.done
    return made


async def burst(plan: dict[str, Any]) -> list[tuple[dict[str, Any], Exchange]]:
    """All bodies at once."""
    made = await asyncio.gather(*(exchange(plan["host"], plan["port"], body) for body in plan["bodies"]))
    return list(zip(plan["bodies"], made))


async def soak(plan: dict[str, Any]) -> list[tuple[dict[str, Any], Exchange]]:
    """`clients` that ask again and again until `seconds` are over; some hang up in the middle."""
    chance = random.Random(plan["seed"])
    found: list[tuple[dict[str, Any], Exchange]] = []
    end = time.perf_counter() + plan["seconds"]

    async def client() -> None:
        while time.perf_counter() < end:
            body = dict(chance.choice(plan["bodies"]), seed=chance.getrandbits(48),
                        max_tokens=chance.randint(*plan["lengths"]))
            hang_up = chance.randint(1, body["max_tokens"]) if chance.random() < plan["cancel"] else None
            found.append((body, await exchange(plan["host"], plan["port"], body, hang_up)))

    await asyncio.gather(*(client() for _ in range(plan["clients"])))
    return found


def main() -> None:
    plan = json.load(sys.stdin)
    started, before = time.perf_counter(), _cpu()
    found = asyncio.run({"burst": burst, "soak": soak}[plan["kind"]](plan))
    elapsed, cpu = time.perf_counter() - started, _cpu() - before
    json.dump({"elapsed_s": elapsed, "cpu_s": cpu, "exchanges": [
        read(made) | {"body": body} for body, made in found]}, sys.stdout)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
