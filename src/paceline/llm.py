"""LLM and AsyncLLM: the face for Python programs. One runs the engine in the caller's thread, one beside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.config import EngineOptions
from paceline.engine.build import build_engine
from paceline.engine.core import Engine
from paceline.engine.outputs import Record
from paceline.errors import PacelineError, RequestError
from paceline.request import Completion, RequestOutput, SamplingParams

Prompt = str | list[int]
Message = Mapping[str, Any]
Progress = Callable[[str, int, int | None], None]


class LLM:
    """A model ready to generate.

    `model` is a folder, a .gguf file, a hub id, a known short name, or None for the default model. Unknown options
    and features of later versions are refused, never ignored.
    """

    def __init__(self, model: str | None = None, *, device: str = "auto", dtype: str = "auto",
                 quantization: str | None = None, kv_dtype: str = "auto", speculation: Any = None,
                 deterministic: bool = False, max_model_len: int | None = None, block_size: int = 16,
                 kv_blocks: int | None = None, max_batch_tokens: int | None = None, max_num_seqs: int | None = None,
                 enable_prefix_caching: bool = True, progress: Progress | None = None, **more: Any) -> None:
        """`more`: the rarer fields of EngineOptions. `progress(stage, done, total)` hears of long work."""
        options = EngineOptions.of(
            model=model, device=device, dtype=dtype, quantization=quantization, kv_dtype=kv_dtype,
            speculation=speculation, deterministic=deterministic, max_model_len=max_model_len, block_size=block_size,
            kv_blocks=kv_blocks, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching, **more)
        self.engine: Engine = build_engine(options, progress)

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Around an engine that was put together by hand (a model made in memory, a test)."""
        llm = cls.__new__(cls)
        llm.engine = engine
        return llm

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | list[SamplingParams] | None = None,
                 *, speculation: Any = ...) -> list[RequestOutput]:
        """All prompts at once, outputs in their order. `speculation` (one for all, or a list) overrides the default.

        A request that cannot be served fails alone: its output has `error` set. Only when no request of the call
        can be served is the first error raised.
        """
        batch = _as_batch(prompts)
        params_of = _spread(params if params is not None else SamplingParams(), len(batch), "params")
        spec_of = _spread(speculation, len(batch), "speculation")
        outputs: list[RequestOutput | None] = [None] * len(batch)
        places: dict[str, int] = {}
        refusal: PacelineError | None = None
        for place, (prompt, own, wish) in enumerate(zip(batch, params_of, spec_of)):
            try:
                places[self.engine.add(prompt, own, speculation=wish)] = place
            except PacelineError as problem:
                refusal = refusal or problem
                outputs[place] = _refused(prompt, problem, place)
        if refusal is not None and not places:
            raise refusal
        try:
            while places:
                for record in self.engine.step():
                    if record.open == 0 and record.request.id in places:
                        outputs[places.pop(record.request.id)] = self.engine.take(record.request.id).snapshot()
        finally:
            for request_id in places:  # interrupted: leave nothing behind
                self.engine.cancel(request_id)
                self.engine.take(request_id)
        return [output for output in outputs if output is not None]

    def chat(self, messages: list[Message] | list[list[Message]], params: SamplingParams | list[SamplingParams] | None
             = None, *, speculation: Any = ..., **template: Any) -> list[RequestOutput]:
        """Like generate, on one conversation or a list of them, through the model's chat template."""
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        prompts = [self.render(conversation, **template) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, params, speculation=speculation)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: Any = ...
               ) -> Iterator[RequestOutput]:
        """Snapshots as the text grows; leaving the loop early cancels the request."""
        request_id = self.engine.add(prompt, params or SamplingParams(), speculation=speculation)
        record = self.engine.record(request_id)
        seen = 0
        try:
            while True:
                tokens = record.metrics.output_tokens
                if tokens > seen or record.open == 0:
                    seen = tokens
                    yield record.snapshot()
                    if record.open == 0:
                        return
                else:
                    self.engine.step()
        finally:
            self.engine.cancel(request_id)
            self.engine.take(request_id)

    def stream_chat(self, messages: list[Message], params: SamplingParams | None = None, *, speculation: Any = ...,
                    **template: Any) -> Iterator[RequestOutput]:
        return self.stream(self.render(messages, **template), params, speculation=speculation)

    def render(self, messages: list[Message], **template: Any) -> list[int]:
        """A conversation as the token ids the model was trained to see."""
        return self.engine.render(messages, **template)


class AsyncLLM:
    """The engine in a thread of its own; requests come and go from any number of coroutines."""

    def __init__(self, model: str | None = None, *, progress: Progress | None = None, engine: Engine | None = None,
                 **options: Any) -> None:
        self.engine: Engine = engine or build_engine(EngineOptions.of(model=model, **options), progress)
        self._inbox: list[Callable[[], None]] = []
        self._listeners: dict[str, Callable[[RequestOutput], None]] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="paceline-engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: Any = ...,
                       request_id: str | None = None) -> AsyncIterator[RequestOutput]:
        """Snapshots as the text grows; leaving the loop or cancelling the task cancels the request."""
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[RequestOutput] = asyncio.Queue()
        admitted: asyncio.Future[str] = loop.create_future()

        def deliver(output: RequestOutput) -> None:
            loop.call_soon_threadsafe(news.put_nowait, output)

        def admit() -> None:
            try:
                name = self.engine.add(prompt, params or SamplingParams(), speculation=speculation,
                                       request_id=request_id)
            except Exception as problem:
                loop.call_soon_threadsafe(_set_exception, admitted, problem)
                return
            self._listeners[name] = deliver
            loop.call_soon_threadsafe(_set_result, admitted, name)

        self._post(admit)
        name = await admitted
        try:
            while True:
                output = await news.get()
                yield output
                if output.finished:
                    return
        finally:
            self._post(lambda: self._drop(name))

    async def chat(self, messages: list[Message], params: SamplingParams | None = None, *, speculation: Any = ...,
                   **template: Any) -> AsyncIterator[RequestOutput]:
        prompt = self.engine.render(messages, **template)
        async for output in self.generate(prompt, params, speculation=speculation):
            yield output

    def close(self) -> None:
        """Stop the thread; live requests are cancelled."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            if self._closing:
                raise RequestError("This AsyncLLM is closed; make a new one.")
            self._inbox.append(action)
            self._wake.notify()

    def _drop(self, name: str) -> None:
        if self._listeners.pop(name, None) is not None:
            self.engine.cancel(name)
            self.engine.take(name)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not self._inbox and not self._closing and not self.engine.has_work:
                    self._wake.wait()
                actions, self._inbox = self._inbox, []
                closing = self._closing
            for action in actions:
                action()
            if closing:
                for name in list(self._listeners):
                    self._drop(name)
                return
            for record in self.engine.step():
                self._deliver(record)

    def _deliver(self, record: Record) -> None:
        listener = self._listeners.get(record.request.id)
        if listener is not None:
            listener(record.snapshot())
            if record.open == 0:
                self._listeners.pop(record.request.id)
                self.engine.take(record.request.id)


def _set_result(future: asyncio.Future[str], value: str) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[str], problem: Exception) -> None:
    if not future.done():
        future.set_exception(problem)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a string, or a list of ids) or a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _spread(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts: give one, or one for each.", name)
    return value


def _refused(prompt: Prompt, problem: PacelineError, place: int) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    ids = prompt if isinstance(prompt, list) else []
    return RequestOutput(f"refused-{place}", text, ids, [Completion(0, finish_reason="error")], finished=True,
                         error=problem)
