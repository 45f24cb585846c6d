"""A load generator that costs little: bare sockets, bytes noted as they come and read when all is over.

`python -m paceline.bench.serve_client` reads a plan as JSON from stdin and writes what it saw as JSON to stdout.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

END = b"0\r\n\r\n"
"""The last piece of a chunked body."""


class Exchange(asyncio.Protocol):
    """One request over one connection."""

    def __init__(self, request: bytes, hang_up_after: int | None) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started = 0.0
        self.hung_up = False
        self._request = request
        self._hang_up_after = hang_up_after
        self._transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.started = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        if data.endswith(END):
            self._transport.close()
        elif self._hang_up_after is not None and len(self.pieces) > self._hang_up_after:
            self.hung_up = True
            self._transport.abort()

    def end(self) -> None:
        """Hang up, if it is not over."""
        self._transport.abort()

    def connection_lost(self, problem: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def encode(host: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return (f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"connection: close\r\ncontent-length: {len(content)}\r\n\r\n").encode() + content


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


def read(body: dict[str, Any], made: Exchange) -> dict[str, Any]:
    """What an exchange was: its text, and when its tokens came."""
    result: dict[str, Any] = {"body": body, "hung_up": made.hung_up, "text": "", "finish_reason": None, "tokens": None,
                              "error": None, "status": 0, "times": []}
    whole = b"".join(data for _, data in made.pieces)
    head, _, rest = whole.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        result["error"] = None if made.hung_up else "no answer"
        return result
    result["status"] = int(head.split(b" ", 2)[1])
    if result["status"] != 200:
        result["error"] = rest.decode("utf-8", "replace")[:300]
        return result
    for chunk in _events(rest):
        if "error" in chunk:
            result["error"] = chunk["error"]["message"]
        for choice in chunk.get("choices", ()):
            result["text"] += choice["text"]
            result["finish_reason"] = choice["finish_reason"] or result["finish_reason"]
        if "paceline" in chunk:
            result["tokens"] = chunk["paceline"]["metrics"]["output_tokens"]
    result["times"] = [when - made.started for when, data in made.pieces if b'"choices":[{' in data]
    if not made.hung_up and result["finish_reason"] is None and result["error"] is None:
        result["error"] = "the stream ended early"
    return result


def _events(rest: bytes) -> Iterator[dict[str, Any]]:
    """The JSON of a chunked stream of events; the sizes between the chunks are skipped."""
    for line in rest.split(b"\n"):
        if line.startswith(b"data: {"):
            try:
                yield json.loads(line[6:])
            except ValueError:
                return  # cut off where the client hung up


def main() -> None:
    plan = json.load(sys.stdin)
    started, before = time.perf_counter(), _cpu()
    found = asyncio.run({"burst": burst, "soak": soak}[plan["kind"]](plan))
    elapsed, cpu = time.perf_counter() - started, _cpu() - before
    json.dump({"elapsed_s": elapsed, "cpu_s": cpu, "exchanges": [read(*pair) for pair in found]}, sys.stdout)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
