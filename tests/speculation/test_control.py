"""How much is drafted: as much as pays, by the request's own luck and the measured cost of steps; never the text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tiny import VOCAB, tiny_llm
from paceline import SamplingParams
from paceline.errors import RequestError
from paceline.speculation.acceptance import WORTH_WEIGHT, Places, Trust, outcomes, survival, verdicts
from paceline.speculation.control import AdaptiveController
from paceline.speculation.controller import Ahead, Ask, Offer
from paceline.speculation.costs import STALE_AFTER, CostCurve
from paceline.speculation.drafter import Budget, Needs, Observation
from paceline.speculation.exploration import KNOWN
from paceline.speculation.history import LONGEST_PAUSE, SHORTEST_PAUSE
from paceline.speculation.proof import PLAIN_EVERY
from paceline.speculation.spec import Speculation, parse
from paceline.speculation.step_cost import Load, step_prior
from paceline.speculation.tree import DraftTree
from speculation.controlled import budget, choose, timed

CPU = {1: 4.9e-3, 2: 6.6e-3, 3: 8.9e-3, 4: 10.8e-3, 6: 16.6e-3, 8: 21.6e-3}
FLAT = {1: 5.0e-3, 64: 5.6e-3}


class Named:
    """A drafter of which the controller only sees the name and the needs."""

    def __init__(self, name: str = "x", needs: Needs | None = None) -> None:
        self.name, self.needs = name, needs or Needs()


def controller(cost: dict[int, float], wish: Speculation | None = None, needs: Needs | None = None
               ) -> AdaptiveController:
    """With one sequence "s" and a measured curve."""
    control = AdaptiveController()
    for rows, seconds in cost.items():
        for _ in range(3):
            timed(control, rows, seconds)
    control.begin("s", Named(needs=needs), wish or Speculation("x", k=8))  # type: ignore[arg-type]
    return control


def cycle(control: AdaptiveController, accept: Callable[[int], bool], width: int = 1,
          sequence: str = "s") -> int | None:
    """One cycle of a drafter that fills its budget; depth i is accepted (given those before) if accept(i). Returns
    the depth that was drafted; None: nothing was, and a token came without."""
    given = budget(control, sequence)
    if given is None:
        control.learn(sequence, Observation([0]))
        control.stepped(Load(1), 1, 1, 0.0)
        return None
    depth = min(given.depth, given.nodes // width)
    draft = DraftTree.chain(list(range(1, depth + 1)))
    sent = choose(control, draft, sequence)
    assert sent is not None
    hits = next((i for i in range(depth) if not accept(i)), depth)
    control.learn(sequence, Observation([*draft.tokens[:hits], 999], list(range(hits)), sent))
    control.stepped(Load(1 + depth), 1, hits + 1, 0.0)
    return depth


def opened_by(control: AdaptiveController, name: str, tokens: int, seconds: float, accepted: bool,
              cycles: int = 60) -> int:
    """How often a request is drafted for whose first draft takes so long, in steps of 5 ms, and each a step more."""
    control.begin(name, Named(), Speculation("x", k=8), tokens)  # type: ignore[arg-type]
    asked = 0
    for _ in range(cycles):
        given = budget(control, name)
        control.stepped(Load(1), 1, 1, 0.0)
        if given is None:
            control.learn(name, Observation([0]))
            continue
        control.drafted(name, given.depth, seconds if not asked else 0.005 * given.depth)
        asked += 1
        sent = choose(control, DraftTree.chain([1]), name)
        control.learn(name, Observation([1, 9] if accepted else [9], [0] if accepted else [], sent))
    return asked


def test_what_has_to_read_the_prompt_and_does_not_pay_is_not_tried_again() -> None:
    """A draft model as dear as the target, which reads a prompt of 1,000 tokens first: two requests try it."""
    control = controller(FLAT)
    assert [opened_by(control, name, 1000, 1.5, True) > 0 for name in "abcd"] == [True, True, False, False]
    assert opened_by(control, "short", 5, 0.0, True) > 0, "a short prompt is cheap to read"


def test_what_pays_is_opened_however_long_it_reads() -> None:
    control = controller(FLAT)
    for name in "ab":
        opened_by(control, name, 1000, 1.5, True)
    control._methods.of("x").traits.cost = CostCurve(float)  # as if its drafts cost nothing from here on
    for _ in range(3):
        control._methods.of("x").traits.cost.observe(8, 1e-5)
    assert opened_by(control, "c", 1000, 1.5, True) > 30


def test_what_opens_at_once_is_tried_by_every_request() -> None:
    """As far as the allowance goes: a try takes a step's time, of which 1.5 % are saved up."""
    control = controller(FLAT)
    assert all(opened_by(control, str(number), 1000, 1e-5, False, cycles=300) > 0 for number in range(6))


# ---------------------------------------------------------------- the cost of a step


def test_before_anything_is_measured_the_curve_is_the_prior() -> None:
    curve = CostCurve(step_prior)
    assert not curve.measured
    assert [curve(1), curve(2), curve(11)] == pytest.approx([1.0, 1.15, 2.5])


def test_measured_counts_are_kept_and_others_interpolated() -> None:
    curve = CostCurve(step_prior)
    for rows, seconds in ((1, 5.0), (5, 9.0)):
        curve.observe(rows, seconds)
        curve.observe(rows, seconds)
    assert curve(1) == 5.0 and curve(5) == 9.0 and curve(3) == pytest.approx(7.0)
    assert curve(10) == pytest.approx(9.0 * step_prior(10) / step_prior(5)), "beyond: the prior's shape"


def test_one_slow_sample_moves_little() -> None:
    curve = CostCurve(step_prior)
    for seconds in (1.0, 40.0, 1.0, 1.1, 1.0):
        curve.observe(1, seconds)
    assert curve(1) == pytest.approx(1.0)
    curve.observe(1, 100.0)
    for _ in range(16):
        curve.observe(1, 1.0)
    assert curve(1) < 1.1


def test_it_follows_a_machine_that_changes() -> None:
    curve = CostCurve(step_prior)
    for _ in range(20):
        curve.observe(1, 1.0)
    for _ in range(64):
        curve.observe(1, 1.8)
    assert curve(1) == pytest.approx(1.8, rel=0.05)


def test_what_is_doubted_comes_down_at_once_and_rises_as_ever() -> None:
    curve = CostCurve(step_prior)
    for count, seconds in ((1, 7.5), (8, 15.0)):
        for _ in range(6):
            curve.observe(count, seconds)
    curve.doubt()
    curve.observe(1, 2.5)
    assert curve(1) == pytest.approx(2.5) and curve(8) == pytest.approx(5.0), "all of it was as much too large"
    curve.doubt()
    curve.observe(1, 7.5)
    assert curve(1) < 3.0, "that it took more proves nothing"
    curve.observe(1, 1.0)
    assert curve(1) > 2.0, "a doubt is over with the next sample"


def test_longer_texts_make_all_counts_dearer_at_once() -> None:
    curve = CostCurve(step_prior)
    for rows, seconds in ((1, 7.0), (5, 9.4)):
        for _ in range(8):
            curve.observe(rows, seconds)
    for _ in range(60):  # steps with drafts alone, behind a longer text
        curve.observe(5, 1.3 * 9.4)
    assert curve(5) == pytest.approx(1.3 * 9.4, rel=0.03)
    assert curve(5) / curve(1) == pytest.approx(9.4 / 7.0, rel=0.1)
    for _ in range(60):
        curve.observe(5, 9.4)
    assert curve(1) == pytest.approx(7.0, rel=0.05)


def test_the_price_of_a_row_is_not_that_between_two_neighbours() -> None:
    control = controller({1: 7.0e-3, 2: 7.001e-3, 3: 8.5e-3, 4: 8.9e-3, 5: 9.6e-3})
    given = budget(control)
    assert given is not None and given.price == pytest.approx(2.6e-3 / 4 / 7.0e-3, rel=0.05)


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    curve = CostCurve(step_prior)
    curve.observe(4, 9.0)
    curve.observe(4, 9.0)
    assert curve.knows(4)
    for _ in range(STALE_AFTER + 20):
        curve.observe(1, 1.0)
    assert not curve.knows(4)
    assert curve(4) == pytest.approx(step_prior(4))


@given(st.lists(st.tuples(st.integers(1, 80), st.floats(1e-4, 1.0)), min_size=1, max_size=60))
def test_more_rows_never_cost_less(samples: list[tuple[int, float]]) -> None:
    curve = CostCurve(step_prior)
    for rows, seconds in samples:
        curve.observe(rows, seconds)
    costs = [curve(rows) for rows in range(1, 100)]
    assert all(sooner <= later * (1 + 1e-12) for sooner, later in pairwise(costs))


# ---------------------------------------------------------------- acceptance


def test_rates_start_from_a_guess_and_follow_the_history_within_20_cycles() -> None:
    places = Places(Places())
    assert 0.3 < places.rates(1)[0] < 0.9
    for _ in range(20):
        places.learn(0, True)
        places.learn(1, False)
    assert places.rates(2)[0] > 0.85 and places.rates(2)[1] < 0.15
    for _ in range(20):
        places.learn(0, False)
    assert places.rates(1)[0] < 0.3


def test_a_new_request_starts_from_what_others_met_with() -> None:
    everyone = Places()
    first = Places(everyone)
    for _ in range(50):
        first.learn(0, False)
    assert Places(everyone).rates(1)[0] < 0.1


def test_scores_are_corrected_by_what_came_of_them() -> None:
    trust = Trust(Trust())
    assert trust.rate(0.9) == pytest.approx(0.9)
    for _ in range(40):
        trust.learn(0.9, False)
        trust.learn(0.3, True)
    assert trust.rate(0.9) < 0.15 and trust.rate(0.3) > 0.8
    assert all(0.0 <= trust.rate(score) < 1.0 for score in (-1.0, 0.0, 0.5, 1.0, 2.0))


def test_outcomes_walk_along_the_text() -> None:
    chain = DraftTree.chain([5, 6, 7])
    assert outcomes(chain, [5, 6]) == [(0, True), (1, True)], "of the third nothing is known"
    assert outcomes(chain, [5, 9]) == [(0, True), (1, False)]
    tree = DraftTree([5, 6, 7, 8, 9], [-1, -1, 1, 1, 0])
    assert outcomes(tree, [6, 8, 1]) == [(0, False), (1, True), (2, False), (3, True)]
    assert verdicts(tree, [1, 3]) == [(0, False), (1, True), (2, False), (3, True)]


def test_survival_multiplies_along_paths() -> None:
    assert survival([-1, 0, 0, -1], [0.5, 0.5, 0.2, 0.3]) == pytest.approx([0.5, 0.25, 0.1, 0.3])


# ---------------------------------------------------------------- how deep


def test_a_fixed_depth_is_given_exactly() -> None:
    control = controller(CPU, Speculation("x", k=4, nodes=9, adaptive=False))
    for _ in range(30):
        assert budget(control) == Budget(4, 9)
        draft = DraftTree.chain([1, 2, 3, 4], scores=[0.0, 0.0, 0.0, 0.0])
        assert choose(control, draft) is draft, "nothing is cut either"
        control.learn("s", Observation([9], [], draft))


def test_nothing_is_drafted_until_plain_decoding_is_timed() -> None:
    control = AdaptiveController()
    control.begin("s", Named(), Speculation("x"))  # type: ignore[arg-type]
    assert budget(control) is None
    timed(control, 1, 0.005)
    timed(control, 1, 0.005)
    assert budget(control) is not None


def test_lucky_drafts_grow_where_rows_are_cheap_and_less_where_they_are_dear() -> None:
    depths = {}
    for name, cost in (("flat", FLAT), ("cpu", CPU)):
        control = controller(cost)
        luck = random.Random(1)
        for _ in range(60):
            depths[name] = cycle(control, lambda _, luck=luck: luck.random() < 0.8)
    assert depths["flat"] == 8
    assert depths["cpu"] is not None and 1 <= depths["cpu"] <= 4


def test_the_depth_is_the_best_of_all_by_goodput() -> None:
    control = controller(CPU)
    for _ in range(200):
        budget(control)
        draft = DraftTree.chain([1, 2, 3, 4, 5, 6, 7, 8])
        choose(control, draft)
        control.learn("s", Observation(draft.tokens[:3] + [999], [0, 1, 2], draft))
    # Three tokens are always right and the fourth never: the best depth is 3, and a curve with a step would be seen.
    given = budget(control)
    assert given is not None and given.depth == 3


def test_what_does_not_pay_steps_back_and_is_tried_again_ever_more_rarely() -> None:
    control = controller(CPU)
    drafted = [cycle(control, lambda _: False) is not None for _ in range(1200)]
    assert sum(drafted[:40]) >= 2
    tries = [index for index, one in enumerate(drafted) if one]
    gaps = [later - sooner for sooner, later in pairwise(tries) if later - sooner > 1]
    assert gaps[0] >= SHORTEST_PAUSE and gaps == sorted(gaps) and gaps[-1] <= LONGEST_PAUSE + 2
    assert sum(drafted) / len(drafted) < 0.02


def test_it_comes_back_when_the_luck_turns() -> None:
    control = controller(CPU)
    for _ in range(100):
        cycle(control, lambda _: False)
    drafted = [cycle(control, lambda _: True) for _ in range(1500)]
    assert sum(depth is not None for depth in drafted[-4 * PLAIN_EVERY:]) >= 4 * (PLAIN_EVERY - 1)


def test_a_plain_step_that_was_measured_on_a_bad_moment_is_measured_again() -> None:
    """A profile says that a plain step takes a third more than it does, and everything is drafted for."""
    control = AdaptiveController()
    control.cost.restore({"table": {str(rows): CPU[rows] for rows in (2, 3, 4)} | {"1": 1.3 * CPU[1]}, "context": 0.0,
                          "prompt": None})
    control.begin("s", Named(), Speculation("x", k=3))  # type: ignore[arg-type]
    drafted: list[int | None] = []
    for _ in range(20 * PLAIN_EVERY):
        drafted.append(cycle(control, lambda _: True))
        timed(control, 1 + (drafted[-1] or 0), CPU[1 + (drafted[-1] or 0)])
    assert drafted[-5 * PLAIN_EVERY:].count(None) >= 4
    assert drafted.count(None) <= 2 * len(drafted) / PLAIN_EVERY
    assert control.cost(1) == pytest.approx(CPU[1], rel=0.1)


def test_who_always_drafts_keeps_nobody_else_from_it() -> None:
    """No step of theirs is without drafts: the others go without in one of many all the same, and in no more."""
    control = controller(FLAT)
    control.begin("always", Named(), Speculation("x", k=2, adaptive=False))  # type: ignore[arg-type]
    draft, ahead, given = DraftTree.chain([1, 2]), Ahead(2, 2), 0
    for _ in range(4 * PLAIN_EVERY):
        asked = control.budgets([Ask("s"), Ask("always")], ahead)
        assert asked[1] is not None
        given += asked[0] is not None
        for name in ("s", "always"):
            control.judge(Ask(name), draft, ahead)
            control.learn(name, Observation([1, 2, 3], [0, 1], draft))
        control.stepped(Load(6), 2, 6, 0.0)
    assert given >= 4 * PLAIN_EVERY - 8


def test_time_spent_drafting_counts() -> None:
    cheap, dear = controller(CPU), controller(CPU)
    for depth in range(1, 9):
        cheap.drafted("s", depth, 1e-6)
        dear.drafted("s", depth, 4.0e-3 * depth)
    depths = []
    for control in (cheap, dear):
        luck = random.Random(2)
        depths.append([cycle(control, lambda _, luck=luck: luck.random() < 0.8) for _ in range(120)])
    assert sum(depth is not None for depth in depths[0]) > 100
    assert sum(depth is not None for depth in depths[1]) < 40


def test_trees_are_sized_by_the_nodes_that_are_accepted() -> None:
    control = controller(CPU, Speculation("x", k=4, nodes=32))
    given = None
    for _ in range(60):
        given = budget(control)
        nodes = 12 if given is None else min(12, given.nodes)
        draft = DraftTree([1, *range(2, nodes + 1)], [-1] * nodes)
        if given is None:
            control.learn("s", Observation([1]))
            continue
        choose(control, draft)
        control.learn("s", Observation([1, 999], [0], draft))
    assert given is not None and given.nodes <= 2, "only the first of the siblings is ever right"


def test_a_window_of_probes_is_taken_whole_or_not_at_all() -> None:
    needs = Needs(probes=True)
    for cost, pays in ((FLAT, True), (CPU, False)):
        control = controller(cost, Speculation("x", k=3, nodes=30), needs)
        seen = set()
        for _ in range(40):
            given = budget(control)
            seen.add(given if given is None else (given.depth, given.nodes))
            if given is not None:
                draft = DraftTree(list(range(20)), [-1] * 20, scores=[0.01] * 20)
                assert choose(control, draft) is draft
                control.learn("s", Observation([0, 999], [0], draft))
            else:
                control.learn("s", Observation([0]))
        assert seen == ({(3, 30)} if pays else {(3, 30), None})


# ---------------------------------------------------------------- cutting what will not pay


def scored(control: AdaptiveController, scores: list[float], **more: Any) -> int:
    draft = DraftTree.chain(list(range(1, len(scores) + 1)), "x", scores)
    for name, value in more.items():
        setattr(draft, name, value)
    sent = choose(control, draft)
    return 0 if sent is None else len(sent)


def test_a_draft_is_cut_where_the_next_token_costs_more_than_it_brings() -> None:
    control = controller(CPU)
    assert scored(control, [0.9, 0.9, 0.1, 0.1]) == 2
    assert scored(control, [0.2, 0.2]) == 0, "not worth a step of two rows"
    assert scored(control, [0.34, 0.99, 0.99, 0.99, 0.99]) == 0
    assert scored(controller(FLAT), [0.9, 0.9, 0.1, 0.1]) == 4


def test_a_weak_token_is_sent_for_what_comes_after_it() -> None:
    """The search goes over all sizes: the win is not unimodal."""
    control = controller({1: 5.0, 2: 8.0, 3: 8.1, 4: 8.2, 5: 8.3, 6: 8.4})
    assert scored(control, [0.5, 0.95, 0.95, 0.95, 0.95]) == 5
    assert scored(control, [0.5]) == 0


def test_sampled_drafts_are_never_cut_by_value_under_the_rejection_rules() -> None:
    scores = [0.01, 0.01]
    for verify, expected in (("rejection", 2), ("multi-round", 2), ("coupled", 0)):
        control = controller(CPU, Speculation("x", k=8, verify=verify))
        assert scored(control, scores, q=[None, None]) == expected
        assert scored(control, scores) == 0, "deterministic drafts may be"


def test_drafts_that_were_not_sent_still_teach() -> None:
    control = controller(CPU)
    assert scored(control, [0.2, 0.2]) == 0
    for _ in range(40):
        draft = DraftTree.chain([1, 2], "x", [0.2, 0.2])
        sent = choose(control, draft)
        control.learn("s", Observation([1], [], None) if sent is None else Observation([1, 2, 3], [0, 1], sent))
    assert scored(control, [0.2, 0.2]) == 2


def test_a_faster_request_is_choosier() -> None:
    """A second is worth more tokens where tokens come faster."""
    control = controller(CPU)
    before = budget(control)
    for _ in range(50):
        control.stepped(Load(1), 1, 3, 0.0)
    after = budget(control)
    assert before is not None and after is not None
    assert after.price > 2 * before.price and after.pace > 2 * before.pace


def test_in_a_full_batch_rows_beyond_the_step_must_pay_for_everybody() -> None:
    control = controller({1: 5.0e-3, 16: 5.5e-3, 32: 9.0e-3, 64: 17.0e-3})
    alone, crowded = budget(control), budget(control, running=32)
    assert alone is not None and crowded is not None
    assert crowded.price > 5 * alone.price


def test_a_dear_drafter_with_scores_is_left_alone_when_it_brings_nothing() -> None:
    control = controller(CPU)
    choose(control, DraftTree.chain([1], "x", [0.01]))
    for _ in range(40):
        control.drafted("s", 8, 1.0e-3)
        choose(control, None)
    control.allowance.spend(1e-3)
    assert budget(control) is None
    control.allowance.earn(1.0)
    control.learn("s", Observation([0] * SHORTEST_PAUSE))
    assert budget(control) is not None, "and tried again later"


def asked_if_it_saves(share: float, verified: int = KNOWN) -> bool:
    """Whether a drafter with scores that takes a tenth of a step of 5 ms is asked, where its drafts save that time and
    such a share of a step beyond; `verified`: how many there were."""
    control = controller(FLAT)
    method = control._methods.of("x")
    method.traits.scored = True
    for _ in range(400):
        method.worth(1).learn(0.5e-3 + share * 5.0e-3)
    for _ in range(3):
        method.traits.rounds.observe(1, 0.5e-3)
    for _ in range(verified):
        method.verified()
    control.allowance.spend(1.0)  # no tries
    return budget(control) is not None


def test_what_saves_hardly_more_than_its_own_time_is_not_asked() -> None:
    """What rows take is not known to a hundredth."""
    assert not asked_if_it_saves(0.01)
    assert asked_if_it_saves(0.05)
    assert asked_if_it_saves(0.01, verified=0), "while nothing is known of it, it is"


STAIR = {"2": 5.0e-3, "3": 8.0e-3, "8": 8.0e-3}
"""Two sequences; the first row beyond theirs takes 3 ms, the others nothing."""


def saved_together(behind: bool) -> tuple[float, float]:
    """Seconds that each of two drafts is taken to have saved: a sure one, and a weak one that is sent beside it in rows
    which the sure one has paid for. `behind`: who has the weak one is."""
    control = AdaptiveController()
    control.cost.restore({"table": STAIR, "context": 0.0, "prompt": None})
    ahead, offers = Ahead(2, 2), []
    for name, scores in (("sure", [0.9] * 4), ("weak", [0.1])):
        control.begin(name, Named(name), Speculation(name, k=8))  # type: ignore[arg-type]
        for _ in range(KNOWN):
            control._methods.of(name).verified()
        ask = Ask(name, behind=behind and name == "weak")
        offers.append(control.judge(ask, DraftTree.chain(list(range(len(scores))), name, scores), ahead))
    sent = control.choose([offer for offer in offers if offer is not None], ahead)
    assert [draft is not None and len(draft) for draft in sent] == [4, 1]
    sure, weak = (control._methods.of(name).worth(2).expected(0.0) * (1.0 + WORTH_WEIGHT) for name in ("sure", "weak"))
    return sure, weak


def test_a_draft_that_takes_more_than_it_saves_is_known_to() -> None:
    """Counted as nothing it would look as good as one that costs nothing, and all together as if they saved more."""
    sure, weak = saved_together(behind=False)
    assert weak < -1e-4
    tokens = sum(0.9 ** depth for depth in range(1, 5)) + 0.1
    assert sure + weak == pytest.approx(tokens * 5.0e-3 / 2 - 3.0e-3, rel=0.02), "what the step has saved"


def test_for_a_request_that_is_behind_a_draft_may_well_cost_more() -> None:
    sure, weak = saved_together(behind=True)
    assert weak == 0.0 and sure > 0.0


# ---------------------------------------------------------------- in the engine

PROMPT = [(i * 31 + 7) % VOCAB for i in range(40)]
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


def test_the_wish_says_whether_to_adapt() -> None:
    assert parse("ngram").adaptive and parse({"method": "ngram", "adaptive": False}).k == 5  # type: ignore[union-attr]
    assert not parse({"method": "oracle", "tokens": [1]}).adaptive  # type: ignore[union-attr]
    again = parse(parse({"method": "ngram", "k": 3}).as_dict())  # type: ignore[union-attr]
    assert again == parse({"method": "ngram", "k": 3})
    with pytest.raises(RequestError, match="adaptive"):
        parse({"method": "ngram", "adaptive": "yes"})


def test_a_wrong_drafter_is_left_alone_in_the_engine_and_the_text_is_the_same() -> None:
    llm = tiny_llm()
    plain = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    # The clock of a busy machine should not decide this test.
    llm.engine._drafting.controller = control = controller(CPU)
    control.cost.knows = lambda rows: True  # type: ignore[method-assign]
    fixed, adaptive = (llm.generate([PROMPT], GREEDY, speculation={
        "method": "wrong", "tokens": plain, "k": 4, "adaptive": adaptive})[0] for adaptive in (False, True))
    assert fixed.outputs[0].token_ids == adaptive.outputs[0].token_ids == plain
    assert fixed.speculation.cycles == 58 and fixed.speculation.drafted > 4 * 50, "every step but the last"
    assert 1 <= adaptive.speculation.cycles < 12 and adaptive.speculation.plain > 45


@pytest.mark.parametrize("style", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}])
def test_whatever_the_controller_does_the_tokens_are_those_of_plain_decoding(style: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, **style)
    plain = tiny_llm().generate([PROMPT], params)[0].outputs[0].token_ids
    luck = random.Random(3)

    class Whimsical(AdaptiveController):
        """Any budget, any cut."""

        def budgets(self, asks: Sequence[Ask], ahead: Ahead) -> list[Budget | None]:
            return [None if luck.random() < 0.3 else Budget(luck.randint(1, 6), luck.randint(1, 12)) for _ in asks]

        def choose(self, offers: Sequence[Offer], ahead: Ahead) -> list[DraftTree | None]:
            return [None if luck.random() < 0.2 else offer.draft.trimmed(luck.randint(1, len(offer.draft)))
                    for offer in offers]

    llm = tiny_llm()
    llm.engine._drafting.controller = Whimsical()
    wishes = [{"method": "oracle", "tokens": plain, "branches": 2}, {"method": "wrong", "tokens": plain}, "ngram",
              "auto"]
    outs = llm.generate([PROMPT] * 4, params, speculation=wishes)
    assert [out.outputs[0].token_ids for out in outs] == [plain] * 4
    assert outs[0].speculation.accepted > 0
    assert not llm.engine._drafting._drafters, "everything is released"
