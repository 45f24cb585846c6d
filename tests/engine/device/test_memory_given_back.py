"""What is given up for want of memory lets go of all that it held, whoever asked for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.device.on_device import PROMPTS, executor_of, full, lacks, made, on_host, outs, run, same
from paceline import LLM, SamplingParams
from paceline.engine.execute.graphs.logits_buffer import LogitsBuffer, LogitsBuffers
from paceline.engine.execute.graphs.memory import GraphMemory, Use

GREEDY: dict[str, Any] = {"temperature": 0.0}
SCORED: dict[str, Any] = GREEDY | {"logprobs": 1}
"""Runs step by step."""
NGRAM: dict[str, Any] = {"method": "ngram", "adaptive": False, "k": 4}


def right_drafts(tokens: list[int]) -> dict[str, Any]:
    return {"method": "oracle", "k": 3, "tokens": tokens}


class Kept:
    """The logits' buffers that were made for an engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[weakref.ref[LogitsBuffer]] = []
        make = LogitsBuffer.__init__

        def noted(buffer: LogitsBuffer, *given: Any) -> None:
            make(buffer, *given)
            self._made.append(weakref.ref(buffer))

        monkeypatch.setattr(LogitsBuffer, "__init__", noted)

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(one() is not None for one in self._made)


def captured(llm: LLM) -> dict[Use, int]:
    graphs = executor_of(llm).graphs
    return {Use.DECODE: len(graphs.decode._captured), Use.PREFILL: len(graphs.prefill._forward.captured),
            Use.VERIFY: len(graphs.verify._forward.captured)}


def no_more_captures(llm: LLM) -> None:
    executor_of(llm).graphs.decode._graphs.capture = full  # shared by all of the target's steps


def test_repeated_steps(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, host = made(4), on_host()
    same(outs(llm, [GREEDY] * 2, 9, NGRAM), outs(host, [GREEDY] * 2, 9))
    assert captured(llm)[Use.DECODE] > 0
    monkeypatch.setattr(executor_of(llm).graphs.decode, "_capture", full)
    same(outs(llm, [GREEDY] * 3, 9), outs(host, [GREEDY] * 3, 9))
    assert lacks(llm, Use.DECODE) and captured(llm)[Use.DECODE] == 0
    assert not lacks(llm, Use.PREFILL) and captured(llm)[Use.PREFILL] > 0, "those are still replayed"
    same(outs(llm, [GREEDY] * 2, 9, NGRAM), outs(host, [GREEDY] * 2, 9))
    assert captured(llm)[Use.DECODE] == 0, "nothing is captured that is never run"
    assert caplog.text.count("no memory to capture") == 1


def test_wide_steps_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there was no memory for sixteen rows, those of eight sequences are not kept either."""
    llm = made(4)
    decode = executor_of(llm).graphs.decode
    outs(llm, [GREEDY] * 3, 20, NGRAM | {"k": 7})
    wide = [shape.rows for (shape, _), _ in decode._captured if shape.most]
    assert max(wide) == 32
    capture = decode._capture
    monkeypatch.setattr(decode, "_capture", lambda shape, *more: (full if shape.rows > 8 else capture)(shape, *more))
    found = outs(llm, [GREEDY] * 2, 20, NGRAM | {"k": 7})
    same(found, outs(on_host(), [GREEDY] * 2, 20))
    assert max(shape.rows for (shape, _), _ in decode._captured) == 8
    assert not lacks(llm, Use.LOOKUP) and not lacks(llm, Use.DECODE)


def without_forwards(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    no_more_captures(llm)


def without_samples(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_of(llm).graphs.samples, "ready", full)


@pytest.mark.parametrize("lack", [without_forwards, without_samples])
def test_prompts_and_mixes(lack: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    kept, host = Kept(monkeypatch), on_host()
    llm = made(4)
    same(outs(llm, [SCORED], 5), outs(host, [SCORED], 5))
    assert captured(llm)[Use.PREFILL] == 1 and kept.alive == 1
    lack(llm, monkeypatch)
    long = [list(range(1, 60)), *PROMPTS]
    params = SamplingParams(max_tokens=5, ignore_eos=True, **SCORED)
    same(llm.generate(long, params), host.generate(long, params))
    assert lacks(llm, Use.PREFILL) and captured(llm)[Use.PREFILL] == 0 and kept.alive == 0


@pytest.mark.parametrize("lack", [without_forwards, without_samples])
def test_drafts(lack: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What prompts use stays."""
    kept, llm = Kept(monkeypatch), made(4)
    expected = outs(on_host(), [GREEDY], 12)
    wish = right_drafts(expected[0].outputs[0].token_ids)
    same(outs(llm, [GREEDY], 12, wish), expected)
    prompts = captured(llm)[Use.PREFILL]
    assert captured(llm)[Use.VERIFY] > 0 and kept.alive == 2
    lack(llm, monkeypatch)
    same(outs(llm, [GREEDY], 12, wish | {"k": 9}), expected)
    assert lacks(llm, Use.VERIFY) and captured(llm)[Use.VERIFY] == 0
    if lack is without_forwards:
        assert captured(llm)[Use.PREFILL] == prompts and kept.alive == 1


@pytest.mark.parametrize("use", [Use.DRAFT, Use.DRAFT_SAMPLES])
def test_models_that_draft(use: Use) -> None:
    llm = made(4)
    wish = {"method": "exit", "layers": 1, "adaptive": False, "k": 2}
    reduced: Any = llm.engine.draft_models.exiting(1)
    expected = outs(on_host(), [GREEDY], 12)
    same(outs(llm, [GREEDY], 12, wish), expected)
    forwards = reduced._runner._graphs._forward

    def sampling() -> int:
        return sum(len(one.logits_buffer.captured) for one in forwards.captured.values())

    assert forwards.captured and sampling()
    executor_of(llm).graphs.memory.give_up(use)
    assert bool(forwards.captured) == (use is Use.DRAFT_SAMPLES) and not sampling()
    same(outs(llm, [GREEDY], 12, wish), expected)
    assert bool(forwards.captured) == (use is Use.DRAFT_SAMPLES) and not sampling()


def test_what_waits_for_its_sample_keeps_its_logits() -> None:
    """Prompts are given up while the next step's forward is on its way."""
    llm, host = made(4), on_host()
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0, no_repeat_ngram_size=1)
    expected = host.generate(PROMPTS, params)
    names = [llm.engine.add(prompt, params) for prompt in PROMPTS]
    for _ in range(2):
        llm.engine.step()
    assert any(flight.started for flight in executor_of(llm)._flight)
    executor_of(llm).graphs.memory.give_up(Use.PREFILL)
    run(llm)
    for name, out in zip(names, expected):
        assert llm.engine.take(name).emitters[0].token_ids == out.outputs[0].token_ids


class Holder:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_only_who_held_it_is_told_and_nobody_is_kept_alive() -> None:
    memory, first, second = GraphMemory(), Holder(), Holder()
    memory.held(Use.DRAFT, first.release)
    memory.held(Use.VERIFY, second.release)
    gone = weakref.ref(first)
    assert memory.attempt(Use.VERIFY, full) is None and memory.lacks(Use.VERIFY)
    assert (first.released, second.released) == (0, 1)
    assert memory.attempt(Use.DRAFT, full, final=False) is None and not memory.lacks(Use.DRAFT)
    assert first.released == 0
    del first
    gc.collect()
    assert gone() is None
    memory.give_up(Use.DRAFT)


def test_what_was_allocated_before_memory_ended_is_gone_before_others_let_go() -> None:
    memory = GraphMemory()
    alive: list[weakref.ref[torch.Tensor]] = []

    class Last:
        seen: bool | None = None

        def release(self) -> None:
            self.seen = alive[0]() is not None

    def broken() -> None:
        half = torch.zeros(3)
        alive.append(weakref.ref(half))
        raise torch.OutOfMemoryError("no memory")

    last = Last()
    memory.held(Use.VERIFY, last.release)
    assert not memory.allows(Use.VERIFY, broken)
    assert last.seen is False


def test_buffers_of_logits_share_memory_while_somebody_has_them() -> None:
    buffers = LogitsBuffers(7, 1, torch.device("cpu"))
    large = buffers.of(5)
    small = buffers.of(3)
    assert small.logits.data_ptr() == large.logits.data_ptr() and buffers.of(5) is large
    larger = buffers.of(9)
    assert larger.logits.data_ptr() != large.logits.data_ptr() == buffers.of(3).logits.data_ptr()
    gone = [weakref.ref(one) for one in (large, small, larger)]
    del large, small, larger
    gc.collect()
    assert [one() for one in gone] == [None] * 3 and not buffers._made
