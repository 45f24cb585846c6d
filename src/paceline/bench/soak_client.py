"""A soak's clients: one request over one connection, by those who wait, read slowly, hang up or never finish asking."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

PIECE = 1 << 16
SIPS = 64
"""Bytes that a slow client reads at a time, and the receive buffer it asks for."""


class Manner(Enum):
    PATIENT = "patient"
    SLOW = "slow"
    """Reads a little now and then, in the end everything."""
    LEAVES = "leaves"
    """Hangs up at some moment, perhaps before anything came."""
    UNFINISHED = "unfinished"
    """Hangs up in the middle of its own request."""
    DEAF = "deaf"
    """Reads nothing for a while, then hangs up."""


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    """0: nothing, or no whole head."""
    texts: list[str] = field(default_factory=list)
    """Of each choice, tool calls as JSON."""
    error: str | None = None
    whole: bool = False
    """It came to its end."""
    seconds: float = 0.0
    first: float | None = None
    """Seconds to the first piece of a body."""


async def send(host: str, port: int, path: str, content: bytes, key: str | None, manner: Manner,
               luck: random.Random, patience: float) -> Answer:
    """`patience`: seconds within which those who leave do."""
    started, answer, parts = time.perf_counter(), Answer(), []
    head = (f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"{f'authorization: Bearer {key}' + chr(13) + chr(10) if key else ''}"
            f"content-length: {len(content)}\r\n\r\n").encode()
    reader, writer = await asyncio.open_connection(sock=await _connect(host, port, manner))
    try:
        whole = head + content
        writer.write(whole[:luck.randrange(1, len(whole))] if manner is Manner.UNFINISHED else whole)
        with suppress(ConnectionError):
            await writer.drain()
        if manner in (Manner.UNFINISHED, Manner.DEAF):
            await asyncio.sleep(luck.uniform(0.0, patience))
            return answer
        left = luck.uniform(0.0, patience) if manner is Manner.LEAVES else None
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(left):
                while piece := await reader.read(SIPS if manner is Manner.SLOW else PIECE):
                    if answer.first is None:
                        answer.first = time.perf_counter() - started
                    parts.append(piece)
                    if manner is Manner.SLOW and luck.random() < 0.05:
                        await asyncio.sleep(0.05)
                answer.whole = True
    finally:
        writer.transport.abort()
        answer.seconds = time.perf_counter() - started
    if answer.whole:
        _read(b"".join(parts), answer)
    return answer


async def _connect(host: str, port: int, manner: Manner) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setblocking(False)
    if manner in (Manner.SLOW, Manner.DEAF):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SIPS)
    try:
        await asyncio.get_running_loop().sock_connect(made, (host, port))
    except BaseException:
        made.close()
        raise
    return made


def _read(raw: bytes, answer: Answer) -> None:
    head, found, rest = raw.partition(b"\r\n\r\n")
    if not found or not head.startswith(b"HTTP/1.1 "):
        answer.whole = False
        return
    answer.status = int(head.split(b" ", 2)[1])
    chunked = b"transfer-encoding: chunked" in head.lower()
    body = b"".join(_chunks(rest)) if chunked else rest
    if answer.status != 200:
        answer.error = body.decode("utf-8", "replace")[:300]
    elif b"text/event-stream" in head.lower():
        _read_stream(body, answer)
    else:
        said = json.loads(body)
        answer.texts = [_text(choice.get("message") or choice) for choice in said.get("choices", ())]


def _chunks(rest: bytes) -> Iterator[bytes]:
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size or b"0", 16)
        if not length:
            return
        yield rest[:length]
        rest = rest[length + 2:]


def _text(said: dict[str, Any]) -> str:
    calls = [[one["function"]["name"], one["function"]["arguments"]] for one in said.get("tool_calls") or ()]
    return (said.get("content") or said.get("text") or "") + (json.dumps(calls) if calls else "")


def _read_stream(body: bytes, answer: Answer) -> None:
    texts: dict[int, str] = {}
    calls: dict[int, dict[int, list[str]]] = {}
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    answer.whole = bool(events) and events[-1].strip() == b"[DONE]"
    for event in events[:-1]:  # the last is that, or may be cut off
        said = json.loads(event)
        if "error" in said:
            answer.error = said["error"]["message"]
        for choice in said.get("choices", ()):
            piece = choice.get("delta") or choice
            texts[choice["index"]] = texts.get(choice["index"], "") + (piece.get("content") or piece.get("text") or "")
            for one in piece.get("tool_calls") or ():
                call = calls.setdefault(choice["index"], {}).setdefault(one["index"], ["", ""])
                call[0] += one["function"].get("name") or ""
                call[1] += one["function"].get("arguments") or ""
    answer.texts = [text + (json.dumps([calls[index][at] for at in sorted(calls[index])]) if index in calls else "")
                    for index, text in sorted(texts.items())]
