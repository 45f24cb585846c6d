"""ModelPool: who is loaded, who waits, who goes. Loads end when the test says so, and the clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.serve.pool import (
    FAILED,
    LOADED,
    LOADING,
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

    def __init__(self, sizes: dict[str, int], limit: int, idle_s: float = 0.0) -> None:
        self.true = dict(sizes)
        self.now = 0.0
        self.dead: set[str] = set()
        self.broken: set[str] = set()
        self.jobs: list[tuple[Callable[[], Any], Callable[..., None]]] = []
        self.loads: list[str] = []
        self.reclaimed = 0
        self.pool: ModelPool[str] = ModelPool(sizes.items(), limit, self, idle_s=idle_s, clock=lambda: self.now,
                                              run=lambda work, then: self.jobs.append((work, then)))

    def load(self, name: str) -> str:
        self.loads.append(name)
        self.dead.discard(name)
        if name in self.broken:
            raise OSError("no such file")
        return name

    def unload(self, loaded: str) -> None:
        assert self.pool[loaded].users == 0, "it is in use"

    def reclaim(self) -> None:
        self.reclaimed += 1

    def size(self, loaded: str) -> int:
        return self.true[loaded]

    def alive(self, loaded: str) -> bool:
        return loaded not in self.dead

    def finish(self, which: int = 0) -> None:
        """One of the jobs under way."""
        work, then = self.jobs.pop(which)
        try:
            result = work()
        except OSError as problem:
            then(None, problem)
        else:
            then(result, None)

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
