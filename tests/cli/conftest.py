"""The command line against an LLM that answers from a script: no model is needed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

import paceline
from paceline.errors import ModelNotFoundError, PacelineError, RequestError
from paceline.request import Completion, RequestOutput, SamplingParams
from paceline.sampling.setup import Setup
from paceline.sampling.trace import Trace


class FakeLLM:
    """Tokens are the answer's characters. A prompt that contains "bad" fails alone; the model "missing" is missing."""

    answer: ClassVar[str] = "Paris is the capital of France."
    ending: ClassVar[str] = "stop"
    interrupt_after: ClassVar[int | None] = None
    """Ctrl-C arrives while this character is made."""
    last: ClassVar[FakeLLM]

    def __init__(self, model: str | None = None, *, progress: Any = None, **options: Any) -> None:
        if model == "missing":
            raise ModelNotFoundError("No model 'missing': give a folder,\na .gguf file or a known short name.")
        if progress is not None:
            progress("fetching", 10, None)
            progress("fetching", 200_000, 400_000)
            progress("reading tensors", 3, 3)
        self.options = options
        self.asked: list[Any] = []
        self.closed = 0
        FakeLLM.last = self

    def generate(self, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
        self.asked.append((prompts, params))
        return [self._output(prompt, params, len(self.answer)) for prompt in prompts]

    def chat(self, conversations: list[list[dict[str, str]]], params: SamplingParams) -> list[RequestOutput]:
        return self.generate([conversation[-1]["content"] for conversation in conversations], params)

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[RequestOutput]:
        self.asked.append((prompt, params))
        try:
            for length in range(1, len(self.answer) + 1):
                if length == self.interrupt_after:
                    signal.raise_signal(signal.SIGINT)
                yield self._output(prompt, params, length)
        finally:
            self.closed += 1

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams, *,
                    progress: Any = None) -> Iterator[RequestOutput]:
        self.asked.append([dict(message) for message in messages])
        if progress is not None:
            progress("prompt", 1, 2)
        yield from self.stream(messages[-1]["content"], params)

    def _output(self, prompt: str, params: SamplingParams, length: int) -> RequestOutput:
        error: PacelineError | None = RequestError(f"prompt {prompt!r} is bad.") if "bad" in prompt else None
        text = self.answer[:length]
        reason = self.ending if text == self.answer else None
        completions = [Completion(i, text, [ord(char) for char in text], reason, seed=7 + i) for i in range(params.n)]
        seed = 7 if params.seed is None else params.seed
        trace = Trace(Setup(model="some model"), [1, 2], params, seed) if params.trace else None
        return RequestOutput("r0", prompt, [1, 2], [] if error else completions, True, seed, error=error, trace=trace)


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """`from paceline import LLM` gives the scripted one."""
    # Not setattr: it would look the real one up first and so import the engine.
    monkeypatch.setitem(vars(paceline), "LLM", FakeLLM)
    return FakeLLM
