"""auto: whichever of several drafters promises most for this request now, or none.

Every candidate that costs next to nothing is asked at every step, and the text that comes, drafted or not, shows how
much its scores are worth. Candidates without scores (models) are forecast from their own history and asked only where
they are expected to win more than they cost.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar

from paceline.speculation.acceptance import Places, Trust, outcomes, survival
from paceline.speculation.costs import CostCurve
from paceline.speculation.drafter import Budget, DraftContext, DraftedSequence, Drafter, Needs, Observation
from paceline.speculation.options import Options
from paceline.speculation.parts import MadeOfParts, Part, check_wishes, part_of
from paceline.speculation.tree import DraftTree

log = logging.getLogger("paceline.speculation")

Result = TypeVar("Result")

DEFAULT = ("ngram", "suffix")
SHORTEST_PAUSE = 16
LONGEST_PAUSE = 256
HOPELESS = 0.5
"""Nodes that survive less often than this share of their price are not passed on."""
MOST_REPUTATIONS = 256


class Reputation:
    """What all requests of an engine taught about one candidate."""

    def __init__(self) -> None:
        self.trust = Trust()
        self.places = Places()
        self.cost = CostCurve(float)
        self.scored = True
        """Whether its drafts carry scores, as far as is known; without them it is only asked when it should pay."""


class Reputations:
    """Those of the candidates that were asked for last, by wish: there is no end of wishes."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Reputation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, wish: Any) -> Reputation:
        key = sha256(repr(wish).encode(errors="replace")).digest()
        known = self._known.setdefault(key, Reputation())
        self._known.move_to_end(key)
        if len(self._known) > MOST_REPUTATIONS:
            self._known.popitem(last=False)
        return known


class _Candidate(NamedTuple):
    part: Part
    known: Reputation


class _Record:
    """What one sequence taught about one candidate."""

    __slots__ = ("pause", "places", "proposal", "trust", "wait", "width")

    def __init__(self, candidate: _Candidate) -> None:
        self.trust = Trust(candidate.known.trust)
        self.places = Places(candidate.known.places)
        self.proposal: DraftTree | None = None
        self.wait, self.pause = 0, SHORTEST_PAUSE
        self.width = 1.0
        """Nodes at each depth, of the last draft without scores."""


class AutoDrafter(MadeOfParts):
    """Passes on the best proposal of its candidates, with scores as trustworthy as it can make them.

    A candidate that raises is dropped for all sequences of this object; the others go on.
    """

    def __init__(self, name: str, parts: Sequence[tuple[Part, Reputation]],
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self.name = name
        needs = [part.drafter.needs for part, _ in parts]
        self.needs = Needs(tuple(sorted({tap for one in needs for tap in one.taps})),
                           samples=any(one.samples for one in needs), probes=any(one.probes for one in needs))
        self._candidates = [_Candidate(part, known) for part, known in parts]
        self._records: dict[DraftedSequence, list[_Record]] = {}
        self._clock = clock

    def drafters(self) -> Sequence[Drafter]:
        return [candidate.part.drafter for candidate in self._candidates]

    def begin(self, sequence: DraftedSequence) -> None:
        self._records[sequence] = [_Record(candidate) for candidate in self._candidates]
        for candidate in list(self._candidates):
            self._try(candidate, candidate.part.drafter.begin, sequence)

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [self._best(sequence, budget) for sequence, budget in zip(sequences, budgets)]

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        for candidate, record in self._pairs(sequence):
            proposal, record.proposal = record.proposal, None
            record.wait -= len(observation.tokens)
            if proposal is not None:
                _teach(record, proposal, observation.tokens)
            own = observation if _is_part(observation.draft, proposal) else Observation(
                observation.tokens, hidden=observation.hidden)
            self._try(candidate, candidate.part.drafter.observe, sequence, own)

    def release(self, sequence: DraftedSequence) -> None:
        try:
            for candidate, _ in self._pairs(sequence):
                self._try(candidate, candidate.part.drafter.release, sequence)
        finally:
            self._records.pop(sequence, None)

    def _pairs(self, sequence: DraftedSequence) -> list[tuple[_Candidate, _Record]]:
        return list(zip(self._candidates, self._records.get(sequence, ())))

    def _best(self, sequence: DraftedSequence, budget: Budget) -> DraftTree | None:
        """The proposal with the largest expected win: accepted tokens less the price of its nodes. Candidates with
        scores come first; one without must be expected to beat what they found."""
        best: DraftTree | None = None
        most, scores = 0.0, list[float]()
        for candidate, record in sorted(self._pairs(sequence), key=lambda pair: not pair[0].known.scored):
            asked = candidate.part.budget(budget)
            if not candidate.known.scored:
                depth, forecast = _forecast(candidate.known, record, asked)
                if forecast <= most:
                    continue
                asked = Budget(depth, asked.nodes, budget.price, budget.pace)
            draft = record.proposal = self._ask(candidate, sequence, asked)
            if draft is None:
                continue
            # What was sampled must not be chosen by its value: such a draft counts by its drafter's history alone.
            candidate.known.scored = draft.scores is not None and draft.q is None
            whole = candidate.part.drafter.needs.probes
            if candidate.known.scored:
                rates, chances = record.trust.worth(draft, 0.0 if whole else HOPELESS * budget.price)
            else:
                rates = _rates_by_depth(record, draft)
                chances = survival(draft.parents, rates)
            win, nodes = _win(chances, budget.price)
            if win > most:
                # Where some candidate's drafts are left whole the engine cuts nobody's: the others' are cut here.
                best, most, scores = draft, win, rates[:nodes] if self.needs.probes and not whole else rates
        if best is None:
            return None
        cut = best.trimmed(len(scores))
        return DraftTree(cut.tokens, cut.parents, cut.drafter, cut.q, cut.sources, scores)

    def _ask(self, candidate: _Candidate, sequence: DraftedSequence, budget: Budget) -> DraftTree | None:
        begun = self._clock()
        found = self._try(candidate, _proposal, candidate.part.drafter, sequence, budget)
        candidate.known.cost.observe(budget.depth, self._clock() - begun)
        return found

    def _try(self, candidate: _Candidate, action: Callable[..., Result], *given: Any) -> Result | None:
        """Have a candidate do something; one that fails is left out from then on."""
        try:
            return action(*given)
        except Exception as problem:
            place = self._candidates.index(candidate)
            del self._candidates[place]
            for records in self._records.values():
                del records[place:place + 1]
            drafter, sequences = candidate.part.drafter, list(self._records)
            if not self._candidates:
                for sequence in sequences:
                    with suppress(Exception):
                        drafter.release(sequence)
                raise  # nobody is left: the engine switches this drafter off and says so
            log.warning("auto goes on without %s: %s: %s", drafter.name, type(problem).__name__, problem)
            self.part_dropped(drafter, sequences, problem)
            return None


def _proposal(drafter: Drafter, sequence: DraftedSequence, budget: Budget) -> DraftTree | None:
    (draft,) = drafter.propose([sequence], [budget])
    if draft is None:
        return None
    draft.check()
    return draft.trimmed(budget.nodes) if len(draft) else None


def _rates_by_depth(record: _Record, draft: DraftTree) -> list[float]:
    """For each node of a draft without scores how likely it is accepted once its parent is: what its depth met with,
    shared among its siblings, of which one at most is right."""
    depths = draft.depths()
    by_depth = record.places.rates(max(depths))
    record.width = len(draft) / max(depths)
    children = Counter(draft.parents)
    return [by_depth[depth - 1] / children[parent] for depth, parent in zip(depths, draft.parents)]


def _win(chances: Sequence[float], price: float) -> tuple[float, int]:
    """The best that any beginning of a draft promises, accepted tokens less their price, and how long it is."""
    total = best = 0.0
    nodes = 0
    for count, chance in enumerate(chances, 1):
        total += chance - price
        if total > best:
            best, nodes = total, count
    return best, nodes


def _forecast(known: Reputation, record: _Record, budget: Budget) -> tuple[int, float]:
    """Depth and expected win of a candidate that says nothing of its chances; its own time counts. Where it should not
    pay it is left alone for a while and then tried once."""
    best, depth, alive, total = 0.0, 0, 1.0, 0.0
    for count, rate in enumerate(record.places.rates(budget.depth), 1):
        alive *= rate
        total += alive - record.width * budget.price
        win = total - budget.pace * (known.cost(count) if known.cost.measured else 0.0)
        if win > best:
            best, depth = win, count
    if depth:
        record.pause = SHORTEST_PAUSE
        return depth, best
    if record.wait <= 0:
        record.wait, record.pause = record.pause, min(LONGEST_PAUSE, 2 * record.pause)
        return 1, 0.01  # a try, unless something better is at hand
    return 1, 0.0


def _teach(record: _Record, proposal: DraftTree, tokens: Sequence[int]) -> None:
    found = outcomes(proposal, tokens)
    if proposal.scores is not None:
        for node, hit in found:
            record.trust.learn(proposal.scores[node], hit)
        return
    depths, by_depth = proposal.depths(), dict[int, bool]()
    for node, hit in found:
        by_depth[depths[node]] = hit or by_depth.get(depths[node], False)
    for depth, hit in by_depth.items():
        record.places.learn(depth - 1, hit)


def _is_part(sent: DraftTree | None, proposal: DraftTree | None) -> bool:
    """Whether the draft that was verified is (the beginning of) this proposal."""
    return (sent is not None and proposal is not None and sent.drafter == proposal.drafter
            and sent.tokens == proposal.tokens[:len(sent)] and sent.parents == proposal.parents[:len(sent)])


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    """Option "drafters": the candidates, each a method's name or a dict; by default those that need no model."""
    wishes = options.take("drafters", None)
    if wishes is None:
        wishes = DEFAULT
    check_wishes(wishes, method)
    known = context.shared.setdefault("auto reputations", Reputations())
    return AutoDrafter(method, [(part_of(wish, method, context), known.of(wish)) for wish in wishes])
