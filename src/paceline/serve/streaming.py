"""Streams: what is new after each step, as one write per client, in the words of whichever protocol it asked by."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.engine.records.deltas import Delta, SampleDelta
from paceline.request import RequestOutput
from paceline.serve.calls import CLIENT_GONE, Call, disconnected
from paceline.serve.errors import ApiError, api_error
from paceline.serve.llm import Stream

Choices = Callable[[int, SampleDelta], list[dict[str, Any]]]
"""(which prompt, what its sample gained) -> the chunks' choices."""

encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_A_NUMBER = 16
"""Characters that a number of a trace is, roughly."""


EVENTS = "text/event-stream"


class Writer(Protocol):
    """How a protocol tells what comes; one for each stream."""

    media_type: str

    def begin(self) -> str:
        """All is admitted, and nothing has been said."""

    async def write(self, place: int, samples: list[SampleDelta], ended: list[RequestOutput] | None) -> str:
        """What the samples of a prompt gained. `ended`: all outputs, when everything has ended well."""

    def end(self) -> str:
        """After everything has ended well."""

    def fail(self, problem: ApiError) -> str:
        """It is too late for a status: the stream itself says what is wrong."""


class EventStream(Response):
    """Streams a call until it ends or the client hangs up, which cancels its requests."""

    def __init__(self, call: Call, listeners: list[Stream], writer: Writer) -> None:
        super().__init__(media_type=writer.media_type, headers={"cache-control": "no-cache",
                                                                "x-accel-buffering": "no"})
        # An empty body has a length, an open stream has none.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._call = call
        self._listeners = listeners
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = asyncio.ensure_future(self._stream(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({stream, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not stream.done():
                self._call.note(CLIENT_GONE)
        finally:
            for listener in self._listeners:
                listener.close()
            for task in (stream, gone):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await stream

    async def _stream(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        begun = self._call.params.structure is None  # else not before it is compiled: a fault in it has a status
        if begun:
            await send(start)
        try:
            async for block in self._blocks():
                if not begun:
                    begun = True
                    await send(start)
                await send({"type": "http.response.body", "body": block.encode(), "more_body": True})
            end = self._writer.end()
        except OSError:  # the client hung up while it was written to
            self._call.note(CLIENT_GONE)
            return
        except Exception as problem:
            if not begun:
                raise
            end = self._writer.fail(api_error(problem, self._call.request_id))
        with suppress(OSError):
            await send({"type": "http.response.body", "body": end.encode(), "more_body": False})

    async def _blocks(self) -> AsyncIterator[str]:
        writer = self._writer
        beginning = writer.begin()
        structured = self._call.params.structure is not None
        if beginning and not structured:
            yield beginning
        outputs: list[RequestOutput | None] = [None] * len(self._listeners)
        fault: ApiError | None = None
        async for place, delta in merged(self._listeners):
            if delta.output is not None:
                outputs[place] = delta.output
                fault = fault or self._call.fault(delta.output)
            whole = [output for output in outputs if output is not None]
            ended = delta.output is not None and len(whole) == len(outputs) and fault is None
            if structured:
                if fault is not None:
                    break
                structured = False
                if beginning:
                    yield beginning
            if block := await writer.write(place, delta.samples, whole if ended else None):
                yield block
        if fault is not None:  # sent last: what all of them said until then is the client's
            raise fault


class ChunkWriter:
    """OpenAI's chunks, one for each choice."""

    media_type = EVENTS

    def __init__(self, call: Call, choices: Choices) -> None:
        self._call = call
        self._choices = choices
        # What all chunks have in common is encoded once.
        self._head = "data: " + encode(call.envelope())[:-1]
        self._usage = ',"usage":null' if call.include_usage else ""

    def begin(self) -> str:
        return ""

    async def write(self, place: int, samples: list[SampleDelta], ended: list[RequestOutput] | None) -> str:
        chunks = [f'{self._head}{self._usage},"choices":[{encode(choice)}]' for sample in samples
                  for choice in self._choices(place, sample)]
        if ended is not None:
            if self._call.include_usage:
                chunks.append(f'{self._head},"choices":[],"usage":{encode(self._call.usage(ended))}')
            chunks[-1] += f',"paceline":{await self._explained(ended)}'
        return "}\n\n".join(chunks) + "}\n\n" if chunks else ""

    def end(self) -> str:
        return "data: [DONE]\n\n"

    def fail(self, problem: ApiError) -> str:
        return f"data: {encode(problem.body())}\n\n"

    async def _explained(self, outputs: list[RequestOutput]) -> str:
        """A trace can be long: it is written beside the event loop."""
        call = self._call
        traced = sum(output.trace.numbers for output in outputs if output.trace is not None)
        if not traced:
            return encode(call.explanation(outputs))
        return await call.service.llm.texts.run(_A_NUMBER * traced, lambda: encode(call.explanation(outputs)),
                                                call.tenant.name)


async def merged(listeners: list[Stream]) -> AsyncIterator[tuple[int, Delta]]:
    """What any of them hears, as it comes. One that fails says so when the others have ended too."""
    if len(listeners) == 1:
        async for delta in listeners[0]:
            yield 0, delta
        return
    problem: BaseException | None = None
    waiting = {asyncio.ensure_future(anext(listener)): place for place, listener in enumerate(listeners)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                # Asked for, not raised: what passes this frame keeps it, and so its task and the request, until the
                # collector comes.
                place, failure = waiting.pop(task), task.exception()
                if failure is None:
                    waiting[asyncio.ensure_future(anext(listeners[place]))] = place
                    yield place, task.result()
                elif not isinstance(failure, StopAsyncIteration):
                    problem = problem or failure
        if problem is not None:
            raise problem
    finally:
        for task in waiting:
            task.cancel()
