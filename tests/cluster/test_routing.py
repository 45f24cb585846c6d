"""Routing: the longest cached beginning, unless its holder is much busier; ties that stay; what was just sent."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster import routing
from paceline.cluster.routing import (
    FRESH_S,
    HANDED_OVER,
    LISTED,
    POLICIES,
    SEQUENCE_TOKENS,
    Candidate,
    Features,
    PrefixAware,
    Random,
    RoundRobin,
)

NAMES = ("a", "b", "c")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def order(*digests: int, tokens: int | None = None, **more) -> Features:
    return Features(16 * len(digests) + 1 if tokens is None else tokens, digests, **more)


def replicas(**states) -> list[Candidate]:
    return [Candidate(name, **states.get(name, {})) for name in NAMES]


def test_the_longest_beginning_wins() -> None:
    known = replicas(a={"blocks": {1}}, b={"blocks": {1, 2, 3}}, c={"blocks": {2, 3, 4}})
    assert PrefixAware().choose(order(1, 2, 3, 4), known) == "b"


def test_a_hole_ends_what_can_be_used() -> None:
    assert order(1, 2, 3).cached({1, 3}) == 16
    assert order(1, 2, tokens=32).cached({1, 2}) == 31, "the last token is always computed"


def test_a_much_busier_holder_loses() -> None:
    prompt = order(1, 2, 3, 4)
    enough = len(prompt.digests) * 16 // SEQUENCE_TOKENS
    for running, chosen in ((enough, True), (enough + 2, False)):
        known = replicas(b={"blocks": {1, 2, 3, 4}, "running": running})
        assert (PrefixAware().choose(prompt, known) == "b") == chosen or running == enough


def test_what_waits_counts_for_those_it_comes_before() -> None:
    known = replicas(a={"waiting": {0: 500}}, b={"waiting": {5: 100}}, c={"waiting": {5: 300}})
    assert PrefixAware().choose(order(tokens=10, priority=0), known) == "b"
    assert PrefixAware().choose(order(tokens=10, priority=5), known) == "a", "it overtakes what waits there"


def test_an_adapter_at_hand() -> None:
    known = replicas(b={"adapters": {"poet"}, "running": 3})
    assert PrefixAware().choose(order(tokens=10, adapter="poet"), known) == "b"


def test_equals_are_told_apart_by_the_beginning_alone() -> None:
    policy = PrefixAware()
    chosen = {first: policy.choose(order(first, 7), replicas()) for first in range(200)}
    assert chosen == {first: PrefixAware().choose(order(first, 8), replicas()[::-1]) for first in range(200)}
    assert min(Counter(chosen.values()).values()) > 30, "beginnings spread"
    left = replicas()[:2]
    assert all(PrefixAware().choose(order(first), left) == name for first, name in chosen.items() if name != "c")


def test_what_was_just_sent_counts_before_it_is_published() -> None:
    clock = Clock()
    policy = PrefixAware(clock)
    sent = order(1, 2, 3)
    policy.begun(sent, "c")
    assert policy.choose(order(9, 8, 7), replicas()) != "c", "it is at work there"
    policy.ended(sent, "c")
    assert policy.choose(order(1, 2, 3, 4), replicas()) == "c"
    clock.now = FRESH_S + 1
    assert policy.cost(order(1, 2, 3, 4), Candidate("c")) == 65, "it published that it holds nothing"


def test_what_was_just_sent_is_load_before_it_is_published() -> None:
    clock = Clock()
    policy = PrefixAware(clock)
    for number in range(30):
        prompt = order(tokens=100 + number)
        policy.begun(prompt, policy.choose(prompt, replicas()) or "")
    assert {name: len(sent.live) for name, sent in policy._replicas.items()} == dict.fromkeys(NAMES, 10)


def test_what_ended_is_no_load_whatever_was_published_before() -> None:
    clock = Clock()
    policy = PrefixAware(clock)
    first, then = order(*range(1, 30)), order(*range(1, 31))
    policy.begun(first, "c")
    clock.now = 0.5
    known = replicas(c={"running": 1, "waiting": {0: 400}})
    assert policy.choose(then, known) == "b" or policy.cost(then, known[2]) > 400
    policy.ended(first, "c")
    assert policy.choose(then, known) == "c", "it was ours, and is over"
    assert policy.cost(order(tokens=1), replicas(c={"running": 1, "waiting": {0: 400}})[2]) > 400, "news"


def test_progress_counts_before_anything_is_published() -> None:
    policy = PrefixAware(Clock())
    first = order(*range(1, 30))
    policy.begun(first, "c")
    busy = policy.cost(order(tokens=1), Candidate("c"))
    first.progress.answered = True
    running = policy.cost(order(tokens=1), Candidate("c"))
    first.progress.over = True
    assert (busy, running, policy.cost(order(tokens=1), Candidate("c"))) == (1 + 465 + 64, 1 + 64, 1)


def test_what_was_said_before_an_order_ended_is_not_believed_after() -> None:
    """A replica publishes while it computes a prompt, and that is heard when it has answered: the next turn of the
    conversation finds it idle all the same."""
    clock = Clock()
    policy = PrefixAware(clock)
    first, then = order(*range(1, 30), id=7), order(*range(1, 31), id=8)
    policy.begun(first, "c")
    first.progress.answered = first.progress.over = True
    policy.ended(first, "c")
    clock.now = 3.0
    late = replicas(c={"running": 1, "waiting": {0: 465}, "orders": {7: 465}})
    assert policy.cost(then, late[2]) == 17
    assert policy.choose(then, late) == "c"
    others = replicas(c={"running": 2, "waiting": {0: 465 + 200}, "orders": {7: 465, 99: 200}})
    assert policy.cost(then, others[2]) == 17 + 200 + SEQUENCE_TOKENS, "other fronts' orders count"
    policy.begun(then, "c")
    assert policy.cost(order(tokens=1), others[2]) == 1 + 17 + 200 + SEQUENCE_TOKENS, "and one that it had not got"


def test_prompts_that_are_brought_in_weigh_little() -> None:
    known = replicas(a={"blocks": set(range(1, 30)), "running": 1}, b={"running": 3}, c={"running": 3})
    assert PrefixAware(Clock()).choose(order(*range(1, 30)), known) == "a"
    known = replicas(a={"blocks": set(range(1, 30)), "running": 3}, b={"running": 1}, c={"running": 3})
    assert PrefixAware(Clock()).choose(order(*range(1, 30)), known) == "a"
    assert PrefixAware(Clock(), prompt_cost=HANDED_OVER).choose(order(*range(1, 30)), known) == "b"


def many(number: int = 1000, **states) -> list[Candidate]:
    return [Candidate(f"r{place}", **states.get(f"r{place}", {"running": 1})) for place in range(number)]


def test_of_many_replicas_few_are_weighed(monkeypatch) -> None:
    weighed, counted = [], []
    cost, before = PrefixAware.cost, routing._Sent.before
    monkeypatch.setattr(PrefixAware, "cost", lambda self, order, one: weighed.append(one) or cost(self, order, one))
    monkeypatch.setattr(routing._Sent, "before", lambda self, priority: counted.append(self) or before(self, priority))
    policy = PrefixAware(Clock())
    known = many()
    policy.choose(order(1, 2, 3), known)
    weighed.clear()
    counted.clear()
    for number in range(100):
        prompt = order(*range(number % 9, number % 9 + 40))
        name = policy.choose(prompt, known)
        policy.begun(prompt, name or "")
        policy.ended(prompt, name or "")
    assert len(weighed) <= 100 * 3 * LISTED
    assert len(counted) <= 100 * (3 * LISTED + 2), "loads are made anew where something happened"


def test_of_many_replicas_the_right_ones_are_weighed() -> None:
    for states, chosen in (
            ({"r700": {"running": 0}}, "r700"),
            ({"r700": {"blocks": set(range(20)), "running": 2}}, "r700"),
            ({f"r{place}": {"blocks": set(range(3)), "running": 2} for place in range(900)} | {
                "r901": {"blocks": set(range(18)), "running": 3}}, "r901"),
            ({f"r{place}": {"blocks": set(range(18)), "running": 3} for place in range(900)} | {
                "r17": {"blocks": set(range(19)), "running": 90}, "r33": {"blocks": set(range(18)), "running": 2}},
             "r33")):
        known = many(**states)
        prompt = order(*range(20))
        policy = PrefixAware(Clock())
        assert policy.choose(prompt, known) == chosen
        assert policy.cost(prompt, known[int(chosen[1:])]) == min(policy.cost(prompt, one) for one in known)


def test_of_many_equals_beginnings_spread_and_stay() -> None:
    policy, known = PrefixAware(Clock()), many(100)
    chosen = [policy.choose(order(first, 7), known) for first in range(150)]
    assert len(set(chosen)) > 60
    assert chosen == [PrefixAware(Clock()).choose(order(first, 9), known[::-1]) for first in range(150)]


def test_round_robin_takes_turns() -> None:
    policy = RoundRobin()
    turns = []
    for _ in range(7):
        name = policy.choose(order(1), replicas())
        policy.begun(order(1), name or "")
        turns.append(name)
    assert turns == ["a", "b", "c", "a", "b", "c", "a"]


def test_random_is_seeded() -> None:
    first, again = Random(3), Random(3)
    assert [first.choose(order(1), replicas()) for _ in range(9)] == [again.choose(order(1), replicas())
                                                                      for _ in range(9)]


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_is_sent_to_who_leaves(name: str) -> None:
    policy = POLICIES[name]()
    known = [Candidate("a", blocks={1}, draining=True), Candidate("b", running=99)]
    assert {policy.choose(order(1), known) for _ in range(20)} == {"b"}
    assert policy.choose(order(1), known[:1]) is None
    assert policy.choose(order(1), []) is None


@pytest.mark.parametrize("name", POLICIES)
def test_who_was_lost_over_it_is_the_last_resort(name: str) -> None:
    known = [Candidate("a", blocks={1}), Candidate("b", running=99)]
    assert {POLICIES[name]().choose(order(1, avoid={"a"}), known) for _ in range(20)} == {"b"}
    assert POLICIES[name]().choose(order(1, avoid={"a", "b"}), known) in ("a", "b")


@st.composite
def situations(draw):
    blocks = st.frozensets(st.integers(0, 12), max_size=12)
    known = [Candidate(name, draw(blocks), draw(st.integers(0, 9)), draw(st.dictionaries(
        st.integers(-1, 1), st.integers(0, 400), max_size=2))) for name in draw(st.permutations(NAMES))]
    digests = tuple(draw(st.lists(st.integers(0, 12), unique=True, max_size=8)))
    return order(*digests, priority=draw(st.integers(-1, 1))), known


@given(situations(), st.randoms())
def test_a_choice_is_a_function_of_what_is_known(situation, shuffler) -> None:
    prompt, known = situation
    chosen = PrefixAware().choose(prompt, known)
    policy = PrefixAware()
    assert all(policy.cost(prompt, other) >= policy.cost(prompt, one) for one in known if one.name == chosen
               for other in known)
    shuffled = list(known)
    shuffler.shuffle(shuffled)
    assert PrefixAware().choose(prompt, shuffled) == chosen


@given(situations())
def test_more_load_never_attracts(situation) -> None:
    prompt, known = situation
    chosen = PrefixAware().choose(prompt, known)
    busier = [one if one.name == chosen else Candidate(one.name, one.blocks, one.running + 3, one.waiting)
              for one in known]
    assert PrefixAware().choose(prompt, busier) == chosen
