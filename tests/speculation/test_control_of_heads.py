"""A head takes a share of a step for every draft: one that pays on average is kept through bad luck, one that does not
is left soon."""

from __future__ import annotations

import random

from paceline.speculation.control import AdaptiveController
from paceline.speculation.drafter import Needs, Observation
from paceline.speculation.spec import Speculation
from paceline.speculation.tree import DraftTree
from speculation.controlled import budget as asked_for
from speculation.controlled import choose, stepped
from speculation.controlled import timed as told

STEP, ROW = 10.5e-3, 1.0e-3
K = 3


class Head:
    """Takes `seconds` a draft. Its confidences scatter around `luck`, and are what comes true."""

    name, needs = "head", Needs(samples=True, runs_model=True)

    def __init__(self, luck: float, seconds: float, seed: int = 7) -> None:
        self.luck, self.seconds, self.chance = luck, seconds, random.Random(seed)

    def draft(self) -> DraftTree:
        scores = [min(0.98, max(0.02, self.chance.gauss(self.luck, 0.25))) for _ in range(K)]
        return DraftTree.chain(list(range(1, K + 1)), self.name, scores)

    def accepted(self, draft: DraftTree) -> int:
        hits = (self.chance.random() < score for score in draft.scores or ())
        return next((depth for depth, hit in enumerate(hits) if not hit), K)


def begin(control: AdaptiveController, head: Head, name: str) -> None:
    control.begin(name, head, Speculation("head", k=K))  # type: ignore[arg-type]


def request(control: AdaptiveController, head: Head, name: str, tokens: int = 128, running: int = 1) -> list[bool]:
    """For every step of a request among so many whether the head was asked; the clock is our own."""
    begin(control, head, name)
    asked: list[bool] = []
    while tokens > 0:
        budget = asked_for(control, name, running)
        asked.append(budget is not None)
        proposal = sent = None
        if budget is not None:
            control.drafted(name, budget.depth, head.seconds)
            proposal = head.draft()
            sent = choose(control, proposal, name, running)
        # What comes shows whether the drafted tokens were right, also where they were not sent.
        right = [] if proposal is None else [*proposal.tokens[:head.accepted(proposal)], 999]
        accepted = 0 if sent is None else min(len(right) - 1, len(sent))
        came = right[:accepted + 1] or [999]
        rows = running + (0 if sent is None else len(sent))
        seconds = STEP + ROW * (rows - 1)
        control.learn(name, Observation(came, list(range(accepted)), sent))
        stepped(control, rows, seconds, running, running - 1 + len(came), head.seconds if budget is not None else 0.0)
        tokens -= len(came)
    control.release(name)
    return asked


def timed() -> AdaptiveController:
    """A controller that has seen steps of some sizes."""
    control = AdaptiveController()
    for rows in (1, 2, 3, 4, 8, 11):
        for _ in range(5):
            told(control, rows, STEP + ROW * (rows - 1))
    return control


def test_a_head_that_pays_is_asked_nearly_always() -> None:
    for seed in range(5):
        control, head = timed(), Head(0.6, 0.25 * STEP, seed)
        used = [request(control, head, str(number)) for number in range(8)]
        shares = [sum(one) / len(one) for one in used]
        assert min(shares[1:]) > 0.9, (seed, shares)


def test_one_unlucky_draft_does_not_silence_it() -> None:
    control, head = timed(), Head(0.6, 0.3 * STEP)
    begin(control, head, "s")
    for number in range(4):
        budget = asked_for(control)
        assert budget is not None, number
        control.drafted("s", budget.depth, head.seconds)
        assert choose(control, DraftTree.chain([1], "head", [0.03])) is None
        control.learn("s", Observation([9]))


def test_a_head_that_loses_is_left_within_a_few_steps() -> None:
    for seed in range(5):
        control, head = timed(), Head(0.12, 0.3 * STEP, seed)
        used = [request(control, head, str(number)) for number in range(8)]
        assert used[0].index(False) <= 12, (seed, "nothing was known of it")
        assert all(one.index(False) <= 5 for one in used[1:]), seed
        assert all(sum(one) < 16 for one in used[1:]), (seed, list(map(sum, used)))


def test_a_text_that_it_cannot_draft_is_left_though_others_pay() -> None:
    control, head = timed(), Head(0.65, 0.25 * STEP)
    for number in range(6):
        request(control, head, str(number))
    head.luck = 0.05
    used = request(control, head, "strange", 256)
    assert used.index(False) <= 24 and sum(used) < 80


def test_what_pays_alone_may_not_pay_in_a_crowd() -> None:
    """What was learnt of one at a time says nothing of eight at once, each of whose rows has to pay for everybody."""
    control, head = timed(), Head(0.6, 0.25 * STEP)
    for number in range(6):
        request(control, head, str(number))
    used = [request(control, head, f"crowd {number}", running=8) for number in range(6)]
    assert all(one.index(False) <= 8 for one in used[1:] if not all(one))
    assert sum(sum(one) for one in used) < 0.2 * sum(map(len, used))
    assert all(request(control, head, "alone again")[:20])


def test_requests_that_are_not_judged_teach_nothing_about_worth() -> None:
    """A drafter of fixed depth may have nothing to propose as often as it likes."""
    control, head = timed(), Head(0.6, 0.25 * STEP)
    control.begin("fixed", head, Speculation("head", k=K, adaptive=False))  # type: ignore[arg-type]
    for _ in range(200):
        assert asked_for(control, "fixed") is not None
        control.drafted("fixed", K, head.seconds)
        assert choose(control, None, "fixed") is None
        control.learn("fixed", Observation([9]))
    used = [request(control, head, str(number)) for number in range(4)]
    assert all(sum(one) > 0.9 * len(one) for one in used[1:])


def test_after_texts_that_nobody_could_draft_for_it_comes_back() -> None:
    for seed in range(4):
        control, head = timed(), Head(0.05, 0.25 * STEP, seed)
        for number in range(20):
            request(control, head, f"strange {number}", 256)
        head.luck = 0.65
        used = [request(control, head, str(number), 256) for number in range(40)]
        shares = [sum(one) / len(one) for one in used]
        assert max(shares[:20]) > 0.8 and sum(shares[-10:]) > 8.0, (seed, [round(share, 2) for share in shares])


def test_first_drafts_that_were_slow_are_not_held_against_it() -> None:
    """An engine's first drafts find nothing in the machine's caches, and its user may have had something else to do."""
    for seed in range(5):
        control, head = timed(), Head(0.6, 1.2 * STEP, seed)
        request(control, head, "cold", 32)
        head.seconds = 0.25 * STEP
        used = [request(control, head, str(number)) for number in range(4)]
        shares = [sum(one) / len(one) for one in used]
        assert shares[0] > 0.35 and min(shares[1:]) > 0.9, (seed, shares)
