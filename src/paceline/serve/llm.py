"""What the server needs of what it serves, whether the engine is in this process or in others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from paceline.config import EngineConfig
from paceline.engine.admission import Prepared
from paceline.engine.records.deltas import Delta
from paceline.engine.records.record import Record
from paceline.models.chat import ChatTemplate
from paceline.models.tokenizer import Tokenizer
from paceline.request import RequestOutput, SamplingParams, Tenant
from paceline.speculation.spec import Speculation
from paceline.text_threads import TextThreads


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Names(Protocol):
    @property
    def names(self) -> list[str]: ...


class ServedModel(Protocol):
    """The model as far as clients' words are read: what makes a request of them. An Engine is one; weights need not be
    here."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def chat(self) -> ChatTemplate | None: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def revision(self) -> str: ...

    @property
    def speculation(self) -> Speculation | None: ...

    @property
    def adapters(self) -> Names: ...

    @property
    def kernels(self) -> Named: ...

    def render(self, messages: Sequence[Mapping[str, Any]], *, parse_special: bool = False,
               max_prompt_len: int | None = None, **template: Any) -> list[int]: ...

    def prepare(self, prompt: str | list[int], params: SamplingParams, like: Prepared | None = None) -> Prepared: ...


class Stream(Protocol):
    """A request that was admitted: what is new of it, until it ends."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def __anext__(self) -> Delta: ...

    def close(self) -> None:
        """Stop listening; a request that still runs is cancelled."""


class Serving(Protocol):
    """What a server does with all it serves together, whether that is one model or several."""

    @property
    def live(self) -> int: ...

    @property
    def live_ids(self) -> list[str]: ...

    @property
    def alive(self) -> bool: ...

    @property
    def outage(self) -> str | None: ...

    def cancel_all(self, reason: str = "cancelled") -> None: ...

    def close(self) -> None: ...


class ServedLLM(Serving, Protocol):
    """What answers requests for a model. AsyncLLM does, with an engine of its own."""

    on_end: Callable[[Record], None]
    """Called with every request that has ended."""

    @property
    def engine(self) -> ServedModel: ...

    @property
    def texts(self) -> TextThreads: ...

    async def stream(self, prompt: Any, params: SamplingParams | None = None, *, speculation: Any = ...,
                     request_id: str | None = None, adapter: str | None = None,
                     tenant: Tenant | None = None) -> Stream: ...

    async def complete(self, prompt: Any, params: SamplingParams | None = None, *, speculation: Any = ...,
                       request_id: str | None = None, adapter: str | None = None,
                       tenant: Tenant | None = None) -> RequestOutput: ...
