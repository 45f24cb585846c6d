"""Bookkeeping: what becomes of the requests of a step, in counts, times and texts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from paceline.engine.decide.decision import Decision
from paceline.engine.drafting.drafting import Drafting
from paceline.engine.observe.observer import Observers
from paceline.engine.records.metrics import EngineMetrics, StepTimes
from paceline.engine.records.record import Record
from paceline.engine.schedule.sequence import Sequence
from paceline.engine.schedule.step import Step
from paceline.engine.structures import Structures
from paceline.speculation.drafter import Observation
from paceline.speculation.stats import SpeculationStats

Touched = dict[str, Record]
"""The records that have something new, by request id, in the order in which they got it."""


class Bookkeeping:
    """Follows the scheduler, which decides who runs and who has ended."""

    def __init__(self, metrics: EngineMetrics, observers: Observers, drafting: Drafting, structures: Structures,
                 clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._observers = observers
        self._drafting = drafting
        self._structures = structures
        self._clock = clock

    def preempted(self, step: Step) -> None:
        for seq in step.preempted:
            self._metrics.preemptions += not seq.request.shadow
            seq.record.metrics.preemptions += 1

    def scheduled(self, step: Step, now: float) -> None:
        """Counts and times of who runs."""
        for group in step.groups:
            seq = group.seq
            metrics = seq.record.metrics
            metrics.steps += 1
            if metrics.first_scheduled is None:
                metrics.first_scheduled = now
                metrics.cached_tokens = min(seq.cached_tokens, seq.prompt_len)
                metrics.cache_miss = seq.cache_miss
                if seq.request.shadow:
                    continue
                self._metrics.prompt_tokens += seq.prompt_len
                self._metrics.cached_tokens += metrics.cached_tokens

    def decided(self, step: Step, decisions: Seq[Decision], alive: Seq[bool], now: float, touched: Touched) -> int:
        """What the groups that were alive before it have got; how many tokens that was, without those of shadows."""
        count = 0
        for group, decision, was_alive in zip(step.groups, decisions, alive):
            if not was_alive or not (decision.tokens or decision.finish or decision.branches):
                continue
            count += self._settle(group.seq, decision, now)
            if decision.siblings:
                count += sum(self._settle(sibling, further, now)
                             for sibling, further in zip(group.siblings, decision.siblings))
            count += sum(self._settle(branch.seq, Decision(branch.tokens, finish=branch.finish), now)
                         for branch in decision.branches)
            touched[group.seq.record.request.id] = group.seq.record
        return count

    def stepped(self, step: Step, decisions: Seq[Decision], tokens: int, started: float, times: StepTimes) -> None:
        """A step has ended that began at `started` and yielded so many tokens."""
        self._metrics.account(step.rows, step.prompt_rows, tokens, times)
        self._observers.stepped(step, decisions, started, times)

    def _settle(self, seq: Sequence, decision: Decision, now: float) -> int:
        """A decided sequence: counts, times, the drafter's lesson, the end. Returns the tokens it got."""
        tokens = decision.tokens
        record: Record = seq.record
        if tokens:
            metrics = record.metrics
            metrics.output_tokens += len(tokens)
            if seq.sample == 0:
                metrics.token_times += [now] * len(tokens)
            seq.state.append(tokens)
            if record.speculation is not None:
                self._learn(seq, decision, record.speculation)
        if decision.error is not None:
            record.error = decision.error
        if decision.finish is not None:
            self.close(seq, decision.finish)
        return 0 if seq.request.shadow else len(tokens)

    def _learn(self, seq: Sequence, decision: Decision, stats: SpeculationStats) -> None:
        tokens, path = decision.tokens, decision.path
        if decision.rounds:
            self._metrics.drafted += sum(one.drafted for one in decision.rounds)
            self._metrics.accepted += sum(one.accepted for one in decision.rounds)
            if seq.sample == 0:
                stats.provenance.extend(decision.origins)
            self._drafting.count_rounds(seq, decision.rounds, len(tokens))
            return
        if decision.draft is not None:
            self._metrics.drafted += len(decision.draft)
            self._metrics.accepted += len(path)
        if seq.sample == 0:
            stats.provenance.extend(decision.origins)
        self._drafting.observe(seq, Observation(
            tokens, [row - 1 for row in path], decision.draft, decision.chosen, decision.hidden, decision.overlaps))

    def close(self, seq: Sequence, reason: str) -> None:
        """The scheduler has let go of `seq`; finish its text and let its drafter forget it."""
        reason = seq.emitter.finish(reason)
        if seq.record.error is None:
            seq.record.error = seq.emitter.broken
        self._drafting.release(seq)
        self._count_closed(seq.record, 1, reason)

    def close_rest(self, record: Record, reason: str) -> None:
        """Samples of a request that the scheduler has let go of in a step that broke before anybody heard of it."""
        if record.open:
            for emitter in record.emitters:
                emitter.finish(reason)
            self._drafting.release_all(record)
            self._count_closed(record, record.open, reason)

    def over(self, record: Record) -> None:
        """A request that came with all that its samples had to say: it has nothing to run."""
        self._count_closed(record, 0, "")

    def _count_closed(self, record: Record, samples: int, reason: str) -> None:
        record.open -= samples
        self._structures.forget(record.request.id)
        if record.open == 0:
            record.metrics.finished = self._clock()
        if record.request.shadow:
            return
        if samples:
            self._metrics.finished[reason] = self._metrics.finished.get(reason, 0) + samples
        if record.open == 0:
            if record.trace is not None:
                record.trace.finish_reason = record.emitters[0].finish_reason or ""
                record.trace.cut_short = record.emitters[0].cut_short
            self._observers.closed(record)
