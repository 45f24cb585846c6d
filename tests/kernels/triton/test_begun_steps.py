"""Where the host has its word before each draw, the forward of the next step runs while it looks at the last token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Any

import pytest
import torch

from engine.tiny import BASE, SHAPES
from kernels.triton.test_controls_on_the_device import BARRED, HEAVY, SEEDED, alone_on_device, outs, same
from kernels.triton.test_device_decoding import PROMPTS, OnDevice, made
from paceline import LLM, SamplingParams
from paceline.config import EngineOptions
from paceline.engine.build import engine_for
from paceline.engine.execute.graphs import in_flight as launched_steps
from paceline.engine.observe.observer import Observers
from paceline.engine.schedule.sequence import PENDING, Status
from paceline.errors import RequestError
from paceline.models.config import ModelConfig
from paceline.models.registry import build
from speculation.worded import GRAMMARS, SCHEMAS, tokenizer

BARS: dict[str, Any] = {"temperature": 0.0, "no_repeat_ngram_size": 1}


def watched(llm: LLM) -> Counter[str]:
    """How often a step was begun, and how often before the token in front of it was known on the host."""
    device, seen = llm.engine.loop.device_steps, Counter[str]()
    assert device is not None
    begin = device.mixed.begin

    def counted(batch: Any) -> Any:
        seen["begun"] += 1
        seen["ahead"] += any(PENDING in group.tokens for group in batch.step.groups)
        assert len(device.launched) <= 1
        return begin(batch)

    device.mixed.begin = counted
    return seen


def scarce(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: Container[int]) -> None:
    """There is no memory in these calls of a function, counted from 1."""
    function, count = getattr(owner, name), Counter[str]()

    def short(*given: Any, **more: Any) -> Any:
        count["calls"] += 1
        if count["calls"] in calls:
            raise torch.OutOfMemoryError("no memory")
        return function(*given, **more)

    monkeypatch.setattr(owner, name, short)


@pytest.mark.parametrize("name", ["n-grams", pytest.param("n-grams and penalties", marks=pytest.mark.full)])
def test_forwards_run_while_the_host_makes_masks(device: torch.device, name: str) -> None:
    wishes = [BARRED[name], SEEDED]
    llm = alone_on_device(made(device, "triton"))
    seen = watched(llm)
    same(outs(llm, wishes), outs(made(device, "reference"), wishes))
    assert seen["begun"] >= 9 and seen["ahead"] >= 7, "all but those behind the prompts"


def test_who_ends_while_the_next_forward_runs_takes_nobody_along(device: torch.device) -> None:
    """One ends by its count, one by a stop token, and one is cancelled."""
    reference = made(device, "reference")
    whole = outs(reference, [BARS, BARS, BARS])
    stop = whole[1].outputs[0].token_ids[4]
    texts = []
    for llm in (reference, made(device, "triton")):
        engine = llm.engine
        params = [SamplingParams(max_tokens=count, ignore_eos=True, **BARS | more)
                  for count, more in ((3, {}), (9, {"stop_token_ids": [stop]}), (9, {}), (9, {}))]
        names = [engine.add(prompt, own) for prompt, own in zip([*PROMPTS, PROMPTS[0]], params)]
        while engine.has_work:
            engine.step()
            if len(engine.record(names[3]).snapshot().outputs[0].token_ids) >= 2:
                engine.cancel(names[3])
        texts.append([(out.token_ids, out.finish_reason) for out in
                      (engine.take(name).snapshot().outputs[0] for name in names[:3])])
        engine.cache.check([])
        assert engine.loop.device_steps is None or engine.loop.device_steps.begun is None
    assert texts[0] == texts[1] and [reason for _, reason in texts[1]] == ["length", "stop", "length"]


def test_preempted_in_between(device: torch.device) -> None:
    wishes = [SEEDED | HEAVY | {"no_repeat_ngram_size": 2}, BARS, SEEDED]
    llm = alone_on_device(made(device, "triton", kv_blocks=8, block_size=4, max_model_len=32))
    seen = watched(llm)
    same(outs(llm, wishes, count=11), outs(made(device, "reference"), wishes, count=11))
    assert llm.engine.report()["preemptions"] > 0 and seen["ahead"] > 3


class Failing:
    """A grammar that lets so many tokens pass, then breaks."""

    def __init__(self, after: int) -> None:
        self.left = after

    def append(self, tokens: list[int]) -> None:
        self.left -= len(tokens)

    def mask(self, path: Any) -> None:
        if self.left <= 0:
            raise RequestError("The grammar had enough.")


def test_a_grammar_that_fails_ends_its_own_request(device: torch.device) -> None:
    found = []
    for kernels in ("reference", "triton"):
        llm = made(device, kernels)
        params = [SamplingParams(max_tokens=6, ignore_eos=True, **BARS)] * 2
        names = [llm.engine.add(prompt, own) for prompt, own in zip(PROMPTS, params)]
        sequence = llm.engine.scheduler.sequences(names[0])[0]
        sequence.state.grammar = Failing(3)
        seen = watched(llm) if kernels == "triton" else None
        while llm.engine.has_work:
            llm.engine.step()
        assert seen is None or seen["ahead"] >= 3
        records = [llm.engine.take(name) for name in names]
        found.append([(record.snapshot().outputs[0].token_ids, str(record.error)) for record in records])
        assert sequence.status is Status.FINISHED
    assert found[0] == found[1]
    assert "had enough" in found[1][0][1] and len(found[1][0][0]) == 3 and len(found[1][1][0]) == 6


@pytest.mark.parametrize(("wish", "failing"), [
    (SEEDED | HEAVY | {"no_repeat_ngram_size": 1}, (3,)),
    (SEEDED | {"logprobs": 1}, (3, 4)),  # draws freely: tried where it is launched, then behind the step in front of it
    (SEEDED | {"logprobs": 1}, (1, 2))])
def test_without_memory_for_the_draw_the_host_decides(device: torch.device, caplog: pytest.LogCaptureFixture,
                                                      wish: dict[str, Any], failing: tuple[int, ...]) -> None:
    llm = made(device, "triton")
    device_steps: Any = llm.engine.loop.device_steps
    finish, tries = device_steps.finish, Counter[str]()

    def short(*given: Any) -> bool:
        tries["finish"] += 1
        return tries["finish"] not in failing and finish(*given)

    device_steps.finish = short
    wishes = [wish, {"temperature": 0.0}]
    same(outs(llm, wishes, count=7), outs(made(device, "reference"), wishes, count=7))
    assert tries["finish"] == failing[-1] and "launched kernel by kernel" in caplog.text


def test_where_memory_is_back_a_free_step_is_drawn_behind_the_one_in_front_of_it(
        device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    llm = made(device, "triton")
    device_steps: Any = llm.engine.loop.device_steps
    finish, tries = device_steps.finish, Counter[str]()

    def short(*given: Any) -> bool:
        tries["finish"] += 1
        if tries["finish"] == 3:
            assert device_steps.launched, "it was launched ahead"
            return False
        assert tries["finish"] != 4 or not device_steps.launched
        return finish(*given)

    device_steps.finish = short
    wishes = [SEEDED | {"logprobs": 1}, {"temperature": 0.0}]
    same(outs(llm, wishes, count=7), outs(made(device, "reference"), wishes, count=7))
    assert tries["finish"] > 6 and "launched kernel by kernel" not in caplog.text


PENALISED: dict[str, Any] = SEEDED | {"repetition_penalty": 1.5, "logprobs": 1}


@pytest.mark.parametrize("where", ["take", "ready", "assign"])
def test_whatever_a_draw_has_no_memory_for_nothing_is_counted_twice(device: torch.device, where: str,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made(device, "triton")
    draws: Any = llm.engine.loop.device_steps.draws
    owner = {"take": draws.seats, "ready": draws, "assign": draws.seats.state}[where]
    scarce(monkeypatch, owner, where, calls=(4, 7))
    wishes = [PENALISED, {"temperature": 0.0}]
    same(outs(llm, wishes, count=7), outs(made(device, "reference"), wishes, count=7))


def test_without_memory_behind_a_draw_the_step_is_computed_again(device: torch.device, caplog: pytest.LogCaptureFixture,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """What was drawn is counted: drawing once more would count it twice."""
    llm = made(device, "triton")
    scarce(monkeypatch, launched_steps, "_fetched", calls=(5,))
    wishes = [PENALISED, {"temperature": 0.0}]
    same(outs(llm, wishes, count=7), outs(made(device, "reference"), wishes, count=7))
    assert "computed again" in caplog.text


def test_where_no_step_is_small_enough_its_requests_end(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made(device, "triton")
    scarce(monkeypatch, llm.engine.runner.storage, "apply", calls=range(1000))
    name = llm.engine.add(PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True, **SEEDED))
    for _ in range(40):
        llm.engine.step()
    assert "no memory" in str(llm.engine.take(name).error) and not llm.engine.has_work


def test_where_planning_breaks_all_requests_end(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a step that was launched in the same pass: it is nobody's fault in there."""
    llm = made(device, "triton", max_num_seqs=1)
    params = SamplingParams(max_tokens=6, ignore_eos=True, **SEEDED | {"logprobs": 1})
    names = [llm.engine.add(prompt, params) for prompt in PROMPTS[:2]]
    steps, plans = llm.engine.loop.device_steps, Counter[str]()
    plan = steps.plan

    def broken(*given: Any) -> Any:
        plans["made"] += 1
        if plans["made"] == 2:
            assert steps.launched
            raise ValueError("broken")
        return plan(*given)

    monkeypatch.setattr(steps, "plan", broken)
    llm.engine.step()
    assert all("broken" in str(llm.engine.take(name).error) for name in names)
    llm.engine.cache.check([])


def test_a_step_that_cannot_be_finished_ends_its_own_requests(device: torch.device) -> None:
    """Not those of the step in front of it alone."""
    llm = made(device, "triton")
    engine, steps = llm.engine, llm.engine.loop.device_steps
    params = SamplingParams(max_tokens=12, ignore_eos=True, **BARS)
    first = engine.add(PROMPTS[0], params)
    for _ in range(3):
        engine.step()
    second = engine.add(PROMPTS[1], params)
    sequence, finish, failures = engine.scheduler.sequences(second)[0], steps.finish, [ValueError("broken")]

    def broken(begun: Any, masks: Any) -> bool:
        if failures and any(group.seq is sequence for group in begun.batch.step.groups):
            raise failures.pop()
        return finish(begun, masks)

    steps.finish = broken
    while engine.has_work:
        engine.step()
    assert "broken" in str(engine.record(second).error)
    third = engine.add(PROMPTS[2], params)
    while engine.has_work:
        engine.step()
    assert len(engine.take(third).snapshot().outputs[0].token_ids) == 12
    assert "broken" in str(engine.record(first).error), "it was in the same step"
    engine.cache.check([])


def test_nobody_draws_from_a_step_whose_requests_have_ended(device: torch.device) -> None:
    llm = made(device, "triton")
    stop = outs(llm, [BARS])[0].outputs[0].token_ids[3]
    steps: Any = llm.engine.loop.device_steps
    finished: list[Any] = []
    finish = steps.finish
    steps.finish = lambda *given: (finished.append(given), finish(*given))[1]
    found = outs(llm, [BARS | {"stop_token_ids": [stop]}])[0].outputs[0]
    assert found.finish_reason == "stop" and len(finished) == len(found.token_ids) == 4


def test_steps_are_told_in_their_order(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made(device, "triton")
    names = [llm.engine.add(prompt, SamplingParams(max_tokens=6, ignore_eos=True, **BARS)) for prompt in PROMPTS[:2]]
    llm.engine.scheduler.sequences(names[0])[0].state.grammar = Failing(3)
    told: list[int] = []
    stepped = Observers.stepped

    def noted(observers: Observers, step: Any, *given: Any) -> None:
        told.append(step.id)
        stepped(observers, step, *given)

    monkeypatch.setattr(Observers, "stepped", noted)
    while llm.engine.has_work:
        llm.engine.step()
    assert told == sorted(told) and len(told) == len(set(told)) >= 6


def worded(device: torch.device, kernels: str, **options: Any) -> LLM:
    """As `made`, with words."""
    chosen = {"deterministic": True, "kv_blocks": 40, "block_size": 8, "max_num_seqs": 8, "kernels": kernels} | options
    model = build(ModelConfig.from_dict(BASE | SHAPES["llama"]), OnDevice(device), 512)
    return LLM.from_engine(engine_for(model, tokenizer(), EngineOptions.of(**chosen), device=device, revision="tiny",
                                      eos_ids=tokenizer().eos_ids))


WORDS: dict[str, dict[str, Any]] = {
    "regex": SEEDED | {"regex": "[a-c]{2,4}(true|false), [0-9]+"},
    "schema": {"temperature": 0.0, "json_schema": SCHEMAS[4]},
    "grammar": SEEDED | {"grammar": GRAMMARS[0], "repetition_penalty": 1.2},
    "choice": SEEDED | {"choice": ["yes", "no", "the name"]},
    "bad words": SEEDED | {"bad_words": ["a", "b", "an", "no"], "stop": ["th"]},
}


@pytest.mark.parametrize(("names", "options"), [
    (("regex", "bad words"), {}),
    (("grammar", "schema"), {"kv_blocks": 7, "block_size": 4, "max_model_len": 24, "preemption": "swap",
                             "swap_space": 0.01}),
    pytest.param(("choice", "regex"), {"max_batch_tokens": 16}, marks=pytest.mark.full),
    pytest.param(("schema", "grammar"), {"schedule_ahead": True}, marks=pytest.mark.full)])
def test_structures_and_words_come_out_as_on_the_host(device: torch.device, names: tuple[str, ...],
                                                      options: dict[str, Any]) -> None:
    wishes = [*(WORDS[name] for name in names), SEEDED]
    params = [SamplingParams(**{"max_tokens": 12} | wish) for wish in wishes]
    texts = []
    for llm in (worded(device, "reference"), alone_on_device(worded(device, "triton", **options))):
        seen = watched(llm) if llm.engine.loop.device_steps else Counter({"ahead": 9})
        found = llm.generate(PROMPTS, params, speculation=None)
        texts.append([(out.outputs[0].text, out.outputs[0].token_ids, out.outputs[0].finish_reason, str(out.error))
                      for out in found])
        assert seen["ahead"] >= 4
        if "preemption" in options and llm.engine.loop.device_steps:
            assert llm.engine.report()["preemptions"] > 0
    assert texts[0] == texts[1]
