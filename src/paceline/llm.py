"""LLM: the face for Python programs. It runs the engine in the caller's thread; AsyncLLM runs it beside.

Several threads may call it: they take turns with the engine's steps, and each step is everybody's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import EngineOptions
from paceline.engine.admission import check_params, check_streamed
from paceline.engine.build import build_engine
from paceline.engine.core import Engine
from paceline.engine.records.record import Record
from paceline.errors import PacelineError, RequestError
from paceline.request import Completion, RequestOutput, SamplingParams
from paceline.turns import Turns
from paceline.watch.watch import DriftWatch

Prompt = str | list[int]
Message = Mapping[str, Any]
Progress = Callable[[str, int, int | None], None]


class LLM:
    """A model ready to generate.

    `model` is a folder, a .gguf file, a short name or a hub id that was pulled, or None for the default model. Unknown
    options and features of later versions are refused, never ignored.
    """

    def __init__(self, model: str | None = None, *, device: str = "auto", dtype: str = "auto",
                 quantization: str | None = None, kv_dtype: str = "auto", speculation: Any = None,
                 deterministic: bool | None = None, max_model_len: int | None = None, block_size: int = 16,
                 kv_blocks: int | None = None, max_batch_tokens: int | None = None, max_num_seqs: int | None = None,
                 enable_prefix_caching: bool = True, adapters: Mapping[str, str] | None = None,
                 progress: Progress | None = None, **more: Any) -> None:
        """`adapters`: folders of PEFT adapters by the names that generate() takes. `more`: the rarer fields of
        EngineOptions. `progress(stage, done, total)` hears of long work."""
        options = EngineOptions.of(
            model=model, device=device, dtype=dtype, quantization=quantization, kv_dtype=kv_dtype,
            speculation=speculation, deterministic=deterministic, max_model_len=max_model_len, block_size=block_size,
            kv_blocks=kv_blocks, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching, adapters=adapters, **more)
        self._face(build_engine(options, progress))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Around an engine that was put together by hand (a model made in memory, a test)."""
        llm = cls.__new__(cls)
        llm._face(engine)
        return llm

    def _face(self, engine: Engine) -> None:
        self.engine = engine
        self.watch = DriftWatch.of(engine)
        """Where the options ask for it. Its shadows run at the end of a call, if nobody else's does."""
        self._turns = Turns()
        self._calls: dict[str, tuple[_Batch, int]] = {}
        """Requests of calls that wait for them, by their ids: whose they are, and which."""
        self._left: deque[str] = deque()
        """Streams that nobody reads any more. The garbage collector may find one in the middle of a step."""

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | list[SamplingParams] | None = None,
                 *, speculation: Any = ..., adapter: str | list[str | None] | None = None) -> list[RequestOutput]:
        """All prompts at once, outputs in their order. `speculation` (one for all, or a list) overrides the default;
        `adapter` (likewise) names a loaded adapter.

        A request that cannot be served fails alone: its output has `error` set. Only when no request of the call
        can be served is the first error raised. More prompts than max_queue are fed as the queue drains.
        """
        return self._serve(_as_batch(prompts), params, speculation, adapter)

    def _serve(self, batch: Sequence[Prompt | PacelineError], params: Any, speculation: Any,
               adapter: Any) -> list[RequestOutput]:
        """Where an error stands in the place of a prompt, that request has already failed."""
        params_of = _spread(params if params is not None else SamplingParams(), len(batch), "params")
        spec_of = _spread(speculation, len(batch), "speculation")
        adapter_of = _spread(adapter, len(batch), "adapter")
        call = _Batch([None] * len(batch), set())
        refusals: list[PacelineError] = []
        try:
            for place, (prompt, own, wish, name) in enumerate(zip(batch, params_of, spec_of, adapter_of)):
                try:
                    if isinstance(prompt, PacelineError):
                        raise prompt
                    self._admit(call, place, prompt, own, wish, name)
                except PacelineError as problem:
                    refusals.append(problem)
                    call.outputs[place] = _refused(prompt, problem, place)
            if refusals and len(refusals) == len(batch):
                raise refusals[0]
            while call.open:
                with self._turns:
                    if call.open:  # others may have stepped to its end
                        self._step()
            self._run_shadows()
        finally:
            if call.open:  # interrupted: leave nothing behind
                with self._turns:
                    for request_id in call.open:
                        del self._calls[request_id]
                        self.engine.cancel(request_id)
                        self.engine.take(request_id)
        return [output for output in call.outputs if output is not None]

    def _run_shadows(self) -> None:
        while self.watch is not None and self.watch.pending:
            with self._turns:
                if self._calls:  # they run with those
                    return
                self._step()
                if not self.watch.running:  # there is no room for the next one: later
                    return

    def _admit(self, call: _Batch, place: int, prompt: Prompt, params: Any, speculation: Any, adapter: Any) -> None:
        """Add a request as soon as there is room for it."""
        ready = self.engine.prepare(prompt, params)  # other threads step meanwhile
        while True:
            with self._turns:
                if self.engine.scheduler.has_room(params.samples) or not self.engine.has_work:
                    request_id = self.engine.admit(ready, speculation=speculation, adapter=adapter)
                    call.open.add(request_id)
                    self._calls[request_id] = call, place
                    return
                self._step()

    def _drop_left(self) -> None:
        while self._left:
            request_id = self._left.popleft()
            self.engine.cancel(request_id)
            self.engine.take(request_id)

    def _step(self) -> None:
        """One step; what finished goes to the call that waits for it."""
        try:
            if self.watch is not None:
                self.watch.make_way()
            for record in self.engine.step():
                self._hand_over(record)
            if self.watch is not None:
                self.watch.attend()
        except BaseException:  # Ctrl-C: it ends requests of other threads too, and nobody else tells them
            for request_id in list(self._calls):
                self._hand_over(self.engine.record(request_id))
            raise
        finally:
            self._drop_left()  # behind the step: there may be no other

    def _hand_over(self, record: Record) -> None:
        request_id = record.request.id
        if record.open == 0 and request_id in self._calls:
            call, place = self._calls.pop(request_id)
            call.outputs[place] = self.engine.take(request_id).snapshot()
            call.open.remove(request_id)

    def chat(self, messages: list[Message] | list[list[Message]], params: SamplingParams | list[SamplingParams] | None
             = None, *, speculation: Any = ..., adapter: str | list[str | None] | None = None,
             **template: Any) -> list[RequestOutput]:
        """Like generate, on one conversation or a list of them, through the model's chat template."""
        several = isinstance(messages, list) and messages and isinstance(messages[0], list)
        conversations: list[Any] = list(messages) if several else [messages]
        params_of = _spread(params if params is not None else SamplingParams(), len(conversations), "params")
        prompts: list[Prompt | PacelineError] = []
        for conversation, own in zip(conversations, params_of):
            try:
                check_params(own)
                prompts.append(self.render(conversation, **{"parse_special": own.parse_special, **template}))
            except PacelineError as problem:
                prompts.append(problem)
        return self._serve(prompts, params, speculation, adapter)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: Any = ...,
               adapter: str | None = None, progress: Progress | None = None) -> Iterator[RequestOutput]:
        """Snapshots as the text grows; leaving the loop early cancels the request. Until the first token
        `progress("prompt", done, total)` hears after each step how much of the prompt is computed."""
        check_streamed(params or SamplingParams())
        ready = self.engine.prepare(prompt, params or SamplingParams())
        with self._turns:
            request_id = self.engine.admit(ready, speculation=speculation, adapter=adapter)
            record = self.engine.record(request_id)
        seen = 0
        try:
            while True:
                with self._turns:
                    if record.metrics.output_tokens == seen and record.open:
                        self._step()
                    tokens, ended = record.metrics.output_tokens, record.open == 0
                    news = record.snapshot() if tokens > seen or ended else None
                    done = self._read_of(record) if progress is not None and not seen else 0
                if progress is not None and done:
                    progress("prompt", done, record.metrics.prompt_tokens)
                if news is not None:
                    seen = tokens
                    yield news
                    if ended:
                        return
        finally:
            self._left.append(request_id)
            if self._turns.can_be_mine:
                with self._turns:
                    self._drop_left()

    def _read_of(self, record: Record) -> int:
        """Tokens of its prompt that are computed, or were found in the cache."""
        return max((min(seq.computed, seq.prompt_len) for seq in self.engine.scheduler.running
                    if seq.record is record), default=0)

    def stream_chat(self, messages: list[Message], params: SamplingParams | None = None, *, speculation: Any = ...,
                    adapter: str | None = None, progress: Progress | None = None,
                    **template: Any) -> Iterator[RequestOutput]:
        params = params or SamplingParams()
        check_params(params)
        prompt = self.render(messages, **{"parse_special": params.parse_special, **template})
        return self.stream(prompt, params, speculation=speculation, adapter=adapter, progress=progress)

    def load_adapter(self, name: str, path: str) -> None:
        """A further PEFT adapter (a folder, or a hub id) that requests may name from now on. A model that native code
        would run whole has to be made with `adapters`, be it {}."""
        with self._turns:
            self.engine.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Requests may not name this adapter any more; those that run with it go on. Its memory is the next one's."""
        with self._turns:
            self.engine.adapters.unload(name)

    def render(self, messages: list[Message], **template: Any) -> list[int]:
        """A conversation as the token ids the model was trained to see."""
        return self.engine.render(messages, **template)

    def metrics(self) -> dict[str, Any]:
        """What the engine has done since it started and how full it is now; see Engine.report."""
        with self._turns:
            return self.engine.report()


@dataclass(slots=True)
class _Batch:
    """One call of generate()."""

    outputs: list[RequestOutput | None]
    open: set[str]
    """Requests that have not ended."""


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a string, or a list of ids) or a list of prompts."""
    if isinstance(prompts, str | bytes):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be a text, a list of token ids or a list of those, got "
                           f"{type(prompts).__name__}.", "prompt")
    batch: list[Any] = list(prompts)
    return [batch] if batch and all(isinstance(item, int) for item in batch) else batch


def _spread(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts: give one, or one for each.", name)
    return value


def _refused(prompt: Prompt | PacelineError, problem: PacelineError, place: int) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    ids = prompt if isinstance(prompt, list) else []
    return RequestOutput(f"refused-{place}", text, ids, [Completion(0, finish_reason="error")], finished=True,
                         error=problem)
