"""Tenants share an engine: seats by the tokens each was given, a step's prompt rows, and the places of the queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import World
from test_scheduler import make, shape, talker

from paceline.engine.schedule.queue import WaitingQueue
from paceline.engine.schedule.sequence import Sequence, Status
from paceline.engine.schedule.shares import divide
from paceline.errors import QueueFullError
from paceline.request import Request, SamplingParams, Tenant

COSTS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=12)
"""Of one tenant's requests: tokens of the prompt, tokens of the output."""


def sequence(tenant: str, order: int, prompt: int = 1, priority: int = 0) -> Sequence:
    request = Request(f"{tenant}{order}", [1] * prompt, SamplingParams(priority=priority), 0, 16, 0.0,
                      tenant=Tenant(tenant))
    return Sequence(request, 0, 0, order)


def next_one(queue: WaitingQueue) -> Sequence:
    found = queue.peek()
    assert found is not None
    return found


# ------------------------------------------------------------------ seats

@given(tenants=st.lists(COSTS, min_size=1, max_size=5))
def test_given_tokens_differ_by_one_request_at_most_while_all_wait(tenants: list[list[tuple[int, int]]]) -> None:
    queue, order = WaitingQueue(), 0
    costs: dict[Sequence, int] = {}
    lines: dict[str, list[Sequence]] = {}
    for number, requests in enumerate(tenants):
        for prompt, output in requests:
            seq = sequence(f"t{number}", order, prompt)
            costs[seq] = prompt + output
            lines.setdefault(f"t{number}", []).append(seq)
            queue.push(seq)
            order += 1
    dearest, given_tokens = max(costs.values()), dict.fromkeys(lines, 0)
    left = {name: list(line) for name, line in lines.items()}
    while all(left.values()):
        seq = next_one(queue)
        name = seq.request.tenant.name
        assert seq is left[name].pop(0), "first come, first served inside a tenant"
        queue.seat(seq, seq.prompt_len)
        queue.serve(seq, costs[seq] - seq.prompt_len)
        given_tokens[name] += costs[seq]
        assert max(given_tokens.values()) - min(given_tokens.values()) <= dearest
    while (seq := queue.peek()) is not None:  # nobody is left out
        name = seq.request.tenant.name
        assert seq is left[name].pop(0)
        queue.seat(seq, costs[seq])
    assert not any(left.values()) and not queue.samples


@given(before=st.integers(1, 60), served=st.integers(0, 59), cost=st.integers(1, 100))
def test_a_newcomer_goes_ahead_of_those_who_wait_in_numbers(before: int, served: int, cost: int) -> None:
    queue = WaitingQueue()
    for order in range(before + 1):
        queue.push(sequence("many", order, cost))
    for _ in range(min(served, before)):
        queue.seat(next_one(queue), cost)
    queue.push(new := sequence("new", 1000, cost))
    if served:
        assert queue.peek() is new
    else:  # nobody was given anything yet: who came first, and then the newcomer
        queue.seat(next_one(queue), cost)
        assert queue.peek() is new


def test_rest_earns_no_credit() -> None:
    """A tenant that had one small request running for hours does not own the engine afterwards."""
    queue = WaitingQueue()
    queue.push(small := sequence("small", 0))
    queue.seat(small, 1)
    for order in range(1, 100):
        queue.push(one := sequence("busy", order, 100))
        queue.seat(one, 100)
    for order in range(100, 120):
        queue.push(sequence("small", order, 100))
        queue.push(sequence("busy", order + 100, 100))
    names = [seq.request.tenant.name for seq in queue.snapshot()[:10]]
    assert names.count("busy") in (4, 5)


def test_tenants_that_never_come_back_are_forgotten_and_starve_nobody() -> None:
    queue = WaitingQueue()
    queue.push(sequence("patient", 0, 10))
    queue.seat(next_one(queue), 10)
    queue.push(patient := sequence("patient", 1, 10))
    for order in range(2, 2000):
        queue.push(sequence(f"new{order}", order, 10))
        one = next_one(queue)
        if one is patient:
            break
        queue.seat(one, 10)
    assert one is patient and order < 20
    for order in range(2000, 6000):
        queue.push(one := sequence(f"new{order}", order, 10))
        queue.seat(one, 10)
    assert len(queue._lines) < 20


def test_priority_comes_before_shares() -> None:
    queue = WaitingQueue()
    queue.push(sequence("a", 0, 100))
    queue.seat(next_one(queue), 100)
    queue.push(urgent := sequence("a", 1, 100, priority=1))
    queue.push(sequence("b", 2))
    assert queue.peek() is urgent and queue.snapshot()[0] is urgent


def test_one_seat_goes_by_tokens_read_and_written() -> None:
    """With one seat: ten requests of one key, and then one of another."""
    world = make(seats=1)
    many = [talker(world, 4, tokens=6, tenant="many") for _ in range(10)]
    world.turn()
    first = talker(world, 4, tokens=6, tenant="first")
    assert world.scheduler.waiting[0] is first
    while first.status is not Status.FINISHED:
        world.turn()
    assert sum(seq.admitted is not None for seq in many) <= 2
    world.drain()


def test_preempted_sequences_go_before_new_ones_of_their_tenant() -> None:
    world = make(seats=2)
    first, second = talker(world, 4, tenant="a"), talker(world, 4, tenant="a")
    world.turn()
    third = talker(world, 4, tenant="a")
    world.scheduler.preempt(second)
    assert world.scheduler.waiting == [second, third]
    world.drain()
    assert first.status is Status.FINISHED


# ------------------------------------------------------------------ a step's prompt rows

@given(rows=st.integers(0, 100), wanted=st.dictionaries(st.tuples(st.just(0), st.text(max_size=2)),
                                                         st.integers(1, 80), min_size=1, max_size=6))
def test_shares_are_equal_where_they_are_wanted(rows: int, wanted: dict[tuple[int, str], int]) -> None:
    shares = divide(rows, wanted)
    assert sum(shares.values()) == pytest.approx(min(rows, sum(wanted.values())))
    cut = [share for key, share in shares.items() if share < wanted[key]]
    assert all(share <= min(cut, default=share) + 1e-9 for share in shares.values())


def test_a_short_prompt_does_not_wait_behind_another_tenants_long_one() -> None:
    world = make(budget=8, max_len=256, blocks=201)
    talker(world, 100, tenant="long")
    assert shape(world.turn()) == [("r0", 0, 8)]
    talker(world, 3, tenant="short")
    assert shape(world.turn()) == [("r0", 8, 5), ("r1", 0, 3)]
    assert shape(world.turn()) == [("r1", 3, 1), ("r0", 13, 7)]
    world.drain()


def test_long_prompts_of_two_tenants_share_a_step() -> None:
    world = make(budget=8, max_len=256, blocks=201)
    talker(world, 50, tenant="a")
    talker(world, 50, tenant="b")
    assert shape(world.turn()) == [("r0", 0, 4), ("r1", 0, 4)]
    world.drain()


def test_one_tenant_and_higher_priorities_are_served_in_order_as_ever() -> None:
    world = make(budget=8, max_len=256, blocks=201)
    talker(world, 50, tenant="a")
    talker(world, 50, tenant="a")
    assert shape(world.turn()) == [("r0", 0, 8)]
    world = make(budget=8, max_len=256, blocks=201)
    talker(world, 50, tenant="a", priority=1)
    talker(world, 50, tenant="b")
    assert shape(world.turn()) == [("r0", 0, 8)]
    world.drain()


def test_a_share_for_somebody_who_cannot_be_seated_stops_nobody() -> None:
    """The waiting one has the higher priority and does not fit: the one that runs goes on."""
    world = make(budget=4, blocks=12, max_len=64)
    talker(world, 30, tokens=2, tenant="a", priority=2)
    world.turn()
    talker(world, 40, tokens=2, tenant="b", priority=2)
    for _ in range(40):
        if not world.scheduler.has_work():
            break
        assert world.turn() is not None
    assert not world.scheduler.has_work()


# ------------------------------------------------------------------ places

def fill(world: World, tenant: str, most: int = 50) -> int:
    """How many requests of a tenant are let in."""
    for count in range(most):
        try:
            talker(world, 2, tenant=tenant)
        except QueueFullError:
            return count
    return most


def test_nobody_fills_the_queue_for_all() -> None:
    world = make(max_queue=12)
    assert fill(world, "a") == 12, "alone it may have all of it"
    assert fill(world, "b") == 6, "and of several each has its share, whoever came first"
    assert fill(world, "c") == 4
    assert fill(world, "a") == 0
    assert world.scheduler.queue_length <= 12 * (1 + 1 / 2 + 1 / 3)


def test_without_tenants_the_queue_is_as_long_as_it_says() -> None:
    world = make(max_queue=5)
    assert fill(world, "") == 5
    with pytest.raises(QueueFullError, match="limit"):
        talker(world, 2)
