"""auto: whichever of several drafters promises most for this request now, or none.

Every candidate that costs next to nothing is asked at every step, and the text that comes, drafted or not, shows how
much its scores are worth. Candidates without scores (models) are forecast from their own history and asked only where
they are expected to win more than they cost.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from paceline.kernels.device.lookup import HeadDraft, Lookup
from paceline.speculation.acceptance import outcomes, survival
from paceline.speculation.drafter import Budget, DraftContext, Drafter, Needs, Observation
from paceline.speculation.guard import Guard, reason
from paceline.speculation.history import Histories, History, Pause
from paceline.speculation.options import Options
from paceline.speculation.parts import MadeOfParts, Part, all_taps, check_wishes, fitted, part_of
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree

log = logging.getLogger("paceline.speculation")

DEFAULT = ("ngram", "suffix")
HOPELESS = 0.5
"""Nodes that survive less often than this share of their price are not passed on."""


class _Candidate(NamedTuple):
    part: Part
    known: History
    """What all requests of an engine taught about it."""

    @property
    def scored(self) -> bool:
        """Whether its drafts carry scores, as far as is known; without them it is only asked when it should pay."""
        return self.known.scored is not False


class _Record:
    """One candidate of one sequence."""

    __slots__ = ("history", "pause", "width")

    def __init__(self, candidate: _Candidate) -> None:
        self.history = History(candidate.known)
        self.pause = Pause()
        self.width = 1.0
        """Nodes at each depth, of the last draft without scores."""


class AutoDrafter(MadeOfParts, Guard[DraftedSequence]):
    """Passes on the best proposal of its candidates, with scores as trustworthy as it can make them.

    A candidate that raises is dropped for all sequences of this object; the others go on.
    """

    def __init__(self, name: str, parts: Sequence[tuple[Part, History]],
                 clock: Callable[[], float] = time.perf_counter, lookup: Lookup | HeadDraft | None = None) -> None:
        """`lookup`: what a device, if there is one, does in place of all the parts."""
        super().__init__()
        self.name = name
        needs = [part.drafter.needs for part, _ in parts]
        self.needs = Needs(taps=all_taps(needs), samples=any(one.samples for one in needs),
                           probes=any(one.probes for one in needs), lookup=lookup)
        self._candidates = [_Candidate(part, known) for part, known in parts]
        self._records: dict[DraftedSequence, list[_Record]] = {}
        self._clock = clock

    def drafters(self) -> Sequence[Drafter]:
        return [candidate.part.drafter for candidate in self._candidates]

    def begin(self, sequence: DraftedSequence) -> None:
        self._records[sequence] = [_Record(candidate) for candidate in self._candidates]
        for candidate in list(self._candidates):
            self.guarded(candidate.part.drafter, sequence, candidate.part.drafter.begin, sequence)

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [self._best(sequence, budget) for sequence, budget in zip(sequences, budgets)]

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        for candidate, record in self._pairs(sequence):
            proposal = record.history.settled()
            record.pause.passed(len(observation.tokens))
            if proposal is not None:
                record.history.learn(proposal, outcomes(proposal, observation.tokens))
            own = observation
            if not _is_part(observation.draft, proposal):
                own = Observation(observation.tokens, hidden=observation.hidden)
            self.guarded(candidate.part.drafter, sequence, candidate.part.drafter.observe, sequence, own)

    def release(self, sequence: DraftedSequence) -> None:
        try:
            for candidate, _ in self._pairs(sequence):
                self.guarded(candidate.part.drafter, sequence, candidate.part.drafter.release, sequence)
        finally:
            self._records.pop(sequence, None)

    def _pairs(self, sequence: DraftedSequence) -> list[tuple[_Candidate, _Record]]:
        return list(zip(self._candidates, self._records.get(sequence, ())))

    def _best(self, sequence: DraftedSequence, budget: Budget) -> DraftTree | None:
        """The proposal with the largest expected win: accepted tokens less the price of its nodes. Candidates with
        scores come first; one without must be expected to beat what they found."""
        best: DraftTree | None = None
        most, scores = 0.0, list[float]()
        for candidate, record in sorted(self._pairs(sequence), key=lambda pair: not pair[0].scored):
            asked = candidate.part.budget(budget)
            if not candidate.scored:
                depth, forecast = _forecast(record, asked)
                if forecast <= most:
                    continue
                asked = Budget(depth, asked.nodes, budget.price, budget.pace)
            draft = record.history.proposal = self._ask(candidate, sequence, asked)
            if draft is None:
                continue
            # What was sampled must not be chosen by its value: such a draft counts by its drafter's history alone.
            candidate.known.scored = draft.scores is not None and draft.q is None
            whole = candidate.part.drafter.needs.probes
            if candidate.scored:
                rates, chances = record.history.by_score.worth(draft, 0.0 if whole else HOPELESS * budget.price)
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
        drafter, found = candidate.part.drafter, None
        started = self._clock()
        for one in self.proposals(drafter, [sequence], [budget]):
            found = self.guarded(drafter, sequence, fitted, one.draft, budget)
        candidate.known.cost.observe(budget.depth, self._clock() - started)
        return found

    def sharers(self, sequence: DraftedSequence) -> Iterable[DraftedSequence]:
        return self._records

    def lose(self, drafter: Drafter, sequences: Sequence[DraftedSequence], problem: Exception) -> None:
        """A candidate failed: it is asked no more, whatever the sequence."""
        left = [place for place, candidate in enumerate(self._candidates) if candidate.part.drafter is not drafter]
        self._candidates = [self._candidates[place] for place in left]
        for sequence, records in self._records.items():
            self._records[sequence] = [records[place] for place in left]
        if not self._candidates:
            raise problem  # nobody is left: the engine switches this drafter off and says so
        log.warning("auto goes on without %s: %s", drafter.name, reason(problem))
        self.tell(drafter, sequences, problem)


def _rates_by_depth(record: _Record, draft: DraftTree) -> list[float]:
    """For each node of a draft without scores how likely it is accepted once its parent is: what its depth met with,
    shared among its siblings, of which one at most is right."""
    depths = draft.depths()
    by_depth = record.history.by_depth.rates(max(depths))
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


def _forecast(record: _Record, budget: Budget) -> tuple[int, float]:
    """Depth and expected win of a candidate that says nothing of its chances; its own time counts. Where it should not
    pay it is left alone for a while and then tried once."""
    best, depth, alive, total = 0.0, 0, 1.0, 0.0
    cost = record.history.cost
    for count, rate in enumerate(record.history.by_depth.rates(budget.depth), 1):
        alive *= rate
        total += alive - record.width * budget.price
        win = total - budget.pace * (cost(count) if cost.measured else 0.0)
        if win > best:
            best, depth = win, count
    if depth:
        record.pause.forgive()
        return depth, best
    if record.pause.over:
        record.pause.begin()
        return 1, 0.01  # a try, unless something better is at hand
    return 1, 0.0


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
    known = context.shared.setdefault("auto histories", Histories())
    parts = [(part_of(wish, method, context), known.of(wish)) for wish in wishes]
    # Those that were named are all to be asked; of those that were not, what needs no host is enough.
    lookup = parts[0][0].drafter.needs.lookup if wishes is DEFAULT or len(parts) == 1 else None
    return AutoDrafter(method, parts, lookup=lookup)
