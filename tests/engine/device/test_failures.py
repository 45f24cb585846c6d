"""What breaks, or finds no memory, on the device: nothing is sampled or counted twice, and whose fault it is ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from engine.device.on_device import (
    HEAVY,
    PROMPTS,
    SEEDED,
    WISHES,
    executor_of,
    full,
    lacks,
    made,
    on_host,
    outs,
    run,
    same,
    scarce,
    texts,
)
from paceline import SamplingParams
from paceline.engine.execute.graphs import in_flight
from paceline.engine.execute.graphs.memory import Use

SCORED: dict[str, Any] = SEEDED | {"logprobs": 1}
PENALISED: dict[str, Any] = SCORED | {"repetition_penalty": 1.5}
NO_REPEATS: dict[str, Any] = {"temperature": 0.0, "no_repeat_ngram_size": 1}


@pytest.mark.parametrize(("wish", "failing"), [
    (SEEDED | HEAVY | {"no_repeat_ngram_size": 1}, (3,)),
    (SCORED, (3, 4)),  # samples freely: tried where it is launched, then after the step before it
    (SCORED, (1,))])
def test_without_memory_for_the_sample_the_host_decides(caplog: pytest.LogCaptureFixture, wish: dict[str, Any],
                                                        failing: tuple[int, ...],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made()
    tries = scarce(monkeypatch, executor_of(llm).graphs.samples, "ready", failing)
    wishes = [wish, {"temperature": 0.0}]
    same(outs(llm, wishes, count=7), outs(on_host(), wishes, count=7))
    assert tries["calls"] == failing[-1] and "launched kernel by kernel" in caplog.text
    assert lacks(llm, Use.PREFILL)


def test_where_memory_is_back_a_free_step_is_sampled_after_the_one_before_it(
        caplog: pytest.LogCaptureFixture) -> None:
    llm = made()
    executor, tries = executor_of(llm), Counter[str]()
    ready = executor.graphs.samples.ready

    def short(*given: Any) -> Any:
        tries["ready"] += 1
        if tries["ready"] == 3:
            assert executor._flight, "it was launched ahead"
            raise torch.OutOfMemoryError("no memory")
        if tries["ready"] == 4:
            (flight,) = executor._flight
            assert flight.started and not flight.launched
        return ready(*given)

    executor.graphs.samples.ready = short
    wishes = [SCORED, {"temperature": 0.0}]
    same(outs(llm, wishes, count=7), outs(on_host(), wishes, count=7))
    assert tries["ready"] > 6 and "launched kernel by kernel" not in caplog.text and not lacks(llm, Use.PREFILL)


@pytest.mark.parametrize("where", ["seat_all", "ready", "assign"])
@pytest.mark.parametrize("calls", [(1,), (2,), (3,), (4, 7), (2, 3, 5)])
def test_whatever_a_sample_has_no_memory_for_nothing_is_counted_twice(where: str, calls: tuple[int, ...],
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made()
    graphs = executor_of(llm).graphs
    owner = {"seat_all": graphs.seats, "ready": graphs.samples, "assign": graphs.seats.state}[where]
    scarce(monkeypatch, owner, where, calls)
    wishes = [PENALISED, {"temperature": 0.0}]
    same(outs(llm, wishes, count=7), outs(on_host(), wishes, count=7))


@pytest.mark.parametrize("call", range(1, 7))
def test_without_memory_after_a_sample_the_step_is_computed_again(call: int, caplog: pytest.LogCaptureFixture,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sampled is counted: sampling once more would count it twice."""
    llm = made()
    scarce(monkeypatch, in_flight, "Fetched", (call,))
    wishes = [PENALISED, {"temperature": 0.0}]
    same(outs(llm, wishes, count=7), outs(on_host(), wishes, count=7))
    assert "computed again" in caplog.text


def test_a_step_without_memory_is_tried_in_smaller_ones(caplog: pytest.LogCaptureFixture,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made()
    rows = llm.engine.scheduler.config.max_batch_tokens
    scarce(monkeypatch, executor_of(llm)._runner.storage, "apply", (1, 4))
    params = [SamplingParams(max_tokens=9, ignore_eos=True, **wish) for wish in WISHES]
    assert texts(llm, params) == texts(on_host(), params)
    assert llm.engine.scheduler.config.max_batch_tokens < rows and "computed again" in caplog.text


def test_where_no_step_is_small_enough_its_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made()
    scarce(monkeypatch, executor_of(llm)._runner.storage, "apply", range(1000))
    name = llm.engine.add(PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True, **SEEDED))
    for _ in range(40):
        llm.engine.step()
    assert "no memory" in str(llm.engine.take(name).error) and not llm.engine.has_work


def test_where_planning_breaks_all_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a step that was launched in the same pass: it is nobody's fault in there."""
    llm = made(max_num_seqs=1)
    params = SamplingParams(max_tokens=6, ignore_eos=True, **SCORED)
    names = [llm.engine.add(prompt, params) for prompt in PROMPTS[:2]]
    schedule, plans = llm.engine.scheduler.schedule, Counter[str]()

    def broken(*given: Any) -> Any:
        plans["made"] += 1
        if plans["made"] == 2:
            assert executor_of(llm)._flight
            raise ValueError("broken")
        return schedule(*given)

    monkeypatch.setattr(llm.engine.scheduler, "schedule", broken)
    llm.engine.step()
    assert all("broken" in str(llm.engine.take(name).error) for name in names)
    llm.engine.cache.check([])
    assert llm.engine.executor.oldest is None


@pytest.mark.parametrize("wish", [NO_REPEATS, SCORED])
def test_a_step_that_cannot_be_sampled_ends_its_own_requests(wish: dict[str, Any]) -> None:
    """Not those of the step before it alone."""
    llm = made()
    engine, executor = llm.engine, executor_of(llm)
    params = SamplingParams(max_tokens=12, ignore_eos=True, **wish)
    first = engine.add(PROMPTS[0], params)
    for _ in range(3):
        engine.step()
    second = engine.add(PROMPTS[1], params)
    sequence, sample, failures = engine.scheduler.sequences(second)[0], executor._sample, [ValueError("broken")]

    def broken(flight: Any, *given: Any) -> None:
        if failures and any(group.seq is sequence for group in flight.step.groups):
            raise failures.pop()
        sample(flight, *given)

    executor._sample = broken
    run(llm)
    assert not failures and "broken" in str(engine.record(second).error)
    third = engine.add(PROMPTS[2], params)
    run(llm)
    assert len(engine.take(third).snapshot().outputs[0].token_ids) == 12
    assert "broken" in str(engine.record(first).error), "it was in the same step"
    engine.cache.check([])


def test_without_memory_for_graphs_steps_are_launched_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    params = [SamplingParams(max_tokens=6, ignore_eos=True, **wish) for wish in WISHES]
    llm = made()
    executor_of(llm).graphs.decode._graphs.capture = full  # shared with the prompts' graphs
    assert texts(llm, params) == texts(on_host(), params)
    assert lacks(llm, Use.DECODE) and lacks(llm, Use.PREFILL)
    assert caplog.text.count("no memory to capture") == 2


def test_a_repeated_step_without_memory_is_decoded_step_by_step() -> None:
    params = [SamplingParams(max_tokens=9, ignore_eos=True, **wish) for wish in WISHES]
    llm = made()
    rows = llm.engine.scheduler.config.max_batch_tokens
    executor_of(llm).graphs.decode.launch = full
    assert texts(llm, params) == texts(on_host(), params)
    assert lacks(llm, Use.DECODE) and not lacks(llm, Use.PREFILL)
    assert llm.engine.scheduler.config.max_batch_tokens == rows, "smaller steps would not help"


def test_without_memory_for_the_tables_the_host_samples(caplog: pytest.LogCaptureFixture,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made()
    monkeypatch.setattr(executor_of(llm).graphs.seats.state.tables, "prepare", full)
    wishes = [SEEDED | HEAVY | {"top_k": 3}, {"temperature": 0.0}]
    same(outs(llm, wishes, count=4), outs(on_host(), wishes, count=4))
    assert "no memory on the device for penalties" in caplog.text


def test_who_could_not_be_seated_is_seated_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made()
    state = executor_of(llm).graphs.seats.state
    assign, refusals = state.assign, [torch.OutOfMemoryError("no memory")]

    def short(seated: Any) -> None:
        if seated and refusals:
            raise refusals.pop()
        assign(seated)

    monkeypatch.setattr(state, "assign", short)
    wishes = [SEEDED, {"temperature": 0.0}]
    same(outs(llm, wishes, count=5), outs(on_host(), wishes, count=5))
    assert not refusals
