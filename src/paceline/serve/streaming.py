"""Server-sent events: what is new after each step, as one write per client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

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
DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Streams a call's chunks until it ends or the client hangs up, which cancels its requests."""

    def __init__(self, call: Call, listeners: list[Stream], choices: Choices) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache",
                                                                  "x-accel-buffering": "no"})
        # An empty body has a length, an open stream has none.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._call = call
        self._listeners = listeners
        self._choices = choices

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
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for block in self._blocks():
                await send({"type": "http.response.body", "body": block, "more_body": True})
            end = DONE
        except OSError:  # the client hung up while it was written to
            self._call.note(CLIENT_GONE)
            return
        except Exception as problem:  # too late for a status: the stream itself says what is wrong
            end = event(api_error(problem, self._call.request_id).body())
        with suppress(OSError):
            await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _blocks(self) -> AsyncIterator[bytes]:
        call = self._call
        # What all chunks have in common is encoded once.
        head = "data: " + encode(call.envelope())[:-1]
        usage = ',"usage":null' if call.include_usage else ""
        outputs: list[RequestOutput | None] = [None] * len(self._listeners)
        fault: ApiError | None = None
        async for place, delta in merged(self._listeners):
            chunks = [f'{head}{usage},"choices":[{encode(choice)}]' for sample in delta.samples
                      for choice in self._choices(place, sample)]
            if delta.output is not None:
                outputs[place] = delta.output
                fault = fault or call.fault(delta.output)
                whole = [output for output in outputs if output is not None]
                if len(whole) == len(outputs) and fault is None:
                    if call.include_usage:
                        chunks.append(f'{head},"choices":[],"usage":{encode(call.usage(whole))}')
                    chunks[-1] += f',"paceline":{await self._explained(whole)}'
            if chunks:
                yield ("}\n\n".join(chunks) + "}\n\n").encode()
        if fault is not None:  # sent last: what all of them said until then is the client's
            raise fault

    async def _explained(self, outputs: list[RequestOutput]) -> str:
        """A trace can be long: it is written beside the event loop."""
        call = self._call
        traced = sum(output.trace.numbers for output in outputs if output.trace is not None)
        if not traced:
            return encode(call.explanation(outputs))
        return await call.service.llm.texts.run(_A_NUMBER * traced, lambda: encode(call.explanation(outputs)),
                                                call.tenant.name)


def event(chunk: dict[str, Any]) -> bytes:
    return f"data: {encode(chunk)}\n\n".encode()


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
