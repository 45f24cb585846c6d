"""A machine whose steps take what a formula says, and requests whose drafters are right as often as one likes: what the
controller makes of them, in seconds that no clock measures."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.speculation.control import AdaptiveController
from paceline.speculation.controller import Ahead, Ask
from paceline.speculation.drafter import Budget, Needs, Observation
from paceline.speculation.spec import Speculation
from paceline.speculation.step_cost import Load
from paceline.speculation.tree import DraftTree

K = 4
WRONG = 1_000_000
CHUNK = 64
"""Rows of prompts in a step at most."""


def machine(load: Load) -> float:
    """As a small processor does: the weights are read once, and from a few rows on it computes. (Prompts on top: those
    that decode have read the weights already.)"""
    decoding = max(5e-3, 2e-3 + 1.2e-3 * load.rows) if load.rows else 0.0
    prompts = 1.0e-3 * load.prompt_rows + (0.0 if load.rows else 4e-3 * (load.prompt_rows > 0))
    return decoding + prompts + 2e-7 * load.context


@dataclass(eq=False)
class Asked:
    """A request: its drafter is right at each place with a probability of its own."""

    arrival: float
    prompt: int
    tokens: int
    luck: float
    seed: int
    claimed: float | None = None
    """What its drafter thinks of its drafts; None: it does not say."""
    computed: int = 0
    written: int = 0
    ended: float = 0.0
    draft: DraftTree | None = None
    right: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.right = [chance.random() < self.luck for _ in range(self.tokens + K)]

    def proposal(self, depth: int) -> DraftTree:
        """Token i of a text is i; a wrong draft is WRONG."""
        at = range(self.written, self.written + depth)
        scores = None if self.claimed is None else [self.claimed] * depth
        return DraftTree.chain([place if self.right[place] else WRONG for place in at], "drafter", scores)


class Drafter:
    name, needs = "drafter", Needs()


class Simulation:
    """Serves requests, at most so many at once. `mode`: "control", "on" (always K tokens) or "off"."""

    def __init__(self, mode: str, seats: int = 64, seconds: Callable[[Load], float] = machine,
                 drafting: float = 5e-5) -> None:
        """`drafting`: seconds for each sequence that is asked about."""
        self.control = AdaptiveController()
        self.mode, self.seats, self.seconds, self.drafting = mode, seats, seconds, drafting
        self.now = 0.0
        self.sent: list[int] = []
        """Draft rows of each step."""
        self.asked: list[int] = []
        """Sequences whose drafter was asked before it."""

    def calibrated(self, most: int = 64) -> Simulation:
        """As a server is before its first request."""
        for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128):
            for _ in range(3):
                if rows <= most:
                    self.control.cost.observe(Load(rows), self.seconds(Load(rows)))
        self.control.cost.anchor()
        return self

    def serve(self, requests: Iterable[Asked]) -> list[Asked]:
        """All of them, in the order of their arrival."""
        waiting, running, done = deque(requests), list[Asked](), list[Asked]()
        wish = Speculation("drafter", k=K, adaptive=self.mode == "control")
        while waiting or running:
            if not running and waiting[0].arrival > self.now:
                self.now = waiting[0].arrival
            while waiting and waiting[0].arrival <= self.now and len(running) < self.seats:
                running.append(waiting.popleft())
                if self.mode != "off":
                    self.control.begin(running[-1], Drafter(), wish)  # type: ignore[arg-type]
            done += self._step(running)
            running = [one for one in running if not one.ended]
        return done

    def _step(self, running: list[Asked]) -> list[Asked]:
        decoding = [one for one in running if one.computed >= one.prompt]
        drafting = self._draft(decoding) if self.mode != "off" and decoding else 0.0
        rows, context = len(decoding), 0.0
        for one in decoding:
            own = 1 + (0 if one.draft is None else len(one.draft))
            rows += own - 1
            context += own * (one.prompt + one.written)
        self.sent.append(rows - len(decoding))
        left, prompt_context = CHUNK, 0.0
        for one in running:
            chunk = min(left, one.prompt - one.computed)
            prompt_context += chunk * (one.computed + chunk / 2)
            one.computed += chunk
            left -= chunk
        load = Load(rows, context, CHUNK - left, prompt_context)
        seconds = self.seconds(load)
        self.now += seconds + drafting
        tokens, ended = 0, list[Asked]()
        for one in decoding:
            tokens += self._advance(one)
            if one.written >= one.tokens:
                one.ended = self.now
                self.control.release(one)
                ended.append(one)
        self.control.cost.observe(load, seconds)
        self.control.stepped(load, len(decoding), tokens, drafting, seconds + drafting)
        return ended

    def _draft(self, decoding: list[Asked]) -> float:
        asks = [Ask(one, one.prompt + one.written) for one in decoding]
        ahead = Ahead(len(asks), len(asks), sum(ask.context for ask in asks))
        asked: list[tuple[Ask, Budget]] = [
            (ask, budget) for ask, budget in zip(asks, self.control.budgets(asks, ahead)) if budget is not None]
        self.asked.append(len(asked))
        offers = []
        for ask, budget in asked:
            one: Any = ask.sequence
            self.control.drafted(one, budget.depth, self.drafting)
            offer = self.control.judge(ask, one.proposal(min(budget.depth, K)), ahead)
            assert offer is not None
            offers.append(offer)
        for offer, draft in zip(offers, self.control.choose(offers, ahead) if offers else ()):
            one = offer.ask.sequence
            one.draft = draft
        return self.drafting * len(asked)

    def _advance(self, one: Asked) -> int:
        """The tokens that a step gave it."""
        draft, one.draft = one.draft, None
        drafted = [] if draft is None else draft.tokens
        hits = next((place for place, token in enumerate(drafted) if token == WRONG), len(drafted))
        came = list(range(one.written, one.written + hits + 1))
        one.written += len(came)
        if self.mode != "off":
            self.control.learn(one, Observation(came, list(range(hits)), draft))
        return len(came)


def goodput(requests: Iterable[Asked]) -> float:
    """Tokens for each second that somebody waited for them."""
    done = list(requests)
    return sum(one.tokens for one in done) / sum(one.ended - one.arrival for one in done)


def at_once(count: int, mode: str, luck: float, claimed: float | None, tokens: int = 64, times: int = 4,
            seconds: Callable[[Load], float] = machine) -> float:
    """Tokens a second of so many at once, a new one when one is answered."""
    requests = [Asked(0.0, 24, tokens, luck, seed, claimed) for seed in range(times * count)]
    simulation = Simulation(mode, count, seconds).calibrated()
    done = simulation.serve(requests)
    return sum(one.tokens for one in done) / simulation.now
