"""Control: how much to draft for each sequence, now. More where it pays, nothing where it does not.

Nothing here can change a text: under coupled verification every draft gives the same tokens, and under the rejection
rules only what is decided before drafting (the depth) is decided here; drafts that were sampled are never cut by value.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from paceline.speculation.acceptance import outcomes, verdicts
from paceline.speculation.costs import CostCurve
from paceline.speculation.drafter import Budget, Drafter, Needs, Observation
from paceline.speculation.history import Histories, History, Pause
from paceline.speculation.spec import Speculation
from paceline.speculation.tree import DraftTree

TRIES = 2
PROBE_TRIES = 16
"""First cycles of a request whatever the forecast; more for drafters that have a window to fill, until the engine
knows what comes of it."""
SPEED_MEMORY = 0.97
LEAST_WIN = 0.02
"""Tokens (or share of the speed) that a draft must be expected to win to be sent."""
CHEAP = 0.02
"""Share of a step that drafting may always take; a dearer drafter is paused when it brings less than it takes."""
PATIENCE = 0.4
"""Steps' worth of drafting time after which a drafter with scores is judged, and half of it after each pause."""
SANGUINE = 3.0
"""Times its cost that a draft of a method is taken to save of which nothing is known: it is tried some times."""
SPAN = 4
"""Rows over which the price of one is taken: between neighbours the curve is too rough."""
NEGLIGIBLE = 1e-3
DEAR_OPENING = 4.0
"""Steps' worth of time that a method without prospects may take for a request's first draft, just to try."""


def step_prior(rows: int) -> float:
    """What a step of so many rows costs relative to one row, before anything was measured."""
    return 1.0 + 0.15 * (rows - 1)


class Controller(Protocol):
    """Who decides how much is drafted. The engine asks and reports in the order of these methods; a load-aware one
    takes the seat of AdaptiveController by implementing them."""

    def begin(self, sequence: Hashable, drafter: Drafter, wish: Speculation, tokens: int = 0,
              scope: str = "") -> None:
        """A sequence with a drafter starts, with so many tokens: a model that drafts has to read them first. What its
        text teaches may be used for sequences of the same scope alone; how long things take, for all."""

    def budget(self, sequence: Hashable, running: int, rows: int) -> Budget | None:
        """How much may be drafted for it in the next step; None: nothing. The step holds a row for each of `running`
        sequences and `rows` rows in all: drafts of other sequences are counted as far as they are decided."""

    def drafted(self, sequence: Hashable, depth: int, seconds: float) -> None:
        """Its drafter was asked for so deep a draft, and this was the sequence's share of the time."""

    def choose(self, sequence: Hashable, draft: DraftTree | None, running: int, rows: int) -> DraftTree | None:
        """What of a proposal is sent to the target; at most its beginning."""

    def learn(self, sequence: Hashable, observation: Observation) -> None:
        """What came of it, or came without it."""

    def spent(self, sequence: Hashable, tokens: int, seconds: float, plain_seconds: float) -> None:
        """A step gave the sequence so many tokens for so many seconds (drafting included), which plain decoding
        would have made in `plain_seconds`."""

    def stepped(self, rows: int, seconds: float) -> None:
        """A step without prompt rows took so long, drafting not counted."""

    def plain_cost(self, rows: int) -> float:
        """Seconds of one token of plain decoding in a step of so many rows; 0 while nothing is measured."""

    def release(self, sequence: Hashable) -> None:
        """The sequence is gone."""


class _ControlState:
    """One sequence."""

    __slots__ = ("branching", "history", "needs", "nodes", "opened", "opening", "pause", "plain",
                 "spent", "tested", "tokens", "tries", "wish")

    def __init__(self, wish: Speculation, needs: Needs, method: History, tokens: int) -> None:
        """`method`: what all requests of its scope that use the drafter's method taught."""
        self.wish, self.needs, self.tokens = wish, needs, tokens
        self.opened = False
        """There was a draft."""
        self.opening = 0.0
        """Seconds of drafting until then."""
        self.history = History(method)
        self.pause = Pause()
        self.branching = False
        """Some proposal was no chain: from then on nodes are counted instead of depths."""
        self.nodes = 0
        """Of the last proposal."""
        self.tries = PROBE_TRIES if needs.probes and method.cycles < PROBE_TRIES else TRIES * (1 + needs.probes)
        self.plain = self.spent = 0.0
        self.tested = 0.0
        """Seconds of drafting since the last pause."""

    @property
    def speed(self) -> float:
        """Lately, against plain decoding; at least 1, since plain decoding is always open."""
        return min(4.0, max(1.0, self.plain / self.spent)) if self.spent > 0.0 else 1.0


class AdaptiveController:
    """Depth and size by goodput: expected tokens of a step over its expected time, searched over every size.

    Acceptance comes from the request's own history, which starts from that of its method and scope in this engine and
    forgets within some 20 cycles; time from the measured curves. Drafters that score their tokens are asked every time
    and their drafts cut where the next token would cost more than it brings at the request's present speed.
    """

    def __init__(self) -> None:
        self.step_cost = CostCurve(step_prior)
        self._methods = Histories()
        self._states: dict[Hashable, _ControlState] = {}

    def begin(self, sequence: Hashable, drafter: Drafter, wish: Speculation, tokens: int = 0,
              scope: str = "") -> None:
        self._states[sequence] = _ControlState(wish, drafter.needs, self._methods.of(drafter.name, scope), tokens)

    def release(self, sequence: Hashable) -> None:
        self._states.pop(sequence, None)

    def budget(self, sequence: Hashable, running: int, rows: int) -> Budget | None:
        state = self._states[sequence]
        wish = state.wish
        if not wish.adaptive:
            return Budget(wish.k, wish.nodes)
        if not state.pause.over or not self.step_cost.knows(running):
            return None  # what a plain step takes is what everything else is weighed against: measure that first
        pace = self._pace(state, running, rows)
        price = pace * (self.step_cost(rows + SPAN) - self.step_cost(rows)) / SPAN
        if state.history.scored and not state.needs.probes:
            if self._too_dear(state, running, rows):
                state.history.worth(running).fade()
                self._step_back(state)
                return None
            if state.tested > PATIENCE * self.step_cost(rows):
                state.pause.forgive()  # judged, and found worth it
            return Budget(wish.k, wish.nodes, price, pace)
        size, pays = self._best_size(state, running, rows)
        if pays:
            state.pause.forgive()
        elif state.tries > 0 and not self._dear_to_open(state, rows):
            state.tries -= 1
        else:
            self._step_back(state)
            return None
        if state.needs.probes:
            return Budget(wish.k, wish.nodes, price, pace)
        return Budget(wish.k, size, price, pace) if state.branching else Budget(size, wish.nodes, price, pace)

    def drafted(self, sequence: Hashable, depth: int, seconds: float) -> None:
        state = self._states[sequence]
        state.history.traits.cost.observe(depth, seconds)
        state.tested += seconds
        if not state.opened:
            state.opening += seconds

    def choose(self, sequence: Hashable, draft: DraftTree | None, running: int, rows: int) -> DraftTree | None:
        state = self._states[sequence]
        state.history.proposal = draft
        if draft is None:
            if state.wish.adaptive and not state.needs.probes:  # nobody else's drafts are judged
                state.history.worth(running).learn(0.0)
            return None
        if not state.opened:
            state.opened = True
            state.history.traits.opening.observe(state.tokens, state.opening)
        state.branching = state.branching or not draft.is_chain
        state.nodes = len(draft)
        state.history.scored = draft.scores is not None
        by_value = draft.q is None or state.wish.verify == "coupled"
        if draft.scores is None or not by_value or not state.wish.adaptive or state.needs.probes:
            return draft
        pace, cost = self._pace(state, running, rows), self.step_cost
        start, gained, best, nodes = cost(rows), 0.0, 0.0, 0
        for index, chance in enumerate(state.history.by_score.worth(draft, NEGLIGIBLE)[1]):
            gained += chance
            win = gained - pace * (cost(rows + index + 1) - start)
            if win > best:
                best, nodes = win, index + 1
        state.history.worth(running).learn(best / pace)
        return draft.trimmed(nodes) if best > LEAST_WIN else None

    def learn(self, sequence: Hashable, observation: Observation) -> None:
        state = self._states.get(sequence)
        if state is None:
            return
        state.pause.passed(len(observation.tokens))
        proposal, sent = state.history.settled(), observation.draft
        if sent is not None:
            state.history.verified()
        if proposal is None or not observation.tokens:
            return
        if sent is None or state.wish.verify == "coupled":
            found = outcomes(proposal, observation.tokens)
        else:
            proposal, found = sent, verdicts(sent, observation.accepted)
        trusting = not state.needs.probes
        if not state.branching or (trusting and proposal.scores is not None):
            state.history.learn(proposal, found, trusting)
        elif sent is not None:
            state.history.learn_nodes(sent, observation.accepted)

    def spent(self, sequence: Hashable, tokens: int, seconds: float, plain_seconds: float) -> None:
        state = self._states.get(sequence)
        if state is not None:
            state.spent = SPEED_MEMORY * state.spent + seconds
            state.plain = SPEED_MEMORY * state.plain + plain_seconds

    def stepped(self, rows: int, seconds: float) -> None:
        self.step_cost.observe(rows, seconds)

    def plain_cost(self, rows: int) -> float:
        return self.step_cost(rows) / rows if self.step_cost.measured else 0.0

    def _pace(self, state: _ControlState, running: int, rows: int) -> float:
        """Tokens a second, of all sequences together, at the speed reached so far."""
        return state.speed * running / self.step_cost(rows)

    def _best_size(self, state: _ControlState, running: int, rows: int) -> tuple[int, bool]:
        """The size (depth of a chain, nodes of a tree) with the best goodput of all, and whether that beats none."""
        wish, cost = state.wish, self.step_cost
        most = wish.k
        if state.needs.probes:
            most = state.nodes or wish.nodes
        elif state.branching:
            most = min(wish.nodes, max(4, 2 * state.nodes))
        history = state.history
        draft_cost = history.traits.cost if history.traits.cost.measured else None
        places = history.by_node if state.branching else history.by_depth
        none = running / cost(rows)
        best, size, alive, gained = 0.0, 1, 1.0, float(running)
        for count, rate in enumerate(places.rates(most), 1):
            alive = rate if state.branching else alive * rate
            gained += alive
            if state.needs.probes and count < most:
                continue
            depth = wish.k if state.branching else count
            goodput = gained / (cost(rows + count) + (draft_cost(depth) if draft_cost is not None else 0.0))
            if goodput > best:
                best, size = goodput, count
            if alive < NEGLIGIBLE and not state.needs.probes:
                break
        return size, best > (1.0 + LEAST_WIN) * none

    def _too_dear(self, state: _ControlState, running: int, rows: int) -> bool:
        """Whether a drafter with scores takes more time than it saves. It may take some until that is said."""
        step, seconds = self.step_cost(rows), state.history.traits.cost(state.wish.k)
        if seconds <= CHEAP * step or state.tested <= PATIENCE * step:
            return False
        return seconds > state.history.worth(running).expected(SANGUINE * seconds)

    def _dear_to_open(self, state: _ControlState, rows: int) -> bool:
        """Whether even the first draft of a request would take many steps' time: that of a model that has to read the
        prompt, as other requests have shown."""
        return not state.opened and state.history.traits.opening(state.tokens) > DEAR_OPENING * self.step_cost(rows)

    def _step_back(self, state: _ControlState) -> None:
        """Leave the drafter alone for a while, longer each time, and give it one more try then."""
        state.pause.begin()
        state.tries = 1
        state.tested = min(state.tested, 0.5 * PATIENCE * self.step_cost(1))
