"""Without a fault there is no alarm, whatever the distributions are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import matrix
from engine.tiny import tiny_engine
from paceline.engine.decide.randomness import inverse
from paceline.engine.records.witness import Verified
from paceline.kernels import cpu
from paceline.llm import LLM
from paceline.request import TokenLogprob
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES
from paceline.watch.acceptance import AcceptanceWatch
from paceline.watch.alarm import DRAFTED, EMITTED, TEXT
from paceline.watch.martingale import THRESHOLD
from paceline.watch.watch import DriftWatch
from paceline.watch.witness import MethodLaws
from subjects import SMALL, FamilySubject
from watch import faults

SIZE = 8


class Drawn:
    """speculation.verify.Randomness from a generator."""

    def __init__(self, rng: np.random.Generator, p: np.ndarray) -> None:
        self.rng, self.p = rng, p

    def accept(self, row: int, index: int) -> float:
        return float(self.rng.random())

    def residual(self, row: int, weights: np.ndarray) -> int:
        return inverse(float(self.rng.random()), weights)

    def target(self, row: int) -> int:
        return inverse(float(self.rng.random()), self.p[row])


class FromTarget(Drawn):
    """A fault: a rejection resamples from p."""

    def residual(self, row: int, weights: np.ndarray) -> int:
        return self.target(row)


def cycle(rng: np.random.Generator, rule: str, laws: MethodLaws, randomness: type[Drawn] = Drawn) -> int:
    """A draft of up to three tokens from one random q, verified against as many random p; the tokens it gave."""
    sharp = rng.choice([0.05, 0.5, 5.0])
    q, p = rng.dirichlet(np.full(SIZE, sharp)), rng.dirichlet(np.full(SIZE, rng.choice([0.05, 0.5, 5.0])), 4)
    if rule == "rejection":
        tree = DraftTree.chain([inverse(float(rng.random()), q) for _ in range(3)])
    else:
        first = inverse(float(rng.random()), q)
        left = q.copy()
        if rule == "without-replacement":
            left[first] = 0.0
        if not left.sum() > 0.0:
            return 0
        tree = DraftTree([first, inverse(float(rng.random()), left)], [-1, -1])
    tree.q = [q] * len(tree)
    verdict = RULES[rule].verify(tree, lambda row: p[row], randomness(rng, p))
    laws.verified(Verified(0, tree, verdict, 0, lambda row: p[row], lambda *_: TokenLogprob(0, 0.0, 0.0, 1)))
    return len(verdict.tokens)


def simulated(rule: str, requests: int, randomness: type[Drawn] = Drawn) -> tuple[DriftWatch, MethodLaws]:
    """A watch that has looked after every one of so many requests of 8 tokens or more, until it raised something."""
    rng, laws = np.random.default_rng(requests), MethodLaws(rule, random.Random(1))
    watch = DriftWatch(tiny_engine(), 1.0)
    watch._laws["simulated", rule], watch._last["simulated", rule] = laws, ("simulated", 0)
    for _ in range(requests):
        tokens = 0
        while tokens < 8:
            tokens += cycle(rng, rule, laws, randomness)
        watch.attend()
        if watch.alarms:
            break
    return watch, laws


@pytest.mark.parametrize("rule", ["rejection", "multi-round", "without-replacement"])
@pytest.mark.parametrize("requests", [200, pytest.param(10_000, marks=pytest.mark.full)])
def test_no_alarm_over_many_requests(rule: str, requests: int) -> None:
    watch, laws = simulated(rule, requests)
    assert not watch.alarms and not watch._failed
    assert all(law.count > requests for law in laws.laws.values())
    assert max(law.evidence for law in laws.laws.values()) < THRESHOLD / 2


def test_the_same_with_a_fault_is_not_silent() -> None:
    watch, _ = simulated("rejection", 400, FromTarget)
    assert [alarm.kind for alarm in watch.alarms] == [EMITTED]


@pytest.mark.parametrize("requests", [100_000, pytest.param(1_800_000, marks=pytest.mark.full)])
def test_acceptance_that_has_not_changed_is_hardly_ever_told(requests: int) -> None:
    """Some texts are easy and some are not, and of each a few dozen drafted tokens are tested."""
    rng = np.random.default_rng(7)
    tested = rng.integers(8, 60, requests)
    accepted = rng.binomial(tested, rng.beta(6.0, 4.0, requests))
    watch = AcceptanceWatch()
    told = sum(watch.observe("simulated", *one) is not None for one in zip(accepted.tolist(), tested.tolist()))
    assert told <= requests // 600_000
    assert watch.methods["simulated"].mean == pytest.approx(0.6, abs=0.1)


# -------------------------------------------------------------------------------------------- through the engine

KINDS = ("dspark", "eagle3", "mtp", "medusa", "hydra")
ALWAYS = {"k": 3, "nodes": 24, "adaptive": False}
"""Drafts in every step, whether they pay or not."""
WISHES: list[dict[str, Any]] = [
    *(ALWAYS | matrix.WISHES[name] for name in ("ngram", "suffix", "suffix tree", "lookahead", "auto", "draft small",
                                                "medusa tree", "merge of heads", *KINDS)),
    {"method": "auto"},
    *(ALWAYS | {"method": kind, "verify": "rejection"} for kind in KINDS),
    *(ALWAYS | {"method": "draft", "model": SMALL, "verify": rule, "branches": 1 if rule == "rejection" else 2}
      for rule in ("rejection", "multi-round", "without-replacement"))]
TURNS = {"reference": 12, "native": 20}
"""By kernels, how often each is asked for, with the four styles of controls in turn: 264 and 440 requests."""
NATIVE = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")


def family(kernels: str) -> FamilySubject:
    torch.set_num_threads(1)
    folder = Path(__file__).parents[1] / "family"
    return FamilySubject.of(folder, "cpu", "float32", kernels=kernels, adapts=False)


def watched_llm(subject: FamilySubject) -> LLM:
    llm = subject.llm(kv_blocks=1200, block_size=8)
    llm.watch = DriftWatch(llm.engine, 1.0, "report", seed=1)
    return llm


def serve(llm: LLM, subject: FamilySubject, turn: int) -> None:
    """A request of every wish, all at once; fewer than shadows may wait."""
    numbers = range(turn * len(WISHES), (turn + 1) * len(WISHES))
    style = [matrix.STYLES[(turn + number) % len(matrix.STYLES)] for number in numbers]
    outs = llm.generate([subject.prompt(number) for number in numbers],
                        [matrix.params_of(own, number, subject.vocab_size, 24) for own, number in zip(style, numbers)],
                        speculation=WISHES)
    for out in outs:
        assert out.error is None and out.speculation.failure is None, (out.error, out.speculation.failure)


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["reference", pytest.param("native", marks=NATIVE)])
def test_no_alarm_over_hundreds_of_requests_of_the_tiny_family(kernels: str) -> None:
    """All of them watched, in an exact mode: drafters of every kind, every rule that loses nothing, all controls."""
    subject, turns = family(kernels), TURNS[kernels]
    llm, watch = (made := watched_llm(subject)), made.watch
    assert watch is not None and llm.engine.kernels.deterministic
    for turn in range(turns):
        serve(llm, subject, turn)
    assert not watch.alarms and not watch._failed
    assert watch.watched == turns * len(WISHES)
    assert set(watch.outcomes) == {"equal", "read"} and watch.outcomes.total() > 0.6 * watch.watched
    counts = {(one["method"], one["rule"], one["law"]): one["count"] for one in watch.report()["evidence"]}
    sampled = [(wish["method"], wish["verify"]) for wish in WISHES if "verify" in wish]
    assert min(counts[method, rule, DRAFTED] for method, rule in sampled) > 10 * turns
    assert watch.report()["kl"]["positions"] > watch.watched / 2


@pytest.mark.full
def test_the_first_of_these_requests_are_not_silent_with_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = family("reference")
    llm = watched_llm(subject)
    faults.taken_unseen(monkeypatch)
    serve(llm, subject, 0)
    assert llm.watch is not None and {alarm.kind for alarm in llm.watch.alarms} == {TEXT}
