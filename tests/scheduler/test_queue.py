"""The waiting queue: places, and how fast they become free."""

from __future__ import annotations

import pytest
from simulation import World, group

from paceline.cache.manager import CacheManager
from paceline.engine.schedule.limits import SchedulerLimits
from paceline.engine.schedule.queue import WaitingQueue
from paceline.engine.schedule.sequence import Sequence
from paceline.errors import QueueFullError
from paceline.request import Request, SamplingParams, Tenant


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def sequence(order: int, samples: int = 1) -> Sequence:
    request = Request(f"r{order}", [1, 2], SamplingParams(), 0, 16, 0.0)
    leader = Sequence(request, 0, 0, order)
    leader.siblings = [Sequence(request, place, 0, order + place) for place in range(1, samples)]
    return leader


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WaitingQueue:
    return WaitingQueue(clock)


def test_places_are_those_of_all_samples(queue: WaitingQueue) -> None:
    first, second = sequence(0, 3), sequence(10)
    queue.push(first)
    queue.push(second)
    assert (len(queue), queue.samples) == (2, 4)
    first.siblings = []  # what becomes of them while it waits does not unbalance the count
    queue.discard(first)
    queue.discard(first)
    assert (len(queue), queue.samples) == (1, 1)


def test_the_rate_is_that_of_departures_while_somebody_waits(queue: WaitingQueue, clock: Clock) -> None:
    assert queue.seconds_until_free(1) is None
    waiting = [sequence(order) for order in range(20)]
    for seq in waiting:
        queue.push(seq)
    clock.now += 3.0
    assert queue.seconds_until_free(1) == 3.0, "nobody has left so far: at least as long again"
    for seq in waiting[:6]:
        clock.now += 1.5
        queue.discard(seq)
    assert queue.seconds_until_free(1) == pytest.approx(12 / 6)
    assert queue.seconds_until_free(4) == pytest.approx(8.0)
    clock.now += 12.0
    assert queue.seconds_until_free(1) == pytest.approx(4.0), "a queue that has come to a halt"
    for seq in waiting[6:]:
        queue.discard(seq)
    clock.now += 1000.0
    queue.push(sequence(30))
    clock.now += 1.0
    assert queue.seconds_until_free(1) == 1.0, "time in which nobody waited says nothing"


def test_long_ago_is_forgotten(queue: WaitingQueue, clock: Clock) -> None:
    queue.push(sequence(0))
    for order in range(1, 400):
        clock.now += 10.0 if order < 300 else 0.5
        queue.push(sequence(order))
        first = queue.peek()
        assert first is not None
        queue.discard(first)
    assert queue.seconds_until_free(2) == pytest.approx(1.0, rel=0.05)


def test_who_leaves_from_the_middle_is_not_kept(queue: WaitingQueue) -> None:
    """The first of them never surfaces, nor does what stands behind it."""
    queue.push(sequence(0))
    for order in range(1, 200):
        late = sequence(order)
        queue.push(late)
        queue.discard(late)
        assert len(queue._lines[""]._heap) <= 3
    first = queue.peek()
    assert first is not None and first.order == 0
    queue.discard(first)
    assert not queue._lines[""]._heap and queue.peek() is None


def test_deadlines_of_those_who_have_ended_are_not_kept() -> None:
    cache = CacheManager((group("full"),), [101], 4, 8, 16, False)
    world = World(cache, SchedulerLimits(64, 8, 64))
    (kept,) = world.add([5, 5, 5], 20, deadline=50.0)
    for turn in range(500):
        (seq,) = world.add([5, 5, 5], 20, deadline=1e9 + turn)
        world.scheduler.cancel(seq.request.id)
    assert len(world.scheduler._deadlines) < 100
    world.now = 60.0
    assert world.scheduler.expire() == [kept]


def test_a_refusal_says_when_to_come_back(clock: Clock) -> None:
    cache = CacheManager((group("full"),), [101], 4, 8, 16, False)
    world = World(cache, SchedulerLimits(64, 8, 64, max_queue=2))
    world.scheduler._waiting._clock = clock
    world.add([5, 5, 5], 20)
    world.add([5, 5, 5], 20)
    clock.now += 7.0
    with pytest.raises(QueueFullError) as refusal:
        world.add([5, 5, 5], 20)
    assert refusal.value.retry_after_s == 7.0


def test_a_shadow_takes_no_place_and_changes_nobodys_turn(queue: WaitingQueue) -> None:
    """A tenant that was given much is not forgiven because a shadow of its was seated."""
    def of(tenant: str, order: int, shadow: bool = False) -> Sequence:
        return Sequence(Request(f"r{order}", [1, 2], SamplingParams(), 0, 16, 0.0, tenant=Tenant(tenant),
                                shadow=shadow), 0, 0, order)

    queue.push(first := of("anna", 0))
    queue.push(rival := of("bert", 1))
    queue.seat(first, 100)
    queue.seat(rival, 10)
    queue.push(shadow := of("anna", 2, shadow=True))
    assert queue.samples == 0 and queue.places("anna") == 0 and queue.peek() is shadow
    queue.seat(shadow, 2)
    queue.push(of("anna", 3))
    queue.push(other := of("bert", 4))
    assert queue.peek() is other
