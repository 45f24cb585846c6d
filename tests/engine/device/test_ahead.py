"""Where the host has its word before each sample, the next forward runs while it looks at the last token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from engine.device.on_device import (
    HEAVY,
    MASKED,
    PROMPTS,
    SEEDED,
    alone_on_device,
    executor_of,
    made,
    on_host,
    outs,
    run,
    same,
    watched,
)
from paceline import SamplingParams
from paceline.engine.execute.graph_executor import GraphExecutor
from paceline.engine.observe.observer import Observers
from paceline.engine.schedule.sequence import Status
from paceline.errors import RequestError
from speculation.worded import GRAMMARS, SCHEMAS, tokenizer

NO_REPEATS: dict[str, Any] = {"temperature": 0.0, "no_repeat_ngram_size": 1}


@pytest.mark.parametrize("name", MASKED)
def test_forwards_run_while_the_host_makes_masks(name: str) -> None:
    wishes = [MASKED[name], SEEDED]
    llm = alone_on_device(made())
    seen = watched(llm)
    same(outs(llm, wishes), outs(on_host(), wishes))
    assert seen["launched"] >= 9 and seen["ahead"] >= 7, "all but those after the prompts"


def test_who_ends_while_the_next_forward_runs_takes_nobody_along() -> None:
    """One ends by its count, one by a stop token, and one is cancelled."""
    reference = on_host()
    stop = outs(reference, [NO_REPEATS, NO_REPEATS, NO_REPEATS])[1].outputs[0].token_ids[4]
    texts = []
    for llm in (reference, made()):
        engine = llm.engine
        params = [SamplingParams(max_tokens=count, ignore_eos=True, **NO_REPEATS | more)
                  for count, more in ((3, {}), (9, {"stop_token_ids": [stop]}), (9, {}), (9, {}))]
        names = [engine.add(prompt, own) for prompt, own in zip([*PROMPTS, PROMPTS[0]], params)]
        while engine.has_work:
            engine.step()
            if len(engine.record(names[3]).snapshot().outputs[0].token_ids) >= 2:
                engine.cancel(names[3])
        texts.append([(out.token_ids, out.finish_reason) for out in
                      (engine.take(name).snapshot().outputs[0] for name in names[:3])])
        engine.cache.check([])
        assert engine.executor.oldest is None
    assert texts[0] == texts[1] and [reason for _, reason in texts[1]] == ["length", "stop", "length"]


def test_preempted_in_between() -> None:
    wishes = [SEEDED | HEAVY | {"no_repeat_ngram_size": 2}, NO_REPEATS, SEEDED]
    llm = alone_on_device(made(kv_blocks=8, block_size=4, max_model_len=32))
    seen = watched(llm)
    same(outs(llm, wishes, count=11), outs(on_host(), wishes, count=11))
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


def test_a_grammar_that_fails_ends_its_own_request() -> None:
    found = []
    for llm in (on_host(), made()):
        params = [SamplingParams(max_tokens=6, ignore_eos=True, **NO_REPEATS)] * 2
        names = [llm.engine.add(prompt, own) for prompt, own in zip(PROMPTS, params)]
        sequence: Any = llm.engine.scheduler.sequences(names[0])[0]
        sequence.state.grammar = Failing(3)
        on_device = isinstance(llm.engine.executor, GraphExecutor)
        seen = watched(llm) if on_device else Counter({"ahead": 3})
        run(llm)
        assert seen["ahead"] >= 3
        records = [llm.engine.take(name) for name in names]
        found.append([(record.snapshot().outputs[0].token_ids, str(record.error)) for record in records])
        assert sequence.status is Status.FINISHED
    assert found[0] == found[1]
    assert "had enough" in found[1][0][1] and len(found[1][0][0]) == 3 and len(found[1][1][0]) == 6


def test_nobody_samples_from_a_step_whose_requests_have_ended() -> None:
    llm = made()
    stop = outs(llm, [NO_REPEATS])[0].outputs[0].token_ids[3]
    executor, sampled = executor_of(llm), Counter[str]()
    sample = executor._sample

    def counted(*given: Any) -> None:
        sampled["steps"] += 1
        sample(*given)

    executor._sample = counted
    seen = watched(llm)
    found = outs(llm, [NO_REPEATS | {"stop_token_ids": [stop]}])[0].outputs[0]
    assert found.finish_reason == "stop" and sampled["steps"] == len(found.token_ids) == 4
    assert seen["launched"] == 5, "the forward after the end was in flight"


def test_nobody_reads_a_step_whose_requests_have_ended() -> None:
    """Free ones: their tokens were sampled on the device before the end was known."""
    llm = made(repeat=2)
    stop = outs(llm, [SEEDED])[0].outputs[0].token_ids[3]
    executor, reads = executor_of(llm), Counter[str]()
    read, launch = executor._read, executor.graphs.decode.launch

    def counted(name: str, call: Any) -> Any:
        def noted(*given: Any) -> Any:
            reads[name] += 1
            return call(*given)
        return noted

    executor._read, executor.graphs.decode.launch = counted("read", read), counted("launched", launch)
    found = outs(llm, [SEEDED | {"stop_token_ids": [stop]}])[0].outputs[0]
    assert found.finish_reason == "stop" and len(found.token_ids) == 4
    assert reads == {"launched": 3, "read": 3}, "the prompt's step and two repeated ones; the third was stale"
    assert llm.engine.executor.oldest is None


def test_steps_are_told_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made()
    names = [llm.engine.add(prompt, SamplingParams(max_tokens=6, ignore_eos=True, **NO_REPEATS))
             for prompt in PROMPTS[:2]]
    sequence: Any = llm.engine.scheduler.sequences(names[0])[0]
    sequence.state.grammar = Failing(3)
    told: list[int] = []
    stepped = Observers.stepped

    def noted(observers: Observers, step: Any, *given: Any) -> None:
        told.append(step.id)
        stepped(observers, step, *given)

    monkeypatch.setattr(Observers, "stepped", noted)
    run(llm)
    assert told == sorted(told) and len(told) == len(set(told)) >= 6


WORDS: dict[str, dict[str, Any]] = {
    "regex": SEEDED | {"regex": "[a-c]{2,4}(true|false), [0-9]+"},
    "schema": {"temperature": 0.0, "json_schema": SCHEMAS[4]},
    "grammar": SEEDED | {"grammar": GRAMMARS[0], "repetition_penalty": 1.2},
    "choice": SEEDED | {"choice": ["yes", "no", "the name"]},
    "bad words": SEEDED | {"bad_words": ["a", "b", "an", "no"], "stop": ["th"]},
}


@pytest.mark.parametrize(("names", "options"), [
    (("regex", "bad words"), {}),
    (("grammar", "schema"), {"kv_blocks": 6, "block_size": 4, "max_model_len": 24, "preemption": "swap",
                             "swap_space": 0.01}),
    (("choice", "regex"), {"max_batch_tokens": 16}),
    (("schema", "grammar"), {"schedule_ahead": True})])
def test_structures_and_words_come_out_as_on_the_host(names: tuple[str, ...], options: dict[str, Any]) -> None:
    wishes = [*(WORDS[name] for name in names), SEEDED]
    params = [SamplingParams(**{"max_tokens": 12} | wish) for wish in wishes]
    llm = alone_on_device(made(tokenizer=tokenizer(), **options))
    seen = watched(llm)
    texts = [[(out.outputs[0].text, out.outputs[0].token_ids, out.outputs[0].finish_reason, str(out.error))
              for out in one.generate(PROMPTS, params, speculation=None)]
             for one in (on_host(tokenizer=tokenizer()), llm)]
    assert texts[0] == texts[1] and seen["ahead"] >= 4
    if "preemption" in options:  # what is compiled for the first time may let requests in one by one
        llm.generate(PROMPTS, params, speculation=None)
        assert llm.engine.report()["preemptions"] > 0
