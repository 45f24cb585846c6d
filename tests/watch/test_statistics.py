"""The tests behind the watch: what they promise of false alarms, and what they see."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from paceline.request import TokenLogprob
from paceline.watch.acceptance import WARM_UP, PageHinkley
from paceline.watch.laws import Law, place
from paceline.watch.martingale import BINS, THRESHOLD, Martingale, _bets
from paceline.watch.witness import divergence


def test_bets_are_fair_and_none_can_lose_everything() -> None:
    assert np.allclose(_bets().mean(1), 1.0)
    assert _bets().min() > 0.0 and _bets().shape[1] == BINS


def test_capital_is_expected_to_stay_where_it_is() -> None:
    """A martingale: averaged over everything that may come next, it does not move."""
    test = Martingale()
    rng = random.Random(0)
    for _ in range(50):
        test.observe(rng.random())
    before = math.exp(test.evidence)
    after = []
    for at in range(BINS):
        copy = Martingale()
        copy.count, copy._kept, copy._capital = test.count, test._kept, test._capital
        copy.observe((at + 0.5) / BINS)
        after.append(math.exp(copy.evidence))
    assert np.mean(after) == pytest.approx(before)


def test_false_alarms_are_as_rare_as_promised() -> None:
    """Ville: P(capital ever above c) <= 1 / c, here for c = 20 over 200 runs of 200 numbers."""
    rng = random.Random(3)
    above = 0
    for _ in range(200):
        test = Martingale()
        for _ in range(200):
            test.observe(rng.random())
        above += test.highest > math.log(20.0)
    assert above <= 200 / 20


@pytest.mark.parametrize("clean", [0, 3000])
def test_a_fault_is_seen_whenever_it_begins(clean: int) -> None:
    rng = random.Random(5)
    test = Martingale()
    for _ in range(clean):
        test.observe(rng.random())
    assert test.highest < THRESHOLD
    for _ in range(400):
        test.observe(rng.random() * (0.5 if rng.random() < 0.5 else 1.0))
    assert test.highest > THRESHOLD


def test_places_are_uniform_in_any_order() -> None:
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(7)), rng.dirichlet(np.ones(7))
    for key in (None, p, q / p):
        found = [place(p, int(token), key, float(share))
                 for token, share in zip(rng.choice(7, 4000, p=p), rng.random(4000))]
        counts = np.histogram(found, 10, (0.0, 1.0))[0]
        assert ((counts - 400) ** 2 / 400).sum() < 27.9  # chi-square, 9 degrees of freedom, p = 0.001


def test_a_token_that_cannot_come_needs_no_statistics() -> None:
    law = Law(("probability", "id"), random.Random(0))
    law.drawn(np.array([0.0, 0.5, 0.5]), 1)
    assert law.evidence < 1.0
    law.drawn(np.array([0.0, 0.5, 0.5]), 0)
    assert law.evidence == math.inf


def test_events_that_come_too_often_are_seen() -> None:
    rng = random.Random(0)
    fair, often = Law(("chance",), rng), Law(("chance",), rng)
    for _ in range(500):
        fair.happened(0.6, rng.random() < 0.6)
        often.happened(0.6, rng.random() < 0.95)
    assert fair.evidence < THRESHOLD < often.evidence


@pytest.mark.parametrize(("after", "rose"), [(0.3, False), (0.95, True)])
def test_acceptance_that_moves_is_told_once(after: float, rose: bool) -> None:
    rng = random.Random(2)
    watch = PageHinkley()
    told = [watch.observe(rng.gauss(0.6, 0.1)) for _ in range(400)]
    assert not any(told)
    changes = [change for _ in range(60) if (change := watch.observe(rng.gauss(after, 0.03)))]
    assert len(changes) == 1 and changes[0].rose is rose
    assert changes[0].before == pytest.approx(0.6, abs=0.05) and changes[0].after == pytest.approx(after, abs=0.1)


def test_acceptance_that_only_varies_is_not_told() -> None:
    """Fewer than one in 10,000 requests, whatever the texts are like."""
    rng = random.Random(4)
    told = 0
    for _ in range(20):
        watch = PageHinkley()
        told += sum(watch.observe(rng.betavariate(2.0, 1.5)) is not None for _ in range(WARM_UP + 1000))
    assert told <= 2


def test_divergence_is_zero_for_the_same_and_grows() -> None:
    def score(*raw: float) -> TokenLogprob:
        shares = np.log(raw)
        return TokenLogprob(0, float(shares[0]), 0.0, 1, dict(enumerate(shares.tolist())))

    assert divergence(score(0.5, 0.25), score(0.5, 0.25)) == 0.0
    assert divergence(score(0.5, 0.25), score(0.4, 0.35)) == pytest.approx(
        0.5 * math.log(0.5 / 0.4) + 0.25 * math.log(0.25 / 0.35) + 0.0, abs=1e-6)
