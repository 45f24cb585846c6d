"""One streamed request over one connection, at little cost: bytes are noted as they come and read when all is over."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

END = b"\r\n0\r\n\r\n"
"""The last piece of a chunked body."""
SAID = 300
"""Characters of an error that are kept."""

Piece = tuple[float, bytes]
Written = dict[str, dict[tuple[int, ...], str]]
"""By kind and choice; of calls by choice, call, and the place in CALL."""
CALL = ("name", "arguments")


class Exchange(asyncio.Protocol):
    """`hang_up_after`: pieces of an answer after which the client leaves."""

    def __init__(self, request: bytes, hang_up_after: int | None = None) -> None:
        self.pieces: list[Piece] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started = 0.0
        self.hung_up = False
        self._request = request
        self._hang_up_after = hang_up_after
        self._tail = b""
        self._left: int | None = None
        """Bytes still to come, where the head has said how many."""
        self._transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.started = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        self._tail = (self._tail + data[-len(END):])[-len(END):]
        if self._tail == END or self._came_to_its_length(data):
            self._transport.close()
        elif self._hang_up_after is not None and len(self.pieces) > self._hang_up_after:
            self.hung_up = True
            self._transport.abort()

    def _came_to_its_length(self, data: bytes) -> bool:
        """Of an answer whose head tells its length: as errors do. Others end as chunks do, or with their connection."""
        if self._left is not None:
            self._left -= len(data)
        elif len(self.pieces) == 1:
            head, found, rest = data.partition(b"\r\n\r\n")
            length = _field(head, b"content-length") if found else b""
            if length.isdigit():
                self._left = int(length) - len(rest)
        return self._left is not None and self._left <= 0

    def end(self) -> None:
        """Hang up, if it is not over."""
        self._transport.abort()

    def read(self) -> dict[str, Any]:
        return read(self)

    def connection_lost(self, problem: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def encode(host: str, body: Mapping[str, Any], path: str = "/v1/completions",
           headers: Mapping[str, str] | None = None) -> bytes:
    content = json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    return (f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{more}"
            f"connection: close\r\ncontent-length: {len(content)}\r\n\r\n").encode() + content


def read(made: Exchange) -> dict[str, Any]:
    """What an exchange was: its text, when its pieces came, what the server counted. `tokens`: None where it told
    none; `times`: of every event with text in it, in seconds after the request was sent. `thoughts`: what a model wrote
    before its text, where the server tells that apart; `calls`: of tools, names and arguments. Several choices, and
    calls, follow one another, whoever came first."""
    result: dict[str, Any] = {"hung_up": made.hung_up, "text": "", "thoughts": "", "calls": "", "finish_reason": None,
                              "tokens": None, "usage": None, "error": None, "status": 0, "times": []}
    written: Written = {"text": {}, "thoughts": {}, "calls": {}}
    raw = b"".join(data for _, data in made.pieces)
    head, _, rest = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1."):
        result["error"] = None if made.hung_up else "no answer"
        return result
    result["status"] = int(head.split(b" ", 2)[1])
    chunked = b"chunked" in _field(head, b"transfer-encoding")
    pieces = _without(len(raw) - len(rest), made.pieces)
    try:
        body = list(_dechunked(pieces) if chunked else pieces)
        if result["status"] != 200:
            result["error"] = _message(b"".join(data for _, data in body))
        else:
            _read_events(body, result, written, made.started)
            if not made.hung_up and result["finish_reason"] is None and result["error"] is None:
                result["error"] = "the stream ended early"
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as problem:
        result["error"] = f"the answer is not a stream of completions ({type(problem).__name__}: {problem})"[:SAID]
    return result | {kind: "".join(by[index] for index in sorted(by)) for kind, by in written.items()}


def _read_events(body: Iterable[Piece], result: dict[str, Any], written: Written, started: float) -> None:
    for when, line in _lines(body):
        content = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or not content:
            continue
        if content == b"[DONE]":
            result["finish_reason"] = result["finish_reason"] or "done"
            continue
        try:
            event = json.loads(content)
        except ValueError:
            if result["hung_up"]:
                return  # cut off where the client hung up
            raise
        if event.get("error"):
            fault = event["error"]
            result["error"] = str(fault.get("message", fault) if isinstance(fault, dict) else fault)[:SAID]
        text = False
        for choice in event.get("choices") or ():
            piece = choice.get("delta") or choice
            said = {"text": piece.get("content") or piece.get("text") or "",
                    "thoughts": piece.get("reasoning_content") or piece.get("reasoning") or ""}
            index = choice.get("index") or 0
            for kind, words in said.items():
                _add(written[kind], (index,), words)
            calls = piece.get("tool_calls") or ()
            for place, call in enumerate(calls):
                at, function = call.get("index"), call.get("function") or {}
                for part, field in enumerate(CALL):
                    _add(written["calls"], (index, place if at is None else at, part), str(function.get(field) or ""))
            text = text or any(said.values()) or bool(calls)
            result["finish_reason"] = choice.get("finish_reason") or result["finish_reason"]
        if text:
            result["times"].append(when - started)
        if event.get("usage"):
            result["usage"] = event["usage"]
            result["tokens"] = event["usage"].get("completion_tokens")
        elif "paceline" in event and result["tokens"] is None:
            result["tokens"] = event["paceline"]["metrics"]["output_tokens"]


def _add(by: dict[tuple[int, ...], str], key: tuple[int, ...], words: str) -> None:
    by[key] = by.get(key, "") + words


def _field(head: bytes, name: bytes) -> bytes:
    """Of an HTTP head, in small letters; empty where it is not there."""
    for line in head.lower().split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip() == name:
            return value.strip()
    return b""


def _message(body: bytes) -> str:
    """What an error says in OpenAI's form, or the text itself."""
    text = body.decode("utf-8", "replace")
    try:
        said = json.loads(text)
        said = said.get("error", said)
        return str(said["message"] if isinstance(said, dict) else said)[:SAID]
    except (ValueError, KeyError, AttributeError):
        return text.strip()[:SAID]


def _without(count: int, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Without the first bytes."""
    for when, data in pieces:
        if len(data) > count:
            yield when, data[count:]
        count = max(0, count - len(data))


def _dechunked(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The bodies of the chunks, as their bytes came."""
    held, left = b"", 0
    for when, data in pieces:
        held += data
        found = b""
        while held:
            if left:
                found += held[:left]
                left, held = left - len(held[:left]), held[left:]
                continue
            size, whole, rest = held.lstrip(b"\r\n").partition(b"\r\n")
            if not whole:
                break
            left, held = int(size.split(b";")[0], 16), rest
            if not left:
                if found:
                    yield when, found
                return
        if found:
            yield when, found


def _lines(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Whole lines, each with the time at which its end came."""
    held = b""
    for when, data in pieces:
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            yield when, line
