"""History: a sequence's starts from all requests', and hands on what it learns."""

from __future__ import annotations

import pytest

from paceline.speculation.acceptance import outcomes
from paceline.speculation.forecast import added
from paceline.speculation.history import (
    LONGEST_PAUSE,
    MOST_HISTORIES,
    MOST_TRAITS,
    SHORTEST_PAUSE,
    Histories,
    History,
    Pause,
)
from paceline.speculation.tree import DraftTree


def test_a_new_sequence_starts_from_what_others_taught() -> None:
    everyone = History()
    first = History(everyone)
    for _ in range(50):
        first.learn(DraftTree.chain([1, 2]), [(0, True), (1, False)])
        first.learn(DraftTree.chain([1], scores=[0.9]), [(0, False)])
        first.learn_nodes(DraftTree([1, 2], [-1, -1]), [1])
        first.verified()
    second = History(everyone)
    assert second.by_depth.rates(1)[0] > 0.9 and everyone.by_depth.rates(2)[1] < 0.1
    assert second.by_score.rate(0.9) < 0.3
    assert second.by_node.rates(2)[0] < 0.1
    assert (everyone.cycles, first.cycles, second.cycles) == (50, 50, 0)


def test_time_is_learnt_for_all_together() -> None:
    everyone = History()
    first, second = History(everyone), History(everyone)
    first.traits.cost.observe(4, 0.5)
    for _ in range(2):
        first.traits.opening.observe(100, 1.0)
    assert second.traits.cost.measured and everyone.traits.cost(4) == 0.5 and second.traits.opening(200) == 2.0


def test_of_siblings_one_at_most_is_right_and_counts_for_its_depth() -> None:
    tree = DraftTree([1, 2, 3, 4], [-1, -1, 1, 1])
    history = History()
    for _ in range(100):
        history.learn(tree, outcomes(tree, [2, 4, 9]))
    assert min(history.by_depth.rates(2)) > 0.95


def test_scores_that_are_not_about_acceptance_are_not_learnt_from() -> None:
    history = History()
    before = history.by_score.rate(0.8)
    history.learn(DraftTree.chain([1], scores=[0.8]), [(0, False)], trusting=False)
    assert history.by_score.rate(0.8) == before and history.by_depth.rates(1)[0] < 0.6


def test_a_proposal_is_settled_once() -> None:
    history, draft = History(), DraftTree.chain([1])
    history.proposal = draft
    assert history.settled() is draft and history.settled() is None


def test_pauses_grow_until_it_pays() -> None:
    pause = Pause()
    lengths = []
    for _ in range(6):
        assert pause.over
        pause.begin()
        length = 0
        while not pause.over:
            pause.passed(1)
            length += 1
        lengths.append(length)
    assert lengths[:2] == [SHORTEST_PAUSE, 2 * SHORTEST_PAUSE] and lengths[-2:] == [LONGEST_PAUSE] * 2
    pause.forgive()
    pause.begin()
    pause.passed(SHORTEST_PAUSE)
    assert pause.over


def test_equal_wishes_share_a_history_and_the_oldest_are_forgotten() -> None:
    known = Histories()
    first = known.of({"method": "ngram"})
    assert known.of({"method": "ngram"}) is first
    for number in range(MOST_HISTORIES):
        known.of(number)
    assert len(known) == MOST_HISTORIES and known.of({"method": "ngram"}) is not first


def test_luck_is_known_scope_by_scope_and_time_to_all() -> None:
    known = Histories()
    hers, his = known.of("ngram", "hers"), known.of("ngram", "his")
    for _ in range(50):
        hers.learn(DraftTree.chain([1], scores=[0.9]), [(0, False)])
        hers.learn(DraftTree.chain([1]), [(0, False)])
        hers.learn_nodes(DraftTree([1, 2], [-1, -1]), [1])
        hers.yields(0.0, 0.1).learn(9.0, 9)
        hers.worth(1).learn(9.0)
        hers.verified()
    hers.traits.cost.observe(4, 0.5)
    fresh = Histories().of("ngram")
    for one in (his, known.of("ngram"), known.of("ngram", "hers ")):
        assert one.by_score.rate(0.9) == fresh.by_score.rate(0.9) and one.cycles == 0
        assert one.by_depth.rates(3) == fresh.by_depth.rates(3) and one.by_node.rates(3) == fresh.by_node.rates(3)
        assert one.yields(0.0, 0.1).expected() == fresh.yields(0.0, 0.1).expected()
        assert one.worth(1).expected(1.0) == 1.0
        assert one.traits is hers.traits and one.traits.cost(4) == 0.5
    assert known.of("ngram", "hers") is hers


def test_what_drafts_yield_where_rows_are_cheap_says_nothing_of_dear_ones() -> None:
    known = History()
    for _ in range(1000):
        known.yields(0.0, 0.1).learn(2.4, 4)  # all that there is
        known.yields(0.0, 0.7).learn(0.8, 1)  # of the same drafts, what is still worth its rows
    assert added(known, 0.1) == pytest.approx(2.0, abs=0.02)
    assert added(known, 0.7) == pytest.approx(0.1, abs=0.02)


def test_what_all_know_is_bounded_too() -> None:
    known = Histories()
    first = known.traits("first")
    for number in range(MOST_TRAITS):
        known.traits(number)
    assert known.traits("first") is not first
