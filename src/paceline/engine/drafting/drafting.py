"""Drafting: which sequences get a draft before a step, and what their drafters learn after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from paceline.engine.decide.decision import Decision
from paceline.engine.decide.recording import RecordedDrafts
from paceline.engine.execute.target_heads import TargetHeads
from paceline.engine.records.metrics import RepeatTimes, StepTimes
from paceline.engine.records.record import Record
from paceline.engine.rows.placement import place_without_drafter
from paceline.engine.schedule.pace import decodes, load_of
from paceline.engine.schedule.sequence import Sequence
from paceline.engine.schedule.step import Step
from paceline.kernels.device.lookup import head_number, looks_up, without_head
from paceline.speculation.controller import Ahead, Ask, Controller, Offer
from paceline.speculation.drafter import Budget, Drafter, Observation
from paceline.speculation.guard import Guard, Proposal, reason
from paceline.speculation.parts import MadeOfParts
from paceline.speculation.sequence import DraftedSequence, root_of
from paceline.speculation.spec import Speculation
from paceline.speculation.stats import Round, SpeculationStats
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES, check

log = logging.getLogger("paceline.speculation")

GRAMMAR = "grammar"
"""The source of drafts that a request's structure leaves no choice about."""
MOST_FORCED = 32
MOST_UNTOLD = 64
"""Tokens of a sequence that its drafter need not have heard of."""
FAIR_TRIAL = 8
"""Forced tokens after which a sequence that takes less than half of them gets no more: its model cuts texts into other
tokens than the tokenizer does."""


class Drafting(Guard[Sequence]):
    """The drafters of the running sequences. One that raises is switched off for its sequence; the text goes on.

    A controller decides how much is drafted for whom; what every step took, and who had which share of it, goes to it
    and to the statistics.
    """

    def __init__(self, vocab_size: int, controller: Controller, clock: Callable[[], float] = time.monotonic,
                 heads: TargetHeads | None = None) -> None:
        """`heads`: which a device may draft with by itself."""
        super().__init__(clock)
        self.controller = controller
        self.failures = 0
        self.totals: dict[str, SpeculationStats] = {}
        """By method, over all requests."""
        self.suspended: dict[str, str] = {}
        """Methods that draft no more, and why."""
        self._heads = heads
        self._vocab = vocab_size
        self._clock = clock
        self._drafters: dict[Sequence, tuple[Drafter, SpeculationStats]] = {}
        self._by_device: dict[Sequence, Drafter] = {}
        """Who needs none of these, whose drafter is kept all the same: requests share those that are alive."""
        self._recorded: dict[Sequence, RecordedDrafts] = {}
        """Who has drafts of a trace, and no drafter."""
        self._forced: dict[Sequence, tuple[int, int]] = {}
        """How many forced tokens were drafted and accepted."""
        self._seconds: dict[Sequence, float] = {}
        """What drafting took for each sequence since the last account."""
        self._asked: set[Sequence] = set()
        """Whose drafters have proposed something that they have yet to hear the outcome of."""
        self._untold: dict[Sequence, list[int]] = {}
        """What came of steps for which nothing was asked. In a crowd that is nearly all, and to hear of a token
        costs a drafter little less than to hear of many: it is told when it is asked again."""

    def begin(self, seq: Sequence, drafter: Drafter, stats: SpeculationStats) -> None:
        """A sequence starts. One whose drafts a device looks up by itself needs no drafter here."""
        if seq.lookup:
            self._by_device[seq] = drafter
            return
        wish = seq.request.speculation or Speculation(drafter.name, adaptive=False)
        self._drafters[seq] = (drafter, stats)
        self.controller.begin(seq, drafter, wish, len(seq.tokens), seq.scope)
        seq.wait_for_commit = drafter.needs.host
        seq.taps = frozenset(drafter.needs.taps)
        self.guarded(drafter, seq, self._open, drafter, seq)

    def repeat(self, seq: Sequence, drafts: RecordedDrafts) -> None:
        """A sequence starts whose drafts are given: verified where they were, as they were, by no one's leave."""
        self._recorded[seq] = drafts
        seq.wait_for_commit = True

    def _open(self, drafter: Drafter, seq: Sequence) -> None:
        if isinstance(drafter, MadeOfParts):
            drafter.listen(self._part_failed)
        drafter.begin(seq)

    def propose(self, running: SequenceOf[Sequence], most: int) -> None:
        """Give every caught-up sequence with a drafter its draft for the next step, which has so many rows for them
        at most."""
        for seq in running if self._recorded else ():
            if seq in self._recorded and _caught_up(seq):
                seq.draft = self._recorded[seq].at(len(seq.tokens))
                most -= 0 if seq.draft is None else len(seq.draft)
        if not self._drafters:
            return
        asks: list[Ask] = []
        decoding = [seq for seq in running if seq.computed >= seq.prompt_len]
        rows, context = len(decoding), sum(len(seq.tokens) for seq in decoding)
        for seq in decoding:
            if seq in self._drafters and not seq.slow_masks and _caught_up(seq):
                seq.draft = self._draft_forced(seq, most)
                if seq.draft is not None:
                    most -= len(seq.draft)
                    rows += len(seq.draft)
                    context += len(seq.draft) * len(seq.tokens)
                elif seq.limit - len(seq.tokens) > 1:  # else no draft could be emitted
                    asks.append(Ask(seq, len(seq.tokens), seq.record.behind))
        if not asks:
            return
        ahead = Ahead(len(decoding), rows, context, most)
        offers = self._offers(asks, self.controller.budgets(asks, ahead), ahead)
        for offer, draft in zip(offers, self.controller.choose(offers, ahead) if offers else ()):
            seq = cast("Sequence", offer.ask.sequence)
            seq.draft = draft

    def _offers(self, asks: SequenceOf[Ask], budgets: SequenceOf[Budget | None], ahead: Ahead) -> list[Offer]:
        """What drafters have for those who may be drafted for, each asked once for all of its own."""
        by_drafter: dict[int, tuple[Drafter, dict[Sequence, Ask], list[Budget]]] = {}
        for ask, budget in zip(asks, budgets):
            if budget is None:
                continue
            seq = cast("Sequence", ask.sequence)
            self._tell(seq)
            if seq not in self._drafters:  # what it heard was too much for it
                continue
            drafter = self._drafters[seq][0]
            self._asked.add(seq)
            _, own, limits = by_drafter.setdefault(id(drafter), (drafter, {}, []))
            own[seq] = ask
            left = seq.limit - len(seq.tokens) - 1
            limits.append(budget if budget.depth <= left else replace(budget, depth=left))
        offers: list[Offer | None] = []
        for drafter, own, limits in by_drafter.values():
            for proposal in self.proposals(drafter, list(own), limits):
                seq = proposal.sequence
                self._seconds[seq] = self._seconds.get(seq, 0.0) + proposal.seconds
                offers.append(self.guarded(drafter, seq, self._judged, own[seq], proposal, ahead))
        # Whoever lost its drafter over its own draft has no offer; one that it lost over another's is not sent.
        return [offer for offer in offers if offer is not None and offer.ask.sequence in self._drafters]

    def _judged(self, ask: Ask, proposal: Proposal[Sequence], ahead: Ahead) -> Offer | None:
        """A proposal as it may be sent, and what it promises."""
        draft = self._checked(proposal.draft, proposal.sequence.rule)
        self.controller.drafted(proposal.sequence, proposal.budget.depth, proposal.seconds, proposal.weighed)
        return self.controller.judge(ask, draft, ahead)

    def _draft_forced(self, seq: Sequence, most: int) -> DraftTree | None:
        """What the structure of a request leaves no choice about needs no drafter, and no budget."""
        if seq.state.grammar is None or most <= 0:
            return None
        tried, accepted = self._forced.get(seq, (0, 0))
        if tried >= FAIR_TRIAL and 2 * accepted < tried:
            return None
        started = self._clock()
        try:
            tokens = seq.state.grammar.forced()[:max(0, min(MOST_FORCED, most, seq.limit - len(seq.tokens) - 1))]
        except Exception:  # the target will meet it, and say so
            return None
        self._seconds[seq] = self._seconds.get(seq, 0.0) + self._clock() - started
        return DraftTree.chain(list(tokens), GRAMMAR) if tokens else None

    def _checked(self, draft: DraftTree | None, rule: str) -> DraftTree | None:
        """A draft as it may enter a step: a malformed one would break everybody in it, one that the request's rule
        cannot verify would bend its text."""
        if draft is None:
            return None
        if not isinstance(draft, DraftTree):
            raise TypeError(f"a draft must be a DraftTree or None, got {type(draft).__name__}")
        draft.check(self._vocab)
        if not len(draft):
            return None
        check(RULES[rule], draft, self._vocab)
        return draft

    def observe(self, seq: Sequence, observation: Observation) -> None:
        """New tokens of a sequence are final: count them, and let controller and drafter learn from them."""
        entry = self._drafters.get(seq)
        self._count(seq, observation)
        if entry is None:
            return
        if observation.draft is not None and observation.draft.drafter == GRAMMAR:
            # Nobody's draft: there is nothing to learn from its fate.
            tried, accepted = self._forced.get(seq, (0, 0))
            self._forced[seq] = (tried + len(observation.draft), accepted + len(observation.accepted))
            observation = Observation(observation.tokens, hidden=observation.hidden)
        needs = entry[0].needs
        if seq not in self._asked and observation.draft is None and not needs.taps and not needs.probes:
            self.guarded(entry[0], seq, self.controller.learn, seq, observation)
            if seq in self._drafters:
                untold = self._untold.setdefault(seq, [])
                untold += observation.tokens
                if len(untold) >= MOST_UNTOLD:
                    self._tell(seq)
            return
        self._asked.discard(seq)
        self._tell(seq)
        if seq in self._drafters:
            self.guarded(entry[0], seq, self._teach, entry[0], seq, observation)

    def _teach(self, drafter: Drafter, seq: Sequence, observation: Observation) -> None:
        self.controller.learn(seq, observation)
        drafter.observe(seq, observation)

    def _tell(self, seq: Sequence) -> None:
        """A drafter hears of what it has not heard of yet."""
        tokens, entry = self._untold.pop(seq, None), self._drafters.get(seq)
        if tokens and entry is not None:
            self.guarded(entry[0], seq, entry[0].observe, seq, Observation(tokens))

    def _count(self, seq: Sequence, observation: Observation) -> None:
        stats = seq.record.speculation
        assert stats is not None  # whoever observes tokens has a drafter, or had one
        draft, emitted = observation.draft, len(observation.tokens)
        for one in (stats, self._total(stats)):
            if draft is not None:
                one.record(max(draft.depths()), len(observation.accepted), len(draft), emitted)
                one.overlap += sum(observation.overlaps)
                one.overlapped += len(observation.overlaps)
            elif seq.output_len > emitted:  # the first token comes with the prompt, drafter or not
                one.plain += emitted

    def count_rounds(self, seq: Sequence, rounds: SequenceOf[Round], tokens: int) -> None:
        """What a device drafted by itself, and the tokens that came of it; in the totals when the step is over."""
        stats = seq.record.speculation
        assert stats is not None
        stats.record_rounds(rounds, tokens)

    def _total(self, stats: SpeculationStats) -> SpeculationStats:
        total = self.totals.get(stats.method)
        if total is None:
            total = self.totals[stats.method] = SpeculationStats(stats.method)
        return total

    def account(self, step: Step, decisions: SequenceOf[Decision], times: StepTimes, by_itself: bool,
                repeats: RepeatTimes | None = None) -> None:
        """A step is over: what it took, and the share of each sequence that has a drafter (by its rows). Only one that
        ran `by_itself` tells what steps take, or one that a device repeated (`repeats`)."""
        seconds, self._seconds = self._seconds, {}
        if repeats is not None:
            self._account_repeated(step, decisions, repeats)
            return
        if not by_itself:
            return
        load = load_of(step)
        decoding = [decision for group, decision in zip(step.groups, decisions) if decodes(group)]
        self.controller.stepped(load, len(decoding), sum(len(one.tokens) for one in decoding), times.draft, sum(times))
        if load.prompt_rows:
            return
        rows, running = load.rows, len(step.groups)
        whole = sum(times) - times.draft
        plain_token = self.controller.plain_cost(running, load.context * running / rows)
        for group, decision in zip(step.groups, decisions):
            stats: SpeculationStats | None = group.seq.record.speculation
            if stats is None or not decision.tokens:
                continue
            share = len(group.tokens) / rows
            draft = seconds.get(group.seq, 0.0)
            plain = len(decision.tokens) * plain_token
            for one in (stats, self._total(stats)):
                one.spend(draft, times.forward * share, times.sample * share, whole * share + draft, plain or None)

    def _account_repeated(self, step: Step, decisions: SequenceOf[Decision], times: RepeatTimes) -> None:
        """Everybody has the same share of the time in which a device drafts and goes on by itself: the rows of a step
        are there for all, and its drafts need not be looked up to be paid for. What part of it was drafting, nobody can
        say."""
        count = len(step.groups)
        by_method: dict[str, tuple[SpeculationStats, list[Round], list[int]]] = {}
        for group, decision in zip(step.groups, decisions):
            stats: SpeculationStats | None = group.seq.record.speculation
            tokens = len(decision.tokens)
            if stats is None or not tokens:
                continue
            self._share(stats, times, len(decision.rounds) or tokens, tokens, count)
            _, rounds, shares = by_method.setdefault(stats.method, (self._total(stats), [], [0, 0, 0]))
            rounds += decision.rounds
            for index, more in enumerate((len(decision.rounds) or tokens, tokens,
                                          tokens if decision.rounds else 0)):
                shares[index] += more
        for total, rounds, (ran, tokens, drafted) in by_method.values():
            total.record_rounds(rounds, drafted)
            self._share(total, times, ran, tokens, count)

    def _share(self, stats: SpeculationStats, times: RepeatTimes, ran: int, tokens: int, count: int) -> None:
        """Of a step of `count` sequences that ran so often for these, and yielded them so many tokens."""
        stats.spend(0.0, 0.0, 0.0, times.seconds * ran / count,
                    None if times.plain is None else times.plain * tokens / count)

    @property
    def seconds(self) -> float:
        """Spent drafting since the last account."""
        return sum(self._seconds.values()) if self._seconds else 0.0

    def release(self, seq: Sequence) -> None:
        self.controller.release(seq)
        self._forced.pop(seq, None)
        self._by_device.pop(seq, None)
        self._recorded.pop(seq, None)
        self._tell(seq)  # others may draft from this text
        self._asked.discard(seq)
        entry = self._drafters.get(seq)
        if entry is not None:
            self.guarded(entry[0], seq, entry[0].release, seq)
            self._drafters.pop(seq, None)

    def release_all(self, record: Record) -> None:
        """Of a request whose sequences nobody can name any more."""
        known = {**self._drafters, **self._by_device, **self._forced, **self._recorded}
        for seq in [seq for seq in known if seq.record is record]:
            self.release(seq)

    def lose(self, drafter: Drafter, seqs: SequenceOf[Sequence], problem: Exception) -> None:
        """A drafter failed on these sequences, which go on without one."""
        for seq in seqs:
            stats = self._go_plain(seq)
            self.failures += 1
            if stats.failure is None:
                stats.failure = reason(problem)
                log.warning("drafter %s failed on request %s and was switched off for it: %s",
                            drafter.name, seq.request.id, stats.failure, exc_info=self.new_to_the_log(problem))

    def not_built(self, method: str, problem: Exception) -> str:
        """A drafter's builder failed: the request goes on without one. Why, in a line."""
        self.failures += 1
        log.warning("no drafter %s could be built, and the request goes on without: %s", method, reason(problem),
                    exc_info=self.new_to_the_log(problem))
        return reason(problem)

    def _go_plain(self, seq: Sequence) -> SpeculationStats:
        """A sequence goes on without its drafter."""
        _, stats = self._drafters.pop(seq)
        self.controller.release(seq)
        self._forced.pop(seq, None)
        self._untold.pop(seq, None)
        self._asked.discard(seq)
        seq.draft = None
        seq.wait_for_commit = False
        seq.taps = frozenset()
        place_without_drafter(seq)
        return stats

    def suspend(self, method: str, why: str) -> None:
        """Nothing is drafted by a method any more: requests that come decode plainly, those that run go on so."""
        self.suspended[method] = why
        for seq, (drafter, stats) in list(self._drafters.items()):
            if stats.method == method:
                self._go_plain(seq)
                stats.failure = stats.failure or why
                with suppress(Exception):  # nobody asks it again
                    drafter.release(seq)

    def _lose_suspended(self, running: SequenceOf[Sequence]) -> None:
        """Of those for whom a device looks drafts up by itself, who may not have any more."""
        for seq in running:
            stats = seq.record.speculation
            if not seq.lookup or stats is None or stats.method not in self.suspended:
                continue
            stats.failure = stats.failure or self.suspended[stats.method]
            if not seq.in_flight_drafts:  # how far it gets is known
                seq.lookup = 0
                place_without_drafter(seq)

    def lose_heads(self, running: SequenceOf[Sequence]) -> None:
        """Who is drafted for on the device, by a head that has failed there, goes on with what can be looked up, or
        without a drafter; likewise, whose method is suspended."""
        if self.suspended:
            self._lose_suspended(running)
        if self._heads is None or not self._heads.lost:
            return
        lost = self._heads.lost_numbers
        for seq in running:
            problem = lost.get(head_number(seq.lookup)) if seq.lookup else None
            if problem is None:
                continue
            stats = seq.record.speculation
            if looks_up(seq.lookup):
                self._part_failed(seq, self._heads.kind(head_number(seq.lookup)), problem)
                seq.lookup = without_head(seq.lookup)
                continue
            if stats is not None and stats.failure is None:
                self.failures += 1
                stats.failure = reason(problem)
            if not seq.in_flight_drafts:  # how far it gets is known
                seq.lookup = 0
                place_without_drafter(seq)

    def _part_failed(self, sequence: DraftedSequence, name: str, problem: Exception) -> None:
        """A part of a drafter was dropped, which the drafter has logged; the others go on."""
        self.failures += 1
        seq: Any = root_of(sequence)[0]
        stats: SpeculationStats = seq.record.speculation
        stats.dropped.setdefault(name, reason(problem))


def _caught_up(seq: Sequence) -> bool:
    """Whether only its newest token is missing in the cache, so that a draft can follow it."""
    return seq.in_flight == 0 and seq.computed == len(seq.tokens) - 1
