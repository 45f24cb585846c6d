"""The engine under test without a server: the load that a URL would get, given to an AsyncLLM of this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from paceline.async_llm import AsyncLLM
from paceline.bench.serving.exchange import SAID
from paceline.bench.serving.load import Load, Send
from paceline.errors import ConfigError, PacelineError, QueueFullError, RequestError
from paceline.request import SamplingParams

OF_HTTP = {"model", "prompt", "messages", "stream", "stream_options"}
"""Fields of a body that are no parameters of sampling."""
PARAMETERS = {spec.name for spec in fields(SamplingParams)}


class Answer:
    """One request to the engine, and when its text came (load.Sent)."""

    def __init__(self, llm: AsyncLLM, body: dict[str, Any]) -> None:
        self.started = time.perf_counter()
        self.done: asyncio.Future[None] = asyncio.ensure_future(self._run(llm, body))
        self._times: list[float] = []
        self._usage: dict[str, Any] | None = None
        self._text = ""
        self._status = 200
        self._error: str | None = None

    def end(self) -> None:
        self.done.cancel()

    def read(self) -> dict[str, Any]:
        return {"status": self._status, "error": self._error, "times": self._times, "usage": self._usage,
                "text": self._text, "thoughts": "", "calls": "",
                "tokens": None if self._usage is None else self._usage["completion_tokens"]}

    async def _run(self, llm: AsyncLLM, body: dict[str, Any]) -> None:
        try:
            await self._listen(llm, body)
        except QueueFullError as problem:
            self._status, self._error = 429, str(problem)[:SAID]
        except RequestError as problem:
            self._status, self._error = 400, str(problem)[:SAID]
        except PacelineError as problem:
            self._status, self._error = 500, str(problem)[:SAID]

    async def _listen(self, llm: AsyncLLM, body: dict[str, Any]) -> None:
        prompt: str | list[int] = body.get("prompt", "")
        if messages := body.get("messages"):
            size = sum(len(str(message.get("content"))) for message in messages)
            prompt = await llm.texts.run(size, lambda: llm.engine.render(messages), "")
        params = SamplingParams(**{name: value for name, value in body.items() if name in PARAMETERS})
        wish = {"speculation": body["speculation"]} if "speculation" in body else {}
        listener = await llm.stream(prompt, params, **wish)
        try:
            async for delta in listener:
                if any(sample.text for sample in delta.samples):
                    self._times.append(time.perf_counter() - self.started)
                if delta.output is not None:
                    self._note(delta.output)
        finally:
            listener.close()

    def _note(self, output: Any) -> None:
        self._text = "".join(sample.text for sample in output.outputs)
        metrics = output.metrics
        self._usage = {"prompt_tokens": metrics.prompt_tokens, "completion_tokens": metrics.output_tokens,
                       "prompt_tokens_details": {"cached_tokens": metrics.cached_tokens}}
        if output.error is not None:
            self._error = str(output.error)[:SAID]


class InProcess:
    """A target beside target.Target: no sockets, no JSON, and the load generator in the engine's own process."""

    kind = "engine"
    base = "this process"

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self.llm = llm
        self.model = model

    def drive(self, endpoint: str, plan: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """What was seen of a plan's requests."""
        for body in plan["bodies"][:1]:  # they differ in what they ask alone
            unknown = sorted(set(body) - OF_HTTP - PARAMETERS - {"speculation"})
            if unknown:
                raise ConfigError(f"--extra-body: the engine takes no {unknown[0]!r}; a server may.")
        load = Load([self._send(body) for body in plan["bodies"]], plan["arrivals"], plan["clients"],
                    plan["timeout_s"], progress)
        return asyncio.run(load.run())

    def _send(self, body: dict[str, Any]) -> Send:
        async def send() -> Answer:
            return Answer(self.llm, body)

        return send

    def counters(self) -> dict[str, float]:
        """As target.COUNTERS names them."""
        report = self.llm.metrics()
        totals = report["speculation"].values()
        return {"drafts": sum(total["cycles"] for total in totals),
                "drafted": sum(total["drafted"] for total in totals),
                "accepted": sum(total["accepted"] for total in totals),
                "looked_up": report["cache_looked_up_tokens"], "found": report["cache_hit_tokens"]}
