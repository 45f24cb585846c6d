"""Engines whose steps run on the torch device backend, and engines of the host's to compare them with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import pytest
import torch

from engine.tiny import tiny_llm, tiny_model
from paceline import LLM, SamplingParams
from paceline.engine.execute.graph_executor import GraphExecutor
from paceline.engine.execute.graphs.memory import Use
from paceline.engine.schedule.sequence import PENDING
from paceline.request import RequestOutput

PROMPTS = [[3, 14, 15, 92, 65], [2, 71, 82], [81, 8, 2, 84, 59, 4, 5, 23, 5, 3, 60]]
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.3, "seed": 8, "top_k": 9, "top_p": 0.9}]
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 11}
HEAVY: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.9}
FREE: dict[str, dict[str, Any]] = {
    "penalties": SEEDED | HEAVY | {"top_k": 3},
    "greedy penalties": {"temperature": 0.0} | HEAVY,
    "bias": SEEDED | {"logit_bias": {5: 4.0, 9: -math.inf}},
    "early stops": {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": [5], "logit_bias": {5: 50.0}},
    "allowed": SEEDED | {"allowed_token_ids": list(range(0, 90, 3)), "top_p": 0.9},
    "scores": SEEDED | {"logprobs": 3, "top_k": 20},
    "all": SEEDED | HEAVY | {"logprobs": 0, "min_p": 0.01, "logit_bias": {7: 2.0}},
}
"""What a device goes on with by itself."""
MASKED: dict[str, dict[str, Any]] = {
    "n-grams": {"temperature": 0.0, "no_repeat_ngram_size": 1},
    "n-grams and penalties": SEEDED | HEAVY | {"no_repeat_ngram_size": 2, "logprobs": 2},
}
"""Where the host says before each sample what it masks."""


def made(repeat: int = 8, name: str = "llama", tokenizer: Any = None, **options: Any) -> LLM:
    """On the device; `repeat`: how often a step that can run by itself does, 0: nothing is captured."""
    options = {"kv_blocks": 40, "max_num_seqs": 8, "capture": "lazy" if repeat else "never"} | options
    llm = tiny_llm(tiny_model(name), tokenizer, kernels="stepped", **options)
    assert isinstance(llm.engine.executor, GraphExecutor) == bool(repeat)
    if repeat:
        executor_of(llm).how_often = lambda *_: repeat
    return llm


def on_host(name: str = "llama", tokenizer: Any = None, **options: Any) -> LLM:
    """The reference, step by step."""
    options = {"kv_blocks": 40, "max_num_seqs": 8} | options
    return tiny_llm(tiny_model(name), tokenizer, kernels="reference", **options)


def executor_of(llm: LLM) -> Any:
    """Any: tests reach inside."""
    executor = llm.engine.executor
    assert isinstance(executor, GraphExecutor)
    return executor


def lacks(llm: LLM, use: Use) -> bool:
    """Whether it was given up for want of memory."""
    return use in executor_of(llm).graphs.memory._lacking


def alone_on_device(llm: LLM) -> LLM:
    """Fails where the host would sample from a step's logits."""

    class Refused:
        def process(self, *_: Any) -> None:
            raise AssertionError("the host was asked to sample")

    decider: Any = llm.engine.decider
    decider._pipeline = Refused()
    return llm


def texts(llm: LLM, params: Sequence[SamplingParams]) -> list[tuple[list[int], str | None]]:
    found = [(out.outputs[0].token_ids, out.outputs[0].finish_reason) for out in llm.generate(PROMPTS, list(params))]
    assert llm.engine.cache.usage().used == 0, "nobody holds blocks"
    return found


def outs(llm: LLM, wishes: Sequence[dict[str, Any]], count: int = 9, speculation: Any = None) -> list[RequestOutput]:
    params = [SamplingParams(**{"max_tokens": count, "ignore_eos": True} | wish) for wish in wishes]
    found = llm.generate(PROMPTS[:len(wishes)], params, speculation=speculation)
    assert llm.engine.cache.usage().used == 0, "nobody holds blocks"
    return found


def same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput], tolerance: float = 0.0) -> None:
    """`tolerance`: of scores, where the logits are another backend's."""
    for one, wanted in zip(found, expected, strict=True):
        mine, other = one.outputs[0], wanted.outputs[0]
        assert (mine.token_ids, mine.finish_reason) == (other.token_ids, other.finish_reason)
        assert str(one.error) == str(wanted.error)
        assert (mine.logprobs is None) == (other.logprobs is None)
        for left, right in zip(mine.logprobs or [], other.logprobs or [], strict=True):
            assert (left.token, left.rank, list(left.top)) == (right.token, right.rank, list(right.top))
            # The host's own numbers, which a device hands over as float32.
            ours, theirs = (torch.tensor([one.raw, one.processed, *one.top.values()]) for one in (left, right))
            assert torch.allclose(ours, theirs, rtol=0.0, atol=tolerance, equal_nan=True)


def run(llm: LLM) -> None:
    """Until nobody is left."""
    while llm.engine.has_work:
        llm.engine.step()


def watched(llm: LLM) -> Counter[str]:
    """How often a forward without drafts was launched, and how often before the token it continues was known on the
    host."""
    executor, seen = executor_of(llm), Counter[str]()
    launch = executor.graphs.prefill.launch

    def counted(forward: Any, batch: Any) -> Any:
        seen["launched"] += 1
        seen["ahead"] += bool((batch.tokens == PENDING).any())
        assert sum(flight.started for flight in executor._flight) <= 1
        return launch(forward, batch)

    executor.graphs.prefill.launch = counted
    return seen


def scarce(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: Container[int]) -> Counter[str]:
    """There is no memory in these calls of a function, counted from 1; how often it was called."""
    function, count = getattr(owner, name), Counter[str]()

    def short(*given: Any, **more: Any) -> Any:
        count["calls"] += 1
        if count["calls"] in calls:
            raise torch.OutOfMemoryError("no memory")
        return function(*given, **more)

    monkeypatch.setattr(owner, name, short)
    return count


def full(*_: Any, **__: Any) -> Any:
    """In place of what takes memory."""
    raise torch.OutOfMemoryError("no memory")
