"""Masks that take long are made beside the loop: their request sits out, others go on, and texts stay the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from grammar.structured import PROMPT, compiled, structured_llm
from paceline import SamplingParams
from paceline.errors import GrammarError
from paceline.fair_workers import FairWorkers
from paceline.grammar import states
from paceline.grammar.sequence import SequenceGrammar
from paceline.grammar.states import CompiledGrammar

SLOW = SamplingParams(regex="(ab|ba|a){3,9}[0-9]{1,5}x", max_tokens=12, seed=5, temperature=1.5)
PLAIN = SamplingParams(max_tokens=6, seed=1)


class Slow:
    """Regular expressions of SLOW have slow masks, made when the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.makers: list[str] = []
        """The threads that made them."""
        original = CompiledGrammar.bits

        def bits(grammar: CompiledGrammar, matcher: Any) -> Any:
            found, _ = original(grammar, matcher)
            if grammar.structure.text != SLOW.regex:
                return found, 0.0
            name = threading.current_thread().name
            self.makers.append(name)
            if name == "paceline-masks":
                self.gate.wait(60)
            return found, 1.0

        monkeypatch.setattr(CompiledGrammar, "bits", bits)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    found = Slow(monkeypatch)
    yield found
    found.gate.set()


def test_nobody_waits_for_somebody_elses_mask(slow: Slow) -> None:
    engine = structured_llm().engine
    slow.gate.clear()
    stuck = engine.add(PROMPT, SLOW)
    while len(engine.record(stuck).emitters[0].token_ids) < 1:
        engine.step()
    others = [engine.add(PROMPT, PLAIN), engine.add(PROMPT, SamplingParams(regex="quick", max_tokens=20))]
    while any(engine.record(one).open for one in others):
        engine.step()
    assert engine.record(stuck).open and len(engine.record(stuck).emitters[0].token_ids) == 1
    slow.gate.set()
    while engine.record(stuck).open:
        engine.step()
    assert engine.take(stuck).snapshot().error is None and not engine.has_work
    engine.cache.check([])


@pytest.mark.parametrize("options", [{}, {"schedule_ahead": True}, {"kernels": "stepped"}])
@pytest.mark.parametrize("speculation", [None, "ngram"])
def test_texts_are_the_same_and_the_loop_makes_no_slow_mask(
        options: dict[str, Any], speculation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    wishes = [SLOW, PLAIN, SamplingParams(regex=SLOW.regex, n=2, max_tokens=12, seed=9, temperature=1.5)]
    expected = structured_llm(**options).generate([PROMPT] * 3, wishes, speculation=speculation)
    slow = Slow(monkeypatch)
    found = structured_llm(**options).generate([PROMPT] * 3, wishes, speculation=speculation)
    for ours, theirs in zip(found, expected):
        assert [(one.text, one.token_ids, one.finish_reason) for one in ours.outputs] == [
            (one.text, one.token_ids, one.finish_reason) for one in theirs.outputs]
    assert set(slow.makers) == {"paceline-grammar", "paceline-masks"}


def test_a_request_can_be_cancelled_while_its_mask_is_made(slow: Slow) -> None:
    engine = structured_llm().engine
    slow.gate.clear()
    request = engine.add(PROMPT, SLOW)
    while len(engine.record(request).emitters[0].token_ids) < 1:
        engine.step()
    engine.step()
    engine.cancel(request)
    assert not engine.has_work
    slow.gate.set()
    engine.cache.check([])


def test_a_structure_that_grows_too_complex_fails_there_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SLOW", -1.0)
    schema = {"type": "object", "properties": {f"p{n}": {"type": "boolean"} for n in range(2500)}}
    llm = structured_llm()
    bad, good = llm.generate([PROMPT] * 2, [SamplingParams(json_schema=schema, max_tokens=50), PLAIN])
    assert isinstance(bad.error, GrammarError) and bad.error.param == "json_schema"
    assert good.error is None


class Panic(BaseException):
    """As native code raises it."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_a_mask_that_breaks_in_another_thread_ends_its_request_alone(kind: type[BaseException], slow: Slow,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    bits = CompiledGrammar.bits

    def breaking(grammar: CompiledGrammar, matcher: Any) -> Any:
        if threading.current_thread().name == "paceline-masks":
            raise kind("it broke")
        return bits(grammar, matcher)

    monkeypatch.setattr(CompiledGrammar, "bits", breaking)
    bad, good = structured_llm().generate([PROMPT] * 2, [SLOW, PLAIN])
    assert isinstance(bad.error, GrammarError) and bad.error.param == "regex" and "it broke" in str(bad.error)
    assert good.error is None and len(good.outputs[0].token_ids) == 6


def test_masks_are_made_where_no_thread_can_be_had(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = structured_llm().generate([PROMPT], [SLOW])[0].outputs[0].token_ids
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("paceline-masks"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    found, other = structured_llm().generate([PROMPT] * 2, [SLOW, PLAIN])
    assert found.outputs[0].token_ids == expected and other.error is None


def test_a_grammar_learns_whether_its_masks_take_long() -> None:
    grammar = compiled(regex="[a-f]{1,200}")
    assert not grammar.slow
    state = grammar.read(grammar.matcher())
    bits, _ = grammar.bits(grammar.matcher())
    grammar.keep(state, bits, 2 * states.SLOW)
    assert grammar.slow
    for _ in range(states.QUICK_AGAIN):
        assert grammar.slow
        grammar.keep(state, bits, 0.0)
    assert not grammar.slow


def test_slow_masks_are_noticed_when_the_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter(n * 0.003 for n in range(100))  # the sixth takes long
    monkeypatch.setattr(states.time, "thread_time", lambda: next(taken) ** 2 * 30)
    assert compiled(regex="[a-e]{1,201}").slow


def test_the_end_of_a_text_is_seen_without_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compiled(regex="ab?c")
    sequence = SequenceGrammar(grammar, 700, [0])
    mask = sequence.mask(())
    assert mask is not None
    token = int(mask.nonzero()[0][0])
    monkeypatch.setattr(CompiledGrammar, "bits", lambda *_: pytest.fail("a mask was made"))
    sequence.append([token])
    assert sequence.closed([token]) in (True, False)


def test_owners_take_turns_at_the_workers() -> None:
    workers, order, gate, begun = FairWorkers("test", threads=1), list[str](), threading.Event(), threading.Event()
    first = workers.submit("first", lambda: begun.set() or gate.wait(60))
    assert begun.wait(60)
    jobs = [workers.submit(owner, lambda owner=owner: order.append(owner)) for owner in "aaabbc"]
    gate.set()
    assert first.result(60)
    for job in jobs:
        job.result(60)
    assert order == ["a", "b", "c", "a", "b", "a"]


def test_work_that_fails_fails_alone() -> None:
    workers = FairWorkers("test", threads=1)
    bad, good = workers.submit("a", lambda: 1 // 0), workers.submit("a", lambda: 5)
    assert isinstance(bad.exception(60), ZeroDivisionError) and good.result(60) == 5


def test_a_worker_that_was_just_woken_keeps_nobody_waiting() -> None:
    workers, gate = FairWorkers("test", threads=2), threading.Event()
    workers.submit("a", lambda: None).result(60)
    while not workers._idle:
        pass
    held = workers.submit("a", lambda: gate.wait(60))
    assert workers.submit("b", lambda: 5).result(20) == 5, "the second thread is there for it"
    gate.set()
    assert held.result(60)
