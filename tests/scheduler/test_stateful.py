"""Hypothesis drives the scheduler through any order of arrivals, drafts, steps ahead, commits, cancels, time-outs."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulation import STOP, World, group, propose

from paceline.cache.host import HostLimits
from paceline.cache.manager import CacheManager
from paceline.engine.schedule.limits import SchedulerLimits
from paceline.errors import RequestError

GROUPS = st.sampled_from([
    (group("full"),),
    (group("full"), group("window", window=5)),
    (group("window", window=3),),
    (group("full"), group("drafter", lookahead=1)),
    (group("full"), group("window", window=6), group("drafter", lookahead=2, window=4)),
])
STEMS = [[0] * 30, [1, 2, 3, 4, 5] * 6, [1, 2, 3, 0, 0] * 6]


class Serving(RuleBasedStateMachine):
    """Rules are what a server sees; World checks every read, every write and every count after each of them."""

    world: World

    @initialize(groups=GROUPS, block_size=st.integers(1, 4), slack=st.integers(0, 12), seats=st.integers(1, 5),
                budget=st.sampled_from([1, 2, 5, 16]), chunk=st.sampled_from([None, 1, 3]), caching=st.booleans(),
                watermark=st.sampled_from([0.0, 0.25]), collide=st.booleans(),
                preemption=st.sampled_from(["recompute", "swap", "swap"]), swap=st.sampled_from([0, 5, 30]),
                cold=st.sampled_from([0, 3, 8, 30]))
    def build(self, groups, block_size, slack, seats, budget, chunk, caching, watermark, collide, preemption, swap,
              cold) -> None:
        longest = -(-24 // block_size)
        extra = {"hash_function": lambda *_: 0} if collide else {}
        extra["host"] = HostLimits(swap, cold)
        cache = CacheManager(groups, [longest // 2 + 4 + slack] * len(groups), block_size, seats, longest + 2, caching,
                             **extra)
        self.world = World(cache, SchedulerLimits(budget, seats, 24, watermark=watermark, max_chunk=chunk), preemption)

    @rule(stem=st.sampled_from(STEMS), shared=st.integers(0, 20), own=st.lists(st.integers(0, STOP), max_size=8),
          max_tokens=st.integers(1, 10), n=st.sampled_from([1, 1, 2, 3]), priority=st.integers(0, 2),
          salt=st.sampled_from(["", "", "mine"]), tenant=st.sampled_from(["", "", "b", "c"]),
          wait=st.sampled_from([None, None, 3.0]), logprobs=st.booleans(),
          begun=st.none() | st.lists(st.integers(0, 9), min_size=3, max_size=3))
    def arrive(self, stem, shared, own, max_tokens, n, priority, salt, tenant, wait, logprobs, begun) -> None:
        prompt = (stem[:shared] + own)[:23] or [0]
        extra = {"prompt_logprobs": 0} if logprobs and wait is None else {}
        deadline = None if wait is None else self.world.now + wait
        try:
            self.world.add(prompt, max_tokens, n=n, priority=priority, cache_salt=salt, tenant=tenant,
                           deadline=deadline, begun=[min(said, max_tokens - 1) for said in (begun or ())[:n]], **extra)
        except RequestError as error:
            assert "cache holds" in str(error)

    @rule(seed=st.integers(0, 2**16), share=st.sampled_from([0.0, 0.5, 1.0]))
    def schedule(self, seed, share) -> None:
        chance = random.Random(seed)
        for seq in self.world.scheduler.running:
            if chance.random() < share:
                seq.draft = propose(chance, seq)
        self.world.launch()

    @precondition(lambda self: self.world.flight)
    @rule()
    def commit(self) -> None:
        self.world.commit()

    @precondition(lambda self: self.world.everyone)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which) -> None:
        everyone = self.world.everyone
        self.world.scheduler.cancel(everyone[which % len(everyone)].request.id)
        self.world.check()

    @precondition(lambda self: self.world.scheduler.running)
    @rule(which=st.integers(0, 1000))
    def preempt(self, which) -> None:
        running = self.world.scheduler.running
        self.world.scheduler.preempt(running[which % len(running)])
        self.world.check()

    @rule(which=st.integers(0, 1000), rows=st.integers(1, 4))
    def draft_in_place(self, which, rows) -> None:
        ready = [seq for seq in self.world.scheduler.running
                 if not seq.in_flight and seq.prompt_len <= seq.computed == len(seq.tokens) - 1]
        if ready:
            self.world.draft_in_place(ready[which % len(ready)], rows)

    @rule(seconds=st.integers(0, 4))
    def time_passes(self, seconds) -> None:
        self.world.now += seconds
        self.world.scheduler.expire()
        self.world.check()

    @precondition(lambda self: self.world.flight)
    @rule()
    def step_fails(self) -> None:
        self.world.fail()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            while self.world.flight:
                self.world.commit()
            self.world.drain(ahead=True)


class ServingOn(Serving):
    """The same without the rule that breaks steps, which would keep the prefix cache empty."""

    step_fails = None  # type: ignore[assignment]


class ServingLong(ServingOn):
    """The same, for longer."""


TestServing = ServingOn.TestCase
TestServing.settings = settings(max_examples=20, stateful_step_count=50, suppress_health_check=list(HealthCheck))
TestServingWithFailures = Serving.TestCase
TestServingWithFailures.settings = settings(max_examples=10, stateful_step_count=40,
                                            suppress_health_check=list(HealthCheck))
TestServingLong = pytest.mark.full(ServingLong.TestCase)
TestServingLong.settings = settings(max_examples=300, stateful_step_count=50, suppress_health_check=list(HealthCheck))
