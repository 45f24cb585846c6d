"""Several threads with one LLM, calls from within its calls, processes that fork: answers or errors, never a hang."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from engine.tiny import tiny_engine, tiny_llm
from paceline import LLM, AsyncLLM, SamplingParams
from paceline.errors import RequestError
from paceline.turns import Turns

PATIENCE = 120.0
"""Seconds that nothing here takes, however busy the machine is."""
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[number, 2, 3, 5, number] for number in range(1, 7)]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns, all called at once in threads of their own."""
    found: list[Any] = [None] * len(calls)
    begin = threading.Barrier(len(calls))

    def run(place: int) -> None:
        begin.wait()
        try:
            found[place] = calls[place]()
        except BaseException as problem:
            found[place] = problem

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
    return found


def tokens(outs: Any) -> list[list[int]]:
    assert not isinstance(outs, BaseException), outs
    return [out.outputs[0].token_ids for out in outs]


@pytest.mark.parametrize("options", [{}, {"max_queue": 2, "max_num_seqs": 2}])
def test_threads_share_an_llm_and_each_gets_its_own(options: dict[str, Any]) -> None:
    alone = [tokens(tiny_llm().generate([prompt], GREEDY))[0] for prompt in PROMPTS]
    llm = tiny_llm(**options)
    calls = [lambda prompt=prompt: llm.generate([prompt] * 3, GREEDY) for prompt in PROMPTS]
    for prompt, got in zip(alone, together(*calls, *calls)):
        assert tokens(got) == [prompt] * 3
    assert not llm.engine.has_work and not llm.engine._records and not llm._calls
    llm.engine.cache.check([])


def test_streams_and_questions_beside_calls() -> None:
    llm = tiny_llm()
    alone = tokens(llm.generate(PROMPTS[:1], GREEDY))[0]

    def stream() -> list[list[int]]:
        return tokens(list(llm.stream(PROMPTS[0], GREEDY))[-1:])

    found = together(stream, lambda: tokens(llm.generate([PROMPTS[0]] * 4, GREEDY)), stream,
                     lambda: [llm.metrics() for _ in range(20)])
    assert found[0] == found[2] == [alone] and found[1] == [alone] * 4 and len(found[3]) == 20


def test_a_call_that_fails_leaves_the_others_alone() -> None:
    llm = tiny_llm()
    good, bad = together(lambda: tokens(llm.generate(PROMPTS[:2], GREEDY)), lambda: llm.generate([[10 ** 6]], GREEDY))
    assert isinstance(bad, RequestError) and good == tokens(llm.generate(PROMPTS[:2], GREEDY))


def test_what_is_called_within_a_call_may_not_call() -> None:
    llm = tiny_llm()

    def ask(text: str, ids: list[int]) -> bool:
        return bool(llm.generate(PROMPTS[:1], GREEDY))

    [out] = together(lambda: llm.generate([[1, 2]], SamplingParams(max_tokens=4, interrupt=ask)))
    assert "in the middle of a step" in str(out[0].error)
    assert tokens(llm.generate(PROMPTS[:1], GREEDY))


@pytest.mark.parametrize("token", [1, 4])
def test_a_stream_that_is_thrown_away_in_the_middle_of_a_step_ends_with_it(token: int) -> None:
    llm = tiny_llm()
    streams = [llm.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))]
    next(streams[0])

    def lose(text: str, ids: list[int]) -> bool:
        if len(ids) == token:
            streams.clear()
            gc.collect()
        return False

    assert llm.generate([[1, 2]], SamplingParams(max_tokens=4, ignore_eos=True, interrupt=lose))[0].error is None
    assert not llm.engine.has_work and not llm.engine._records


def test_turns_are_taken_in_order() -> None:
    turns, order = Turns(), []

    def take(name: str) -> None:
        for _ in range(50):
            with turns:
                order.append(name)
                time.sleep(0.0002)

    together(lambda: take("a"), lambda: take("b"))
    both = order[order.index("b" if order[0] == "a" else "a"):][:60]
    assert all(one != other for one, other in itertools.pairwise(both)), "nobody takes two while another waits"


def forked(action: Callable[[], Any]) -> str:
    """What `action` says in a child of this process: its error, or that there was none."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what this is about
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)  # a hang ends, and says nothing
            action()
            os.write(writing, b"no error")
        except BaseException as problem:
            os.write(writing, f"{type(problem).__name__}: {problem}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("ask", [
    lambda llm: llm.generate([[1, 2, 3]], GREEDY), lambda llm: list(llm.stream([1, 2, 3], GREEDY)),
    lambda llm: llm.metrics(), lambda llm: llm.engine.step()])
def test_an_llm_does_not_live_on_in_a_fork(ask: Callable[[LLM], Any]) -> None:
    llm = tiny_llm()
    before = tokens(llm.generate(PROMPTS, GREEDY))
    assert forked(lambda: ask(llm)).startswith("PacelineError: This engine was made before the process forked")
    assert tokens(llm.generate(PROMPTS, GREEDY)) == before


def test_nor_does_an_asynchronous_one() -> None:
    llm = AsyncLLM(engine=tiny_engine())
    try:
        assert "before the process forked" in forked(lambda: asyncio.run(llm.complete([1, 2, 3], GREEDY)))
        assert "before the process forked" in forked(llm.metrics)
        assert forked(llm.close) == "no error" and llm.alive
    finally:
        llm.close()


def test_ctrl_c_in_one_thread_is_an_error_in_the_others() -> None:
    """It ends the requests of a step, whoever asked for them."""
    llm, settle = tiny_llm(), None
    long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    pressed = threading.Event()

    def interrupted() -> Any:
        if len(llm._calls) == 2 and not pressed.is_set():
            pressed.set()
            raise KeyboardInterrupt
        return settle()

    settle, llm.engine.executor.settle = llm.engine.executor.settle, interrupted
    found = together(*(lambda prompt=prompt: llm.generate([prompt], long) for prompt in PROMPTS[:2]))
    [pressing] = [one for one in found if isinstance(one, KeyboardInterrupt)]
    [[other]] = [one for one in found if one is not pressing]
    assert other.finished and other.outputs[0].finish_reason == "error" and "KeyboardInterrupt" in str(other.error)
    assert not llm.engine._records and not llm._calls and tokens(llm.generate(PROMPTS[:1], GREEDY))


def test_nobody_asks_for_a_turn_in_the_middle_of_taking_one() -> None:
    """As a stream does that the garbage collector finds there: it would wait for itself."""
    turns, answers = Turns(), []

    class Queue(deque[Any]):
        def append(self, entry: Any) -> None:
            answers.append(turns.can_be_mine)
            super().append(entry)

        def popleft(self) -> Any:
            answers.append(turns.can_be_mine)
            return super().popleft()

    turns._waiting = Queue()
    assert turns.can_be_mine
    with turns:
        assert not turns.can_be_mine
        other = threading.Thread(target=lambda: turns.__enter__() or turns.__exit__(), daemon=True)
        other.start()
        while not turns._waiting:
            time.sleep(0.001)
    other.join(PATIENCE)
    assert not other.is_alive() and answers == [False, False] and turns.can_be_mine
    turns._waiting.extend([(threading.get_ident(), threading.Lock())])  # between joining the queue and waiting in it
    assert not turns.can_be_mine
