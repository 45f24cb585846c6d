"""auto: whatever of several drafters promises most for each request now, one or some of them together, or none.

Candidates that cost next to nothing are asked at every step, and the text that comes, drafted or not, shows how much
their scores are worth. Those that run a model (trained heads) are forecast from their history and asked only where
they are expected to win more than they cost, once for all requests of a step. Where look-up and model do not agree and
both are worth their rows, one tree of both is verified.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from paceline.kernels.device.lookup import DeviceDraft, EitherDraft, HeadDraft, Lookup
from paceline.speculation.acceptance import outcomes, survival
from paceline.speculation.drafter import Budget, DraftContext, Drafter, Needs, Observation, WeighsItself
from paceline.speculation.forecast import added, best_win, exclusive, rates_by_depth, win_by_depth, worthwhile
from paceline.speculation.guard import Guard, reason
from paceline.speculation.history import Histories, History, Pause, Traits
from paceline.speculation.models import SAMPLED_RULES
from paceline.speculation.options import Options
from paceline.speculation.packing import Pack, pack_likeliest
from paceline.speculation.parts import MOST_PARTS, MadeOfParts, Part, all_taps, check_wishes, fitted, part_of
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree

DEFAULT = ("ngram", "suffix")
"""Beside the trained heads of the engine."""
HOPELESS = 0.5
"""Nodes that survive less often than this share of their price are not passed on."""
LEAST_WIN = 0.01
"""Tokens that a draft must be expected to win; what a drafter is tried for that should not pay."""
LEAST_GAIN = 0.05
"""Tokens that a model whose drafts are scored must be expected to gain for each sequence that it is asked about, beyond
its time: what time and rows take is not known more exactly than that."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    number: int
    part: Part
    wish: object
    """Under which its histories are kept."""
    traits: Traits
    """What all requests of an engine taught about it."""

    @property
    def free(self) -> bool:
        """Whether it is asked whatever it promises: it runs no model, and as far as is known its drafts tell what they
        are worth."""
        return not self.part.drafter.needs.runs_model and self.traits.scored is not False


class _Record:
    """One candidate of one sequence."""

    __slots__ = ("candidate", "history", "nodes", "pause", "width")

    def __init__(self, candidate: _Candidate, known: History) -> None:
        """`known`: what all requests of its scope taught about the candidate."""
        self.candidate = candidate
        self.history = History(known)
        self.pause = Pause()
        self.width = 1.0
        """Nodes at each depth, of the last draft without scores."""
        self.nodes = 0
        """Of the last draft: those that were worth their price."""


@dataclass(slots=True)
class _Found:
    """A candidate's draft for a sequence, and what it promises."""

    record: _Record
    draft: DraftTree
    rates: list[float]
    """Of its nodes: how likely each is accepted once its parent is."""
    win: float
    scored: bool
    """The rates are by what it drafted, and not by its history alone."""


@dataclass(slots=True)
class _Offers:
    """What there is for one sequence in this step so far."""

    sequence: DraftedSequence
    budget: Budget
    records: list[_Record]
    found: list[_Found] = field(default_factory=list)

    @property
    def best(self) -> _Found | None:
        best = max(self.found, key=lambda one: one.win, default=None)
        return best if best is not None and best.win > 0.0 else None

    @property
    def merges(self) -> bool:
        """Whether drafts may be packed into one: nodes are chosen by their values then, which the rule must not mind,
        and those that are there to be observed have to stay."""
        return self.sequence.rule == "coupled" and not any(
            record.candidate.part.drafter.needs.probes for record in self.records)


class AutoDrafter(WeighsItself, MadeOfParts, Guard[DraftedSequence]):
    """Passes on the best that its candidates have to say, with scores as trustworthy as it can make them.

    A candidate that raises is dropped for the sequence that it raised on; the others go on.
    """

    def __init__(self, name: str, parts: Sequence[tuple[Part, object]], histories: Histories | None = None,
                 clock: Callable[[], float] = time.perf_counter, lookup: DeviceDraft | None = None) -> None:
        """`parts`: each with the wish under which `histories` know it. `lookup`: what a device, if there is one, does
        in place of all the parts."""
        super().__init__()
        self.name = name
        needs = [part.drafter.needs for part, _ in parts]
        self.needs = Needs(taps=all_taps(needs), samples=any(one.samples for one in needs),
                           runs_model=any(one.runs_model for one in needs),
                           probes=any(one.probes for one in needs), lookup=lookup)
        self._histories = Histories() if histories is None else histories
        self._candidates = [_Candidate(number, part, wish, self._histories.traits(wish))
                            for number, (part, wish) in enumerate(parts)]
        self._records: dict[DraftedSequence, list[_Record]] = {}
        self._packs: dict[DraftedSequence, Pack] = {}
        """Of the last step, where several drafts were packed into one."""
        self._deserted: dict[DraftedSequence, Exception] = {}
        """Sequences that have lost all candidates, and to what."""
        self._clock = clock

    def drafters(self) -> Sequence[Drafter]:
        return [candidate.part.drafter for candidate in self._candidates]

    def begin(self, sequence: DraftedSequence) -> None:
        self._records[sequence] = [_Record(candidate, self._histories.of(candidate.wish, sequence.scope))
                                   for candidate in self._candidates]
        for candidate in self._candidates:
            self.guarded(candidate.part.drafter, sequence, candidate.part.drafter.begin, sequence)

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        for sequence in sequences:
            self._packs.pop(sequence, None)
            if sequence in self._deserted:
                raise self._deserted[sequence]
        offers = [_Offers(sequence, budget, self._records[sequence]) for sequence, budget in zip(sequences, budgets)]
        dear = [candidate for candidate in self._candidates if not candidate.free]
        for candidate in self._candidates:
            if candidate not in dear:
                self._ask(candidate, [(one, candidate.part.budget(one.budget)) for one in offers])
        self.weighed = sum(self._ask(candidate, self._worth_asking(candidate, offers)) for candidate in dear)
        return [self._settled(one) for one in offers]

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        pack = self._packs.pop(sequence, None)
        for record in list(self._records.get(sequence, ())):
            proposal = record.history.settled()
            record.pause.passed(len(observation.tokens))
            if proposal is not None:
                record.history.learn(proposal, outcomes(proposal, observation.tokens))
            own = Observation(observation.tokens, hidden=observation.hidden)
            if _is_part(observation.draft, proposal):
                own = observation
            elif pack is not None and proposal is not None and observation.draft is not None:
                own = pack.translated(record.candidate.number, proposal, observation)
            drafter = record.candidate.part.drafter
            self.guarded(drafter, sequence, drafter.observe, sequence, own)

    def release(self, sequence: DraftedSequence) -> None:
        try:
            for record in list(self._records.get(sequence, ())):
                drafter = record.candidate.part.drafter
                self.guarded(drafter, sequence, drafter.release, sequence)
        finally:
            for kept in (self._records, self._packs, self._deserted):
                kept.pop(sequence, None)

    # ---------------------------------------------------------------- who is asked

    def _worth_asking(self, candidate: _Candidate, offers: Sequence[_Offers]) -> list[tuple[_Offers, Budget]]:
        """Those for whom a candidate that is not free should win more than it costs. A round of it takes hardly longer
        for many than for one: they share its time. Who is left alone for long is tried once."""
        asked: list[tuple[_Offers, Budget]] = []
        together: list[tuple[float, _Offers, Budget, _Record]] = []
        for one in offers:
            record = _record_of(one, candidate)
            if record is None:
                continue
            budget = candidate.part.budget(one.budget)
            if _scored(record, one):
                together.append((_gain(record, one) - LEAST_GAIN, one, budget, record))
                continue
            depth, win = win_by_depth(record.history, budget, record.width)
            if _pays(record, one, win > (0.0 if one.best is None else one.best.win)):
                asked.append((one, replace(budget, depth=depth)))
        together.sort(key=lambda entry: -entry[0])
        count = worthwhile([entry[0] for entry in together], [entry[1].budget.pace for entry in together],
                           candidate.traits.rounds)
        return asked + [(one, budget) for place, (_, one, budget, record) in enumerate(together)
                        if _pays(record, one, place < count)]

    def _ask(self, candidate: _Candidate, asked: Sequence[tuple[_Offers, Budget]]) -> float:
        """Once for all of them. Returns the seconds that it took."""
        open = [(one, budget) for one, budget in asked if _record_of(one, candidate) is not None]
        if not open:
            return 0.0
        drafter, by_sequence = candidate.part.drafter, {one.sequence: one for one, _ in open}
        started = self._clock()
        proposals = self.proposals(drafter, [one.sequence for one, _ in open], [budget for _, budget in open])
        seconds = self._clock() - started
        candidate.traits.rounds.observe(len(open), seconds)
        for _, budget in open:
            candidate.traits.cost.observe(budget.depth, seconds / len(open))
        for sequence, budget, proposed, *_ in proposals:
            draft = self.guarded(drafter, sequence, fitted, proposed, budget)
            one = by_sequence[sequence]
            record = _record_of(one, candidate)
            if record is not None:
                record.history.proposal = draft
                if draft is not None:
                    one.found.append(_judged(record, draft, one))
        return seconds

    # ---------------------------------------------------------------- what becomes of their drafts

    def _settled(self, offers: _Offers) -> DraftTree | None:
        """The proposal with the largest expected win, accepted tokens less the price of its nodes, alone or packed with
        others."""
        best = offers.best
        if best is None:
            return None
        merged = self._merged(offers, best)
        if merged is not None:
            return merged
        rates = best.rates
        if self.needs.probes and not best.record.candidate.part.drafter.needs.probes:
            # Where some candidate's drafts are left whole the engine cuts nobody's: the others' are cut here.
            rates = rates[:best.record.nodes]
        cut = best.draft.trimmed(len(rates))
        return DraftTree(cut.tokens, cut.parents, cut.drafter, cut.q, cut.sources, rates)

    def _merged(self, offers: _Offers, best: _Found) -> DraftTree | None:
        """One tree of what models drafted and of the best of what was looked up, where that promises more than any of
        them alone. (Look-ups agree, or one of them knows better.)"""
        if len(offers.found) < 2 or not offers.merges:
            return None
        worthy = [one for one in offers.found if one.scored and one.win > 0.0]
        looked_up = [one for one in worthy if not _runs_model(one.record)]
        packed = [one for one in worthy if _runs_model(one.record)]
        packed += [max(looked_up, key=lambda one: one.win)] if looked_up else []
        if len(packed) < 2:
            return None
        drafts = {one.record.candidate.number: one.draft.trimmed(len(one.rates)) for one in packed}
        rates = {one.record.candidate.number: one.rates for one in packed}

        def chance(depth: int, group: Sequence[tuple[int, int]]) -> float:
            return max(rates[number][node] for number, node in group)

        pack = pack_likeliest(drafts, chance, offers.budget, exclusive)
        assert pack.scores is not None
        win, nodes = best_win(survival(pack.tree.parents, pack.scores), offers.budget.price)
        if win <= best.win + LEAST_WIN:
            return None
        pack.settle({one.record.candidate.number: one.draft for one in packed})
        self._packs[offers.sequence] = pack
        names = {one.record.candidate.number: one.record.candidate.part.drafter.name for one in packed}
        return pack.draft(self.name, drafts, names).trimmed(nodes)

    def lose(self, drafter: Drafter, sequences: Sequence[DraftedSequence], problem: Exception) -> None:
        """A candidate failed on these sequences, and is asked about them no more."""
        self.say_once(id(drafter), "%s goes on without %s, which failed: %s", self.name, drafter.name, reason(problem),
                      problem=problem)
        deserted = False
        for sequence in sequences:
            records = self._records.get(sequence, [])
            records[:] = [record for record in records if record.candidate.part.drafter is not drafter]
            if not records:
                self._deserted[sequence] = problem
                deserted = True
        if deserted:
            raise problem  # nobody is left: the engine switches this drafter off and says so
        self.tell(drafter, sequences, problem)


def _record_of(offers: _Offers, candidate: _Candidate) -> _Record | None:
    """None: it has failed on this sequence."""
    return next((record for record in offers.records if record.candidate is candidate), None)


def _runs_model(record: _Record) -> bool:
    return record.candidate.part.drafter.needs.runs_model


def _sampled(record: _Record, offers: _Offers) -> bool:
    """Whether it samples its drafts for this sequence from a q of its own. Those must not be chosen by their values:
    they count by their drafter's history alone."""
    return record.candidate.part.drafter.needs.samples and offers.sequence.rule in SAMPLED_RULES


def _scored(record: _Record, offers: _Offers) -> bool:
    """Whether its drafts for this sequence tell what they are worth, as far as is known."""
    return record.candidate.traits.scored is not False and not _sampled(record, offers)


def _judged(record: _Record, draft: DraftTree, offers: _Offers) -> _Found:
    scored = draft.scores is not None and draft.q is None
    if not _sampled(record, offers):  # that says nothing of what it drafts for others
        record.candidate.traits.scored = scored
    price = offers.budget.price
    if scored:
        whole = record.candidate.part.drafter.needs.probes
        rates, chances = record.history.by_score.worth(draft, 0.0 if whole else HOPELESS * price)
    else:
        rates = rates_by_depth(record.history, draft)
        chances = survival(draft.parents, rates)
        record.width = len(draft) / max(draft.depths())
    win, record.nodes = best_win(chances, price)
    if scored and _runs_model(record):
        # By what its scores are worth, not by what came of them: luck would silence a model that pays on average.
        beside = offers.best
        known = record.history.yields(0.0 if beside is None else beside.win, price)
        known.learn(sum(chances[:record.nodes]), record.nodes)
    return _Found(record, draft, rates, win, scored)


def _pays(record: _Record, offers: _Offers, expected: bool) -> bool:
    """Whether a candidate is asked that is or is not expected to pay. Where it is not it is left alone for a while and
    then tried once, unless something better is at hand or all requests together have tried enough lately."""
    if expected:
        record.pause.forgive()
        return True
    if not record.pause.over or (offers.best is not None and offers.best.win >= LEAST_WIN):
        return False
    rounds, allowance = record.candidate.traits.rounds, offers.budget.allowance
    if allowance is not None and not allowance.spend(rounds(1) if rounds.measured else 0.0):
        return False
    record.pause.begin()
    rounds.doubt()
    return True


def _gain(record: _Record, offers: _Offers) -> float:
    """Tokens that asking a candidate should add to what there is, its time not counted."""
    best = offers.best
    if best is None:
        return added(record.history, offers.budget.price)
    return added(record.history, offers.budget.price, best.win,
                 best.rates[0] if offers.merges and best.scored else None)


def _is_part(sent: DraftTree | None, proposal: DraftTree | None) -> bool:
    """Whether the draft that was verified is (the beginning of) this proposal."""
    return (sent is not None and proposal is not None and sent.drafter == proposal.drafter
            and sent.tokens == proposal.tokens[:len(sent)] and sent.parents == proposal.parents[:len(sent)])


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    """Option "drafters": the candidates, each a method's name or a dict; by default those that need no model, and the
    trained heads of the engine. Requests that ask for the same ones share the drafter while any of them lives, so that
    their drafts are made together."""
    wishes = options.take("drafters", None)
    named = wishes is not None
    if not named:
        heads: Mapping[str, str] = {} if context.models is None else context.models.heads
        wishes = [*DEFAULT, *({"method": kind, "head": head} for head, kind in heads.items())][:MOST_PARTS]
    check_wishes(wishes, method)
    shared: WeakValueDictionary[str, AutoDrafter] = context.shared.setdefault("auto drafters", WeakValueDictionary())
    key = json.dumps([named, wishes], sort_keys=True, default=repr)
    found = shared.get(key)
    if found is None:
        known = context.shared.setdefault("auto histories", Histories())
        parts = [(part_of(wish, method, context), wish) for wish in wishes]
        found = shared[key] = AutoDrafter(method, parts, known, lookup=_on_device(parts, named))
    return found


def _on_device(parts: Sequence[tuple[Part, object]], named: bool) -> DeviceDraft | None:
    """Those that were named are all to be asked; of those that were not, what needs no host is enough: the first that
    looks up, the first head, or both."""
    own = [part.drafter.needs.lookup for part, _ in parts]
    if named:
        return own[0] if len(own) == 1 else None
    lookup = next((one for one in own if isinstance(one, Lookup)), None)
    head = next((one for one in own if isinstance(one, HeadDraft)), None)
    return EitherDraft(lookup, head) if lookup is not None and head is not None else lookup or head
