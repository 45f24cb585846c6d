"""One HTTP call: the requests it makes of the engine, and what all its answers have in common."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from paceline.engine.admission import Prepared
from paceline.errors import ConfigError, GrammarError, RequestError
from paceline.request import RequestOutput, SamplingParams, Tenant
from paceline.serve.answers import Answers
from paceline.serve.errors import ApiError, api_error, asked_in
from paceline.serve.house import House, ModelCard
from paceline.serve.llm import ServedLLM, Stream
from paceline.serve.pool import LOADED
from paceline.serve.spans import Origin
from paceline.serve.stories import told_trace
from paceline.serve.telemetry import trace_context
from paceline.serve.tokens import TokenNames
from paceline.serve.tool_formats.events import AnswerParser, Event, PlainText

log = logging.getLogger("paceline.serve")
Done = TypeVar("Done")
CLIENT_GONE = "the client has gone: its request is cancelled"
FAILED = "it failed; the server's log says why"
"""What clients hear of a drafter that was switched off."""


OPERATIONS = {"chat.completion": "chat", "chat.completion.chunk": "chat", "embedding": "embeddings"}
"""What spans call the kinds of calls."""


@dataclass
class Service(House):
    """A model that is loaded, with all that endpoints need to serve it. Where it is the only one, the house too."""

    llm: ServedLLM
    house: House | None = None
    """Where there are several models: whose this is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.house is not None:
            self.unknown_fields, self.responses = self.house.unknown_fields, self.house.responses
        self.names = TokenNames(self.llm.engine.tokenizer)
        if self.options.model_name in self.llm.engine.adapters.names:
            raise ConfigError(f"The model and an adapter are both called {self.options.model_name!r}: clients choose "
                              "by name, so call one of them otherwise.")

    @property
    def cards(self) -> list[ModelCard]:
        name, engine = self.options.model_name, self.llm.engine
        own = ModelCard(name, LOADED, None, engine.config.max_model_len, fingerprint(self))
        return [own, *(own._replace(name=adapter, parent=name) for adapter in engine.adapters.names)]

    def peek(self, name: str | None = None) -> Service | None:
        return self

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a model's name stands for; None: the model as it is, which it also is where none is
        named."""
        if not name or name == self.options.model_name:
            return None
        return None if self.card(name).parent is None else name

    def check_open(self) -> None:
        if self.house is not None:
            self.house.check_open()
        super().check_open()


@dataclass
class Call:
    """`prompts` are served side by side, each with the same parameters."""

    service: Service
    id: str
    kind: str
    """OpenAI's name for the object; stream chunks of chats have another."""
    prompts: list[Prepared]
    params: SamplingParams
    speculation: Any
    tenant: Tenant
    adapter: str | None = None
    """None: the model as it is."""
    include_usage: bool = False
    provenance: bool = False
    answers: Answers | None = None
    """How its texts are read; None: as they are."""
    request_id: str = ""
    """What the client knows it by; `id` is made of it and is nobody else's."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Those of the HTTP call."""
    at_once: int | None = None
    """Prompts that are in the engine side by side; None: all of them."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the client calls parameters that the engine has another name for."""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if self.provenance and self.params.chosen_at_end:
            raise RequestError("provenance cannot be combined with best_of or use_beam_search: it is told of the first "
                               "sample, which need not be one that is returned.", "provenance")

    @property
    def drafted(self) -> bool:
        """Whether its requests speculate."""
        wish = self.service.llm.engine.speculation if self.speculation is ... else self.speculation
        return wish is not None

    def new_parser(self) -> AnswerParser:
        """For one answer."""
        return PlainText() if self.answers is None else self.answers.parser()

    def parts(self, text: str) -> list[Event]:
        """What a whole answer consists of, in its order."""
        parser = self.new_parser()
        return [*parser.push(text), *parser.end()]

    def envelope(self) -> dict[str, Any]:
        model = self.adapter or self.service.options.model_name
        return {"id": self.id, "object": self.kind, "created": self.created, "model": model,
                "system_fingerprint": fingerprint(self.service)}

    async def complete(self) -> list[RequestOutput]:
        """All outputs, or the first error."""
        self.service.check_open()
        llm = self.service.llm
        work = enumerate(self.prompts)
        outputs: list[RequestOutput] = []
        with asked_in(self.names):
            while some := list(itertools.islice(work, self.at_once)):
                outputs += await _all([
                    llm.complete(prompt, speculation=self.speculation, request_id=self._name(place),
                                 adapter=self.adapter, tenant=self.tenant) for place, prompt in some])
        for output in outputs:
            if (fault := self.fault(output)) is not None:
                raise fault
        return outputs

    async def open(self) -> list[Stream]:
        """Admitted, all of them; the caller closes them."""
        self.service.check_open()
        llm = self.service.llm
        with asked_in(self.names):
            return await _all([
                llm.stream(prompt, speculation=self.speculation, request_id=self._name(place),
                           adapter=self.adapter, tenant=self.tenant)
                for place, prompt in enumerate(self.prompts)], lambda listener: listener.close())

    def fault(self, output: RequestOutput) -> ApiError | None:
        """A request has ended: what went wrong with it, if anything did. The log hears of it too."""
        reasons = {completion.finish_reason for completion in output.outputs}
        if (error := output.error) is not None:
            self.note("a request failed: %s", error)
            if isinstance(error, GrammarError) and self.answers is not None and self.answers.forced:
                error = GrammarError(f"No grammar can be made of these tools: {error}", "tools")
            return api_error(error).told_in(self.names)
        if "cancelled" in reasons:
            self.note("a request was ended because the server leaves")
            return ApiError(503, "The server is shutting down and ended this request early.", code="draining")
        if "timeout" in reasons:
            self.note("a request's deadline passed")
        return None

    def note(self, message: str, *values: object) -> None:
        """For the log, under the id that the client knows and the one that the engine does."""
        log.info(message, *values, extra={"request_id": self.request_id, "call_id": self.id})

    def _name(self, place: int) -> str:
        """No client's id has the sign in it that sets further prompts apart. Whoever makes spans hears whose it is."""
        name = self.id if place == 0 else f"{self.id}#{place}"
        if self.service.telemetry is not None:
            operation = OPERATIONS.get(self.kind, "text_completion")
            self.service.telemetry.expect(self.tenant.name, name, Origin(
                operation, self.envelope()["model"], self.id, trace_context(self.headers)))
        return name

    def usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(output.metrics.output_tokens if self.params.chosen_at_end  # those not returned count too
                         else sum(len(sample.token_ids) for sample in output.outputs) for output in outputs)
        predicted = [stats for output in outputs if (stats := output.speculation) and stats.method == "prediction"]
        accepted = sum(stats.accepted for stats in predicted)
        return {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.metrics.cached_tokens for output in outputs)},
            "completion_tokens_details": {
                "reasoning_tokens": self._thought(outputs),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(stats.drafted for stats in predicted) - accepted}}

    def _thought(self, outputs: Sequence[RequestOutput]) -> int:
        """How many tokens are thoughts."""
        answers, tokenizer = self.answers, self.service.llm.engine.tokenizer
        return 0 if answers is None else sum(
            answers.thought_tokens(sample.token_ids, output.prompt_token_ids, tokenizer)
            for output in outputs for sample in output.outputs)

    def explanation(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Where the seed, the draft's luck and the times are; of further prompts under "others"."""
        each = [_explain(output) for output in outputs]
        return each[0] | ({"others": each[1:]} if len(each) > 1 else {})


def fingerprint(service: Service) -> str:
    return f"paceline-{service.llm.engine.revision[:16]}"


def _explain(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics.as_dict()
    del metrics["inter_token_s"]
    fields = {"request_id": output.request_id, "seed": output.seed, "metrics": metrics,
              "speculation": None if output.speculation is None else _told(output.speculation.as_dict())}
    if output.moved is not None:
        fields["moved"] = {"times": output.moved.times, "exact": output.moved.exact}
    return fields if output.trace is None else fields | {"trace": told_trace(output.trace)}


def _told(speculation: dict[str, Any]) -> dict[str, Any]:
    """What a client hears of it. What a drafter raised is for the log."""
    return speculation | {"failure": speculation["failure"] and FAILED,
                          "dropped": dict.fromkeys(speculation["dropped"], FAILED)}


async def _all(work: list[Coroutine[Any, Any, Done]], undo: Any = None) -> list[Done]:
    """The results in order. One that fails ends the others, and what they had already done is undone."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if undo is not None and not isinstance(result, BaseException):
                undo(result)
        raise


async def unless_gone(request: Request, call: Call) -> list[RequestOutput]:
    """All outputs, as long as the client is there. One that hangs up cancels its requests."""
    task = asyncio.ensure_future(call.complete())
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            call.note(CLIENT_GONE)
            raise ApiError(499, "The client has gone.", code="client_closed_request")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def disconnected(receive: Any) -> None:
    """Returns when the client has hung up; a body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
