"""ModelPool: who is loaded, who waits, who goes. Loads end when the test says so, and the clock is the test's."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import QueueFullError
from paceline.serve.model_threads import ModelThreads
from paceline.serve.pool import (
    FAILED,
    LOADED,
    LOADING,
    PATIENCE_S,
    PRESENT,
    RETRY_S,
    UNLOADED,
    UNLOADING,
    LoadError,
    ModelPool,
    PoolClosed,
)


class Models:
    """Loads that are done when somebody says so; notes what became of them."""

    def __init__(self, sizes: dict[str, int], limit: int, idle_s: float = 0.0, max_queue: int = 99) -> None:
        self.true = dict(sizes)
        self.now = 0.0
        self.dead: set[str] = set()
        self.broken: set[str] = set()
        self.jobs: list[tuple[Callable[[], Any], Callable[..., None]]] = []
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.broken_off: list[str] = []
        """Those that were in use."""
        self.sizeless: set[str] = set()
        self.reclaimed = 0
        self.pool: ModelPool[str] = ModelPool(sizes.items(), limit, self, idle_s=idle_s, max_queue=max_queue,
                                              clock=lambda: self.now,
                                              run=lambda work, then: self.jobs.append((work, then)))

    def load(self, name: str) -> str:
        self.loads.append(name)
        self.dead.discard(name)
        if name in self.broken:
            raise OSError("no such file")
        return name

    def unload(self, loaded: str) -> None:
        if self.pool[loaded].users:
            self.broken_off.append(loaded)
        self.unloads.append(loaded)

    def reclaim(self, name: str, left: Callable[[], object] | None) -> None:
        self.reclaimed += 1

    def size(self, loaded: str) -> int:
        if loaded in self.sizeless:
            raise OSError("nobody knows")
        return self.true[loaded]

    def alive(self, loaded: str) -> bool:
        return loaded not in self.dead

    def finish(self, which: int = 0) -> None:
        """One of the jobs under way."""
        work, then = self.jobs.pop(which)
        try:
            result = work()
        except LoadError as problem:
            then(None, problem)
        else:
            then(result, None)
        assert not self.broken_off

    async def finish_all(self) -> None:
        while self.jobs:
            self.finish()
        await asyncio.sleep(0)

    def states(self) -> dict[str, str]:
        return {place.name: place.shown for place in self.pool}


def played(play: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(play(), 60))


async def asked(models: Models, name: str) -> asyncio.Task[str]:
    task = asyncio.ensure_future(models.pool.acquire(name))
    await asyncio.sleep(0)
    return task


def test_a_model_is_loaded_once_for_all_who_wait_and_others_go_on() -> None:
    async def play() -> None:
        models = Models({"a": 1, "b": 1}, 2)
        first, second = await asked(models, "a"), await asked(models, "a")
        other = await asked(models, "b")
        assert len(models.jobs) == 2 and not first.done()
        models.finish(1)
        assert await other == "b" and not first.done()
        models.finish()
        assert await first == await second == "a" and models.loads == ["b", "a"]
        assert models.pool["a"].users == 2 and await models.pool.acquire("a") == "a"

    played(play)


def test_the_one_not_used_for_longest_makes_way_and_one_in_use_never() -> None:
    async def play() -> None:
        models = Models({"a": 1, "b": 1, "c": 1, "d": 1}, 3)
        for name in "abc":
            models.now += 1
            task = await asked(models, name)
            await models.finish_all()
            await task
            if name != "a":
                models.pool.release(name)
        waiting = await asked(models, "d")
        assert models.states() == {"a": LOADED, "b": UNLOADING, "c": LOADED, "d": UNLOADED}
        models.finish()
        assert models.states()["b"] == UNLOADED and models.states()["d"] == LOADING and models.reclaimed == 1
        await models.finish_all()
        assert await waiting == "d"

    played(play)


def test_models_that_do_not_fit_beside_each_other_take_turns() -> None:
    """However many come for the one, those who wait for the other have their turn when the running ones end."""
    async def play() -> None:
        models = Models({"a": 2, "b": 2}, 3)
        running = await asked(models, "a")
        await models.finish_all()
        await running
        waiting = await asked(models, "b")
        late = await asked(models, "a")
        assert not late.done() and not models.jobs, "a is in use, and b comes before who came later"
        models.pool.release("a")
        assert models.states() == {"a": UNLOADING, "b": UNLOADED}
        await models.finish_all()
        assert await waiting == "b" and not late.done()
        models.pool.release("b")
        await models.finish_all()
        assert await late == "a"

    played(play)


def test_who_waits_and_leaves_is_no_reason_to_unload_anybody() -> None:
    async def play() -> None:
        models = Models({"a": 2, "b": 2}, 3)
        running = await asked(models, "a")
        await models.finish_all()
        await running
        waiting, late = await asked(models, "b"), await asked(models, "a")
        waiting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await late == "a" and not models.jobs
        models.pool.release("a")
        models.pool.release("a")
        assert not models.jobs and models.states()["a"] == LOADED

    played(play)


def test_a_turn_that_comes_with_the_cancellation_is_given_back() -> None:
    async def play() -> None:
        models = Models({"a": 1}, 1)
        waiting = await asked(models, "a")
        models.finish()
        assert models.pool["a"].users == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert models.pool["a"].users == 0 and models.states()["a"] == LOADED

    played(play)


def test_a_load_that_fails_is_told_and_tried_again_later() -> None:
    async def play() -> None:
        models = Models({"a": 1, "b": 1}, 2)
        models.broken.add("b")
        waiting = await asked(models, "b")
        models.finish()
        with pytest.raises(LoadError, match="'b' could not be loaded"):
            await waiting
        assert models.states()["b"] == FAILED
        with pytest.raises(LoadError) as refused:
            await models.pool.acquire("b")
        assert refused.value.retry_s == RETRY_S and models.loads == ["b"], "not tried again at once"
        fine = await asked(models, "a")
        models.now, models.broken = RETRY_S, set()
        again = await asked(models, "b")
        await models.finish_all()
        assert (await fine, await again) == ("a", "b") and models.pool["b"].failures == 1

    played(play)


def test_an_engine_that_has_died_is_replaced() -> None:
    async def play() -> None:
        models = Models({"a": 1}, 1)
        first = await asked(models, "a")
        await models.finish_all()
        await first
        models.dead.add("a")
        second = await asked(models, "a")
        assert not second.done() and not models.jobs
        models.pool.release("a")
        await models.finish_all()
        assert await second == "a" and models.loads == ["a", "a"]

    played(play)


def test_an_idle_model_is_unloaded_after_its_time() -> None:
    async def play() -> None:
        models = Models({"a": 1, "b": 1}, 2, idle_s=10.0)
        for name in "ab":
            task = await asked(models, name)
            await models.finish_all()
            await task
        models.pool.release("a")
        models.now = 9.0
        models.pool.expire()
        assert models.states() == {"a": LOADED, "b": LOADED}
        models.now = 100.0
        models.pool.expire()
        assert models.states() == {"a": UNLOADING, "b": LOADED}, "b is in use"

    played(play)


def test_a_model_that_takes_more_than_was_thought_makes_idle_ones_leave() -> None:
    async def play() -> None:
        models = Models({"a": 1, "b": 1}, 2)
        models.true["b"] = 2
        for name in "ab":
            task = await asked(models, name)
            await models.finish_all()
            await task
            if name == "a":
                models.pool.release(name)
        assert models.states() == {"a": UNLOADED, "b": LOADED} and models.pool.taken == 2

    played(play)


def test_who_waits_while_the_server_leaves_is_told() -> None:
    async def play() -> None:
        models = Models({"a": 1}, 1)
        waiting = await asked(models, "a")
        models.pool.refuse_waiters()
        with pytest.raises(PoolClosed):
            await waiting
        with pytest.raises(PoolClosed):
            await models.pool.acquire("a")
        models.finish()  # it was being loaded all the while
        models.pool.close()
        assert models.states() == {"a": UNLOADED}

    played(play)


class Weights:
    """What takes memory."""


class BrokenLoader(Models):
    """Fails with something half made, as loading does: the traceback has it."""

    made: weakref.ref[Weights]
    seen_by_reclaim: object = "nobody asked"

    def load(self, name: str) -> str:
        half = Weights()
        self.made = weakref.ref(half)
        raise OSError("the disk is gone")

    def reclaim(self, name: str, left: Callable[[], object] | None) -> None:
        self.seen_by_reclaim = self.made()


def test_nothing_of_a_failed_load_is_left_when_its_memory_is_reclaimed(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        models = BrokenLoader({"a": 1}, 1)
        waiting = await asked(models, "a")
        models.finish()
        with pytest.raises(LoadError) as told:
            await waiting
        assert models.seen_by_reclaim is None and told.value.__cause__ is None and told.value.__context__ is None

    played(play)
    assert "the disk is gone" in caplog.text and not any(record.exc_info for record in caplog.records)


def test_a_model_whose_size_cannot_be_told_has_failed_and_is_unloaded() -> None:
    async def play() -> None:
        models = Models({"a": 1}, 1)
        models.sizeless.add("a")
        waiting = await asked(models, "a")
        models.finish()
        with pytest.raises(LoadError):
            await waiting
        assert models.states() == {"a": FAILED} and models.unloads == ["a"] and models.reclaimed == 1

    played(play)


def test_one_that_failed_may_be_tried_again_in_time() -> None:
    async def play() -> None:
        models = Models({"a": 1}, 1)
        models.broken.add("a")
        waiting = await asked(models, "a")
        assert models.pool.may_serve(models.pool["a"])
        models.finish()
        with pytest.raises(LoadError):
            await waiting
        assert not models.pool.may_serve(models.pool["a"])
        models.now = RETRY_S
        assert models.pool.may_serve(models.pool["a"])

    played(play)


def test_only_so_many_wait_for_a_model() -> None:
    async def play() -> None:
        models = Models({"a": 1, "b": 1}, 2, max_queue=2)
        waiting = [await asked(models, "a") for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests wait for the model 'a'"):
            await models.pool.acquire("a")
        other = await asked(models, "b")
        await models.finish_all()
        assert [await one for one in (*waiting, other)] == ["a", "a", "b"]
        assert await models.pool.acquire("a") == "a", "it is loaded, and nobody waits"

    played(play)


def test_one_slow_user_keeps_nobody_from_a_loaded_model_for_ever() -> None:
    async def play() -> None:
        models = Models({"a": 2, "b": 2}, 3)
        slow = await asked(models, "a")
        await models.finish_all()
        await slow
        waiting, late = await asked(models, "b"), await asked(models, "a")
        models.now = PATIENCE_S - 1
        models.pool.expire()
        await asyncio.sleep(0)
        assert not late.done()
        models.now = PATIENCE_S
        models.pool.expire()
        assert await late == "a" and await models.pool.acquire("a") == "a" and not waiting.done()
        models.now = 2 * PATIENCE_S
        models.pool.expire()
        again = await asked(models, "a")
        assert not again.done(), "those who wait for its room have their chance again"
        for _ in range(3):
            models.pool.release("a")
        await models.finish_all()
        assert await waiting == "b" and models.pool["a"].leaving is None
        again.cancel()

    played(play)


def test_a_model_is_dismissed_unless_somebody_uses_it() -> None:
    async def play() -> None:
        models = Models({"a": 1}, 1)
        assert models.pool.dismiss("a") and not models.jobs
        task = await asked(models, "a")
        assert not models.pool.dismiss("a"), "it is being loaded for somebody"
        await models.finish_all()
        await task
        assert not models.pool.dismiss("a") and not models.jobs
        models.pool.release("a")
        assert models.pool.dismiss("a") and models.states() == {"a": UNLOADING}

    played(play)


def test_a_server_that_leaves_does_not_wait_for_ever_for_a_load(caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()

    class Slow(Models):
        def load(self, name: str) -> str:
            go.wait(60)
            return name

    async def play() -> None:
        models = Slow({"a": 1}, 1)
        pool: ModelPool[str] = ModelPool([("a", 1)], 1, models)
        waiting = asyncio.ensure_future(pool.acquire("a"))
        await asyncio.sleep(0)
        pool.refuse_waiters()
        with pytest.raises(PoolClosed):
            await waiting
        pool.close(0.01)
        assert pool.busy and "the model a is still loading" in caplog.text
        go.set()
        pool.close(60)
        assert not pool.busy

    played(play)


def test_one_result_that_cannot_be_told_does_not_lose_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        threads, heard, both = ModelThreads(), asyncio.Event(), threading.Barrier(2)

        def fails(result: Any, problem: BaseException | None) -> None:
            raise ValueError("no such thing")

        threads.run(lambda: both.wait(60), fails)
        threads.run(lambda: both.wait(60), lambda result, problem: heard.set())
        while threads.busy:
            time.sleep(0.001)  # holds the loop up, so that both are told at once
        await heard.wait()

    played(play)
    assert "could not be told" in caplog.text


def test_without_a_thread_loads_fail_and_models_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        models = Models({"a": 1, "b": 1}, 2)
        pool: ModelPool[str] = ModelPool([("a", 1), ("b", 1)], 2, models)
        models.pool = pool
        pool.put("a", "a")

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(LoadError):
                await pool.acquire("b")
            pool.dismiss("a")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert await pool.acquire("a") == "a"
        pool.release("a")
        pool.close()
        assert models.unloads == ["a"]

    played(play)


SIZES = {"a": 1, "b": 2, "c": 3, "d": 7}
LIMIT = 5


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(["ask", "release", "cancel", "finish", "die", "wait"]), st.integers(0, 99)),
                max_size=60), st.sampled_from([0.0, 2.0]))
def test_whatever_comes_the_limit_holds_nobody_in_use_goes_and_everybody_is_served(
        moves: list[tuple[str, int]], idle_s: float) -> None:
    async def play() -> None:
        models = Models(SIZES, LIMIT, idle_s)
        pool, names = models.pool, list(SIZES)
        waiting: list[tuple[str, asyncio.Task[str]]] = []
        holding: list[str] = []

        async def settle() -> None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for one in [one for one in waiting if one[1].done()]:
                waiting.remove(one)
                holding.append(one[1].result())
            present = [place for place in pool if place.state in PRESENT]
            assert pool.taken <= LIMIT or len(present) == 1
            assert {place.name: place.users for place in pool if place.users} == {
                name: holding.count(name) for name in set(holding)}
            assert all(pool[name].state == LOADED for name in holding)

        for move, number in moves:
            if move == "ask":
                name = names[number % 4]
                waiting.append((name, asyncio.ensure_future(pool.acquire(name))))
            elif move == "release" and holding:
                pool.release(holding.pop(number % len(holding)))
            elif move == "cancel" and waiting:
                waiting.pop(number % len(waiting))[1].cancel()
            elif move == "finish" and models.jobs:
                models.finish(number % len(models.jobs))
            elif move == "die":
                models.dead |= {place.name for place in pool if place.name == names[number % 4]
                                and place.state == LOADED}
            elif move == "wait":
                models.now += 1.5
                pool.expire()
            await settle()
        # No starvation: as long as those who run end, everybody gets a turn, in a bounded number of rounds, though
        # others keep coming for what is loaded.
        for _ in range(4 * len(SIZES) + len(moves)):
            before = list(waiting)
            if not before:
                break
            waiting += [(name, asyncio.ensure_future(pool.acquire(name))) for name in set(holding)]
            await settle()
            for _ in range(len(holding)):
                pool.release(holding.pop())
            while models.jobs:
                models.finish()
            await settle()
            first = before[0]
            rounds = 0
            while first in waiting and rounds < 2 * len(SIZES) + 2:
                rounds += 1
                for _ in range(len(holding)):
                    pool.release(holding.pop())
                while models.jobs:
                    models.finish()
                await settle()
            assert first not in waiting, f"{first[0]} never got its turn"
        for _, task in waiting:
            task.cancel()
        await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)

    played(play)
