"""Over all requests of a step: what is drafted is what brings most tokens a second, whoever it is for, and under load
nothing at all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculation.control import AdaptiveController
from paceline.speculation.controller import Ahead, Ask
from paceline.speculation.drafter import Needs, Observation
from paceline.speculation.exploration import KNOWN, SHARE, Allowance
from paceline.speculation.joint import best_choice, blocks
from paceline.speculation.spec import Speculation
from paceline.speculation.step_cost import Load
from paceline.speculation.tree import DraftTree
from speculation.controlled import timed
from speculation.simulation import Asked, Drafter, K, Simulation, at_once, goodput, machine

# ---------------------------------------------------------------- the joint choice


def brute_force(drafts: Sequence[Sequence[float]], rows: int, cost: Callable[[int], float], pace: float) -> float:
    """The best win of all prefixes of all drafts."""
    return max(sum(sum(own[:count]) for own, count in zip(drafts, counts))
               - pace * (cost(rows + sum(counts)) - cost(rows))
               for counts in product(*(range(len(own) + 1) for own in drafts)))


chains = st.lists(st.lists(st.floats(0.05, 0.99), max_size=4), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(chains, st.lists(st.floats(0.0, 3e-3), min_size=40, max_size=40), st.floats(10.0, 1000.0))
def test_the_choice_is_the_best_of_all(rates: list[list[float]], stairs: list[float], pace: float) -> None:
    """Whatever a further row costs: stairs, plains, anything that rises."""
    def cost(rows: int) -> float:
        return 5e-3 + sum(stairs[:rows]) + 1e-3 * max(0, rows - 40)

    drafts = []
    for own in rates:
        alive, chances = 1.0, []
        for rate in own:
            alive *= rate
            chances.append(alive)
        drafts.append(chances)
    choice = best_choice([blocks(own) for own in drafts], len(drafts), cost, pace)
    won = sum(sum(own[:count]) for own, count in zip(drafts, choice.nodes)) \
        - pace * (cost(len(drafts) + sum(choice.nodes)) - cost(len(drafts)))
    assert choice.win == pytest.approx(won) == pytest.approx(brute_force(drafts, len(drafts), cost, pace))


def test_a_weak_node_is_taken_for_what_follows_and_a_window_whole() -> None:
    assert [block.nodes for block in blocks([0.1, 0.9, 0.2])] == [2, 1]
    assert [block.nodes for block in blocks([0.5, 0.1, 0.1], whole=True)] == [3]
    assert blocks([]) == blocks([], whole=True) == []


def test_of_equal_chances_the_beginning_of_the_first_comes_first() -> None:
    def stairs(rows: int) -> float:
        return 1.0 if rows <= 4 else 100.0

    choice = best_choice([blocks([0.5, 0.5, 0.5]), blocks([0.5, 0.5])], 2, stairs, 1.0)
    assert choice.nodes == [1, 1]


def crowd(count: int, seconds: dict[int, float], **wish: Any) -> AdaptiveController:
    """So many sequences, named by their numbers, whose drafts are known to be worth what they say."""
    control = AdaptiveController()
    for rows, took in seconds.items():
        for _ in range(3):
            timed(control, rows, took)
    for number in range(count):
        control.begin(number, Drafter(), Speculation("drafter", k=K, **wish))  # type: ignore[arg-type]
    control._methods.of("drafter").cycles = 100
    return control


def sent(control: AdaptiveController, scores: Sequence[Sequence[float]], behind: Sequence[int] = ()) -> list[int]:
    ahead = Ahead(len(scores), len(scores))
    offers = [control.judge(Ask(number, 0, number in behind), DraftTree.chain([1] * len(own), "drafter", list(own)),
                            ahead) for number, own in enumerate(scores)]
    trees = control.choose([offer for offer in offers if offer is not None], ahead)
    return [0 if tree is None else len(tree) for tree in trees]


ROOMY = {1: 5e-3, 4: 5e-3, 6: 5.2e-3, 7: 9e-3, 16: 20e-3}
"""Up to six rows cost next to nothing."""


def test_rows_go_to_whoever_gains_most_not_to_who_is_asked_first() -> None:
    assert sent(crowd(4, ROOMY), [[0.3, 0.3], [0.95, 0.9], [0.3], [0.3]]) == [0, 2, 0, 0]
    assert sent(crowd(4, ROOMY), [[0.9], [0.5], [0.9], [0.5]]) == [1, 0, 1, 0]


def test_who_is_slower_than_its_target_comes_first() -> None:
    scores = [[0.8, 0.8], [0.75, 0.75], [0.1], [0.1]]
    assert sent(crowd(4, ROOMY), scores)[1] < sent(crowd(4, ROOMY), scores, behind=[1])[1]


def test_nobody_is_drafted_for_while_a_prompt_would_be_late() -> None:
    control = crowd(2, ROOMY)
    control.begin("fixed", Drafter(), Speculation("drafter", k=2, adaptive=False))  # type: ignore[arg-type]
    asks = [Ask(0), Ask(1), Ask("fixed")]
    assert control.budgets(asks, Ahead(3, 3, most=0)) == [None] * 3
    assert all(control.budgets(asks, Ahead(3, 3)))


def test_nobody_is_asked_for_drafts_that_have_no_rows() -> None:
    """And those few rows go to whoever gains most."""
    control = crowd(16, {1: 5e-3, 64: 6e-3})
    asks = [Ask(number, behind=number == 9) for number in range(16)]
    given = control.budgets(asks, Ahead(16, 16, most=3))
    assert 1 <= sum(one.depth for one in given if one is not None) <= 3
    assert all(control.budgets(asks, Ahead(16, 16)))
    offers = [control.judge(ask, DraftTree.chain([1, 1], "drafter", [chance, chance]), Ahead(16, 16, most=3))
              for ask, chance in zip(asks, (0.5, 0.9, 0.6))]
    trees = control.choose([offer for offer in offers if offer is not None], Ahead(16, 16, most=3))
    assert [0 if tree is None else len(tree) for tree in trees] == [0, 2, 1]


@pytest.mark.parametrize("scored", [False, True])
def test_the_few_rows_of_a_crowd_find_those_whom_drafts_serve(scored: bool) -> None:
    """Wherever they stand."""
    control, served = crowd(16, {1: 5e-3, 16: 6e-3, 64: 9e-3}), 0
    ahead, asks = Ahead(16, 16, most=3), [Ask(number) for number in range(16)]
    for _ in range(400):
        given = control.budgets(asks, ahead)
        assert sum(one is not None for one in given) <= 3
        offers = []
        for ask, one in zip(asks, given):
            good = int(str(ask.sequence)) > 12
            tree = DraftTree.chain([1], "drafter", [0.9 if good else 0.01] if scored else None)
            offers.append(None if one is None else control.judge(ask, tree, ahead))
        trees = dict(zip([offer.ask for offer in offers if offer],
                         control.choose([offer for offer in offers if offer], ahead)))
        for ask in asks:
            sent, good = trees.get(ask), int(str(ask.sequence)) > 12
            served += good and sent is not None
            control.learn(ask.sequence, Observation([1, 1] if good else [9], [0] if good and sent else [], sent))
        control.stepped(Load(16), 16, 16, 0.0)
    assert served > 400


def test_all_pay_for_rows_that_all_may_have() -> None:
    """A few cheap rows are no bargain for sixteen."""
    for count, price in ((4, 0.0), (16, 0.9)):
        control = crowd(count, {16: 10e-3, 20: 10e-3, 32: 19e-3})
        control._methods.of("drafter").traits.scored = True
        given = control.budgets([Ask(number) for number in range(count)], Ahead(16, 16))
        assert [one and one.price for one in given] == [pytest.approx(price, abs=0.01)] * count


def test_a_draft_is_weighed_by_what_of_it_has_room() -> None:
    """Its first node alone would not pay for the round, four would, and so do three."""
    control = crowd(1, {1: 5e-3, 8: 5.2e-3})
    history = control._states[0].history
    for depth in range(1, 9):
        history.traits.cost.observe(depth, 2e-3)
    for most in (3, 64):
        (given,) = control.budgets([Ask(0)], Ahead(1, 1, most=most))
        assert given is not None and 1 < given.depth <= most


def test_long_contexts_make_rows_dear() -> None:
    control = crowd(1, {1: 5e-3, 8: 6e-3})
    control.cost.context.believe(2e-7)
    chances = [0.9, 0.9, 0.9, 0.9]
    counts = []
    for context in (100, 60_000):
        ahead = Ahead(1, 1, context)
        offer = control.judge(Ask(0, context), DraftTree.chain([1] * 4, "drafter", chances), ahead)
        assert offer is not None
        (tree,) = control.choose([offer], ahead)
        counts.append(0 if tree is None else len(tree))
    assert counts[0] == 4 and counts[1] < 4


# ---------------------------------------------------------------- finding out


def test_tries_take_their_share_of_the_time_however_dear() -> None:
    for dear in (1e-4, 3e-2):
        allowance, spent = Allowance(), 0.0
        for _ in range(10_000):
            allowance.earn(1e-2)
            spent += dear if allowance.spend(dear) else 0.0
        assert spent <= 1.02 * SHARE * 100.0 + dear


def test_what_nothing_is_known_of_is_tried_by_one_in_eight() -> None:
    control = AdaptiveController()
    for rows in (8, 16, 32, 64):
        for _ in range(3):
            timed(control, rows, machine(Load(rows)))
    for number in range(16):
        control.begin(number, Drafter(), Speculation("drafter", k=K))  # type: ignore[arg-type]
    asks, drafted = [Ask(number) for number in range(16)], 0
    for _ in range(30):
        given = control.budgets(asks, Ahead(16, 16))
        assert sum(one is not None for one in given) <= 2 or control._methods.of("drafter").cycles >= KNOWN
        drafted += sum(one is not None for one in given)
        for ask, one in zip(asks, given):
            tree = None if one is None else DraftTree.chain([1], "drafter")
            offer = control.judge(ask, tree, Ahead(16, 16))
            control.learn(ask.sequence, Observation([9], [], None if offer is None else tree))
        control.stepped(Load(16), 16, 16, 0.0)
    assert KNOWN <= drafted <= 18, "those tell the others, and few are tried again"


@pytest.mark.parametrize("count", [1, 8, 32, 64])
@pytest.mark.parametrize("claimed", [None, 0.7])
def test_a_worthless_drafter_costs_next_to_nothing(count: int, claimed: float | None) -> None:
    """On prompts that come once, and answers that are short."""
    plain, controlled = (at_once(count, mode, 0.02, claimed) for mode in ("off", "control"))
    assert controlled >= 0.98 * plain


@pytest.mark.parametrize("count", [2, 8, 32])
def test_the_time_of_a_dear_drafter_is_counted_when_it_is_tried(count: int) -> None:
    """It takes as long as a step for each sequence, is always wrong and does not say so."""
    plain, controlled = (Simulation(mode, count, drafting=5e-3).calibrated() for mode in ("off", "control"))
    for one in (plain, controlled):
        one.serve([Asked(0.0, 8, 48, 0.02, seed) for seed in range(16 * count)])
    assert plain.now >= 0.96 * controlled.now


@pytest.mark.parametrize(("count", "share"), [(1, 0.9), (16, 0.2)])
def test_a_cheap_drafter_is_not_asked_where_no_draft_is_worth_its_rows(count: int, share: float) -> None:
    """Alone it is asked always, for what it may have to say: what it says is sent."""
    simulation = Simulation("control", count, drafting=1e-5).calibrated()
    simulation.serve([Asked(0.0, 24, 200, 0.5, seed, 0.5) for seed in range(4 * count)])
    asked = simulation.asked[len(simulation.asked) // 4:]
    assert (sum(asked) > share * len(asked) * count) == (count == 1)


def test_a_dear_drafter_that_never_has_anything_to_say_is_asked_ever_more_rarely() -> None:
    control, ahead = crowd(1, {1: 5e-3, 2: 6e-3, 8: 9e-3}), Ahead(1, 1)
    control._methods.of("drafter").cycles = 0
    asked = 0
    for _ in range(400):
        if control.budgets([Ask(0)], ahead)[0] is not None:
            asked += 1
            control.drafted(0, K, 3e-3)
            assert control.judge(Ask(0), None, ahead) is None
        control.learn(0, Observation([7]))
        control.stepped(Load(1), 1, 1, 0.0)
    assert KNOWN <= asked <= KNOWN + 8


def test_steps_that_waver_make_no_drafts_seem_worth_it() -> None:
    """Of many sizes some were quick by chance: those are not chosen for it. (They cost 4 %.)"""
    plain = controlled = 0.0
    for seed in range(3):
        chance = random.Random(seed)

        def wavering(load: Load, chance: random.Random = chance) -> float:
            return machine(load) * chance.uniform(0.9, 1.1)

        plain += at_once(64, "off", 0.3, None, 128, seconds=wavering)
        controlled += at_once(64, "control", 0.3, None, 128, seconds=wavering)
    assert controlled >= 0.97 * plain


def test_a_drafter_of_each_request_takes_as_long_as_all_of_them() -> None:
    """They share a method and what is known of its speed, not the time of a round."""
    control = crowd(8, ROOMY)
    for _ in range(3):
        for number in range(8):
            control.drafted(number, K, 1e-3)
        control.budgets([Ask(number) for number in range(8)], Ahead(8, 8))
    assert control._methods.of("drafter").traits.rounds(8) == pytest.approx(8e-3)


def test_rows_of_drafts_are_not_counted_as_plain_decoding_would_have_them() -> None:
    """Behind long texts: five rows that bring one token are no faster than one."""
    control = crowd(1, {1: 5e-3, 2: 5.5e-3, 5: 6.5e-3, 8: 8e-3})
    control.cost.context.believe(5e-7)
    for tokens in (1, 5):
        control._speeds.clear()
        control.stepped(Load(5, 5 * 20_000.0), 1, tokens, 0.0)
        plain, spent = control._speeds[1]
        assert plain / spent == pytest.approx(tokens * control.cost(1, 20_000.0) / control.cost(5, 100_000.0))


# ---------------------------------------------------------------- load


CAPACITY = 64 / machine(Load(64))


def traffic(load: float, lucks: tuple[float, float], requests: int = 80) -> list[Asked]:
    """Arrivals at a share of what plain decoding can do; every second drafter is lucky."""
    chance, now, found = random.Random(3), 0.0, list[Asked]()
    for number in range(requests):
        now += chance.expovariate(load * CAPACITY / 84)
        luck = lucks[number % 2]
        found.append(Asked(now, 24, 64, luck, number, min(0.9, luck + 0.1)))
    return found


@pytest.mark.parametrize(("lucks", "middle"), [((0.85, 0.15), 0.4), ((0.9, 0.9), 0.55)])
def test_goodput_is_that_of_the_better_of_always_and_never_at_every_load(lucks: tuple[float, float],
                                                                         middle: float) -> None:
    for load in (0.1, 0.4, 0.55, 0.85, 1.2):
        never, always, controlled = (goodput(Simulation(mode).calibrated().serve(traffic(load, lucks)))
                                     for mode in ("off", "on", "control"))
        assert controlled >= 0.97 * max(never, always), load
        if load == middle:
            assert controlled > 1.01 * max(never, always)


def test_without_a_calibration_it_is_learnt_on_the_way_under_traffic() -> None:
    """Nearly all steps hold prompts: what their rows take has to be told apart."""
    requests = traffic(0.7, (0.9, 0.9))
    for one in requests:
        one.tokens = 24
    learnt, known = Simulation("control"), Simulation("control").calibrated()
    slow, fast = goodput(learnt.serve(requests)), goodput(known.serve(traffic(0.7, (0.9, 0.9))))
    assert slow > 0.0 and fast > 0.0 and sum(learnt.sent) > 0
    for rows in (2, 4, 8):
        assert learnt.control.cost(rows) == pytest.approx(machine(Load(rows)), rel=0.25)


def test_a_method_that_load_switched_off_comes_back_and_does_not_flap() -> None:
    """The cost of rows wavers by a tenth around what the drafts are worth."""
    control = AdaptiveController()
    needs = Needs(runs_model=True)
    head: Any = type("Head", (), {"name": "head", "needs": needs})()
    noise = random.Random(5)
    for rows in (1, 2, 3, 4, 8):
        for _ in range(5):
            timed(control, rows, 5e-3)
    control.begin("s", head, Speculation("head", k=K))
    history = control._methods.of("head")
    history.cycles, history.traits.scored = 100, True
    for _ in range(200):
        history.worth(1).learn(1.0e-3)
    asked = []
    for _ in range(400):
        seconds = 1.0e-3 * noise.uniform(0.95, 1.1)
        for _ in range(3):
            history.traits.rounds.observe(1, seconds)
        control.allowance.spend(1.0)  # no tries
        asked.append(control.budgets([Ask("s")], Ahead(1, 1))[0] is not None)
    assert sum(sooner != later for sooner, later in pairwise(asked)) <= 3
    history.traits.rounds = type(history.traits.rounds)(float)
    for _ in range(5):
        history.traits.rounds.observe(1, 5e-4)
    assert control.budgets([Ask("s")], Ahead(1, 1))[0] is not None, "clearly worth it again"


def test_tries_are_rarer_the_more_decode() -> None:
    tries = []
    for running in (1, 4, 8, 32):
        allowance = Allowance()
        made = 0
        for _ in range(8000):
            allowance.earn(1e-2, running)
            made += allowance.spend(1e-2)
        tries.append(made)
    assert tries[0] == tries[1] and 100 < tries[0] < 140
    assert tries[2] == pytest.approx(tries[0] / 2, abs=2) and tries[3] == pytest.approx(tries[0] / 8, abs=2)
