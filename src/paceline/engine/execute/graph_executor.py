"""GraphExecutor: steps on a device that samples by itself, submitted before the host has read the one before them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from paceline.engine.decide.decider import Decider
from paceline.engine.decide.decision import Decision
from paceline.engine.decide.sampled import Sampled
from paceline.engine.execute.executor import Settled, StepDropped, dropped_without_memory, nothing, over
from paceline.engine.execute.graphs.attended import Attended
from paceline.engine.execute.graphs.chances import ChancesByScope
from paceline.engine.execute.graphs.draft_rows import PLAIN, DraftPlan, DraftRows, Sources
from paceline.engine.execute.graphs.host_gaps import HostGaps, StepKind
from paceline.engine.execute.graphs.in_flight import (
    MOST_REPEATS,
    RepeatedInFlight,
    TokensInFlight,
    VerdictsInFlight,
)
from paceline.engine.execute.graphs.logits_buffer import AfterSampling, LogitsBuffer
from paceline.engine.execute.graphs.memory import Use
from paceline.engine.execute.graphs.moment import Moment
from paceline.engine.execute.graphs.sample import WIDEST
from paceline.engine.execute.graphs.seats import sampling
from paceline.engine.execute.graphs.step_graphs import StepGraphs
from paceline.engine.execute.graphs.warm_up import Progress, capture_steps
from paceline.engine.execute.model_runner import ModelRunner
from paceline.engine.records.metrics import RepeatTimes
from paceline.engine.rows.batch import Batch, BatchBuilder, StepLogits
from paceline.engine.rows.placement import decided_on_device
from paceline.engine.rows.sample_rows import row_masks
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import Placement, Sequence
from paceline.engine.schedule.step import Planned, Repeat, Step
from paceline.sampling.masks import Mask

AHEAD = 2
"""Steps in flight, at most."""
ROUND_TRIP, QUIET_ROUND_TRIP = 0.025, 0.2
"""Seconds that a request that comes meanwhile may have to wait for the device: while requests keep coming, and when
none has come for QUIET seconds."""
QUIET = 1.0
FORGETTING = 0.9
"""What is kept of the host's longest time, each time that it was shorter."""


class InFlight(Protocol):
    @property
    def ended(self) -> Moment:
        """When what was sampled is on the host."""

    def read(self) -> list[Sampled]:
        """What was sampled, per group. Waits for the device."""


class Flight:
    """A step on its way: laid out -> its forward launched -> sampled on the device, or its logits left to the host."""

    __slots__ = ("ahead", "alone", "batch", "began", "buffer", "captures", "decided", "drafted", "free", "known",
                 "launch_s", "left", "logits", "reading", "started", "step")

    def __init__(self, step: Step, captures: int, batch: Batch | None = None) -> None:
        """Without a batch it is a repeated step, in which everybody is free. Made when it is submitted, after so many
        captures."""
        groups = step.groups
        self.step = step
        self.captures = captures
        self.batch = batch
        placement = Placement.FREE if batch is None else min(group.seq.placement for group in groups)
        self.drafted = batch is not None and any(group.draft is not None for group in groups)
        self.decided = batch is None or all(
            decided_on_device(group) and (group.draft is None or len(group.tokens) <= WIDEST) for group in groups)
        """Whether the device can decide all that it yields, once the host has said what it masks."""
        self.ahead = placement >= Placement.AHEAD and not self.drafted and self.decided
        """Whether it can be launched before the tokens before it are known on the host."""
        self.free = placement >= Placement.UNMASKED
        """Whether the host has no word before it is sampled."""
        self.known = all(group.seq.in_flight == 1 for group in groups)
        """Nothing that its rows depend on was in flight when it was submitted."""
        self.alone = not step.repeated
        """Nothing else has been in flight since it was submitted."""
        self.launch_s = 0.0
        """Seconds in which the host launched it, its masks included."""
        self.started = False
        self.buffer: LogitsBuffer | None = None
        """Where a captured forward leaves its logits, until they are sampled."""
        self.reading: InFlight | None = None
        """Its tokens, on their way to the host."""
        self.logits: StepLogits | None = None
        self.began: Moment | None = None
        """When its forward began on the device."""
        self.left: Moment | None = None
        """When that left its logits to the host."""

    @property
    def ended(self) -> Moment | None:
        """When the device was done with it."""
        return self.left if self.reading is None else self.reading.ended

    @property
    def device_seconds(self) -> float | None:
        """From its beginning to its end; None: not known, or not yet."""
        if self.began is None or self.ended is None or not (self.began.passed and self.ended.passed):
            return None
        return self.began.until(self.ended)

    @property
    def kind(self) -> StepKind:
        if self.step.repeated:
            return StepKind.DRAFTED if self.step.drafted_rows else StepKind.REPEATED
        return StepKind.VERIFIED if self.drafted else StepKind.SINGLE

    @property
    def launched(self) -> bool:
        """Whether its tokens, or the logits for the host, are on their way."""
        return self.reading is not None or self.logits is not None


class GraphExecutor:
    """Implements Executor. What is captured, repeated or launched kernel by kernel, what waits for the host's masks,
    and what happens without memory, nobody else knows."""

    looks_up = True
    goes_on = True

    def __init__(self, graphs: StepGraphs, runner: ModelRunner, builder: BatchBuilder, decider: Decider,
                 clock: Callable[[], float]) -> None:
        self.graphs = graphs
        self._memory = graphs.memory
        self._runner = runner
        self._builder = builder
        self._decider = decider
        self._clock = clock
        self._flight: deque[Flight] = deque()
        """Oldest first."""
        self._step_seconds, self._measured = ROUND_TRIP, False
        """What a repeated step took last on the device, each time; whether there was one."""
        self._host_seconds = 0.0
        """What the host needed between two waits for the device, the longest of the last few times."""
        self._read_at: float | None = None
        self._read_last: Step | None = None
        """The repeated step that was read then; None: it was another one, or nothing was in flight behind it."""
        self._ended: Moment | None = None
        """When the device was done with the last step that was settled."""
        self.host_gaps = HostGaps()
        self._draft_rows = DraftRows()
        self._chances = ChancesByScope()
        self._attended = Attended()

    def capture(self, most_rows: int, progress: Progress | None = None) -> int:
        """Capture steps of up to `most_rows` rows before the first request; how many there are."""
        return capture_steps(self.graphs, most_rows, progress)

    def make_room(self, seq: Sequence) -> bool:
        return self.graphs.seats.make_room(seq, self._memory)

    def start(self) -> None:
        pass  # advance() has done it

    @property
    def underway(self) -> bool:
        return all(flight.started for flight in self._flight)

    def has_room(self, scheduler: Scheduler) -> bool:
        if not self._flight:
            return True
        if len(self._flight) >= AHEAD:
            return False
        if self._goes_apart(scheduler):
            return True
        newest = self._flight[-1]
        return (newest.ahead and newest.reading is not None
                and all(seq.placement >= Placement.AHEAD for seq in scheduler.running))

    def plan(self, scheduler: Scheduler, since_arrival: float) -> Planned | None:
        if scheduler.can_repeat():
            return Planned(self._repeated(scheduler.running, self.how_often(scheduler, since_arrival)))
        return self._plan_apart(scheduler) if self._goes_apart(scheduler) else Planned()

    def _goes_apart(self, scheduler: Scheduler) -> bool:
        return (not self._memory.lacks(Use.DECODE)
                and self._attended.goes_apart(scheduler.running, self._step_seconds))

    def _plan_apart(self, scheduler: Scheduler) -> Planned | None:
        """A step of those who are free while one of the others is in flight, and the other way round."""
        free = scheduler.free()
        if self._attended.free_next(flight.step.repeated for flight in self._flight):
            if not free:
                return None if self._flight else Planned()
            # As long as the host takes for the others: they wait no longer than for the host.
            longest = max(seq.limit - seq.least_computed - 1 for seq in free)
            times = max(1, min(longest, int(self._attended.seconds / self._step_seconds)))
            repeat = self._repeated(free, min(times, MOST_REPEATS))
            if repeat is not None:
                return Planned(repeat, apart=True)
            return None if self._flight else Planned()
        if any(not flight.step.repeated for flight in self._flight):
            return None
        return Planned(apart=True)

    def _repeated(self, running: Seq[Sequence], times: int) -> Repeat | None:
        """A step of these, repeated up to so often; None: it cannot be."""
        decode = self.graphs.decode
        if self._memory.lacks(Use.DECODE) or len(running) > decode.most_rows:
            return None
        plan = self._drafts(running, times)
        if plan.rows and not self._drafted_ready(running, plan):
            plan = PLAIN
        if not self._memory.allows(Use.DECODE, lambda: decode.ready(running, plan)):
            return None
        return Repeat(times, plan.rows, decode.lookahead(running, plan), plan.heads)

    def _drafted_ready(self, running: Seq[Sequence], plan: DraftPlan) -> bool:
        """Make a step with drafts ready. False: there is no memory for it, or a head broke what was captured with it;
        it will not be asked again."""
        decode = self.graphs.decode
        before = decode.lost_heads
        try:
            if self._memory.allows(Use.LOOKUP, lambda: decode.ready(running, plan), final=False):
                return True
        except Exception:
            if decode.lost_heads == before:
                raise
            return False
        self._refuse(plan)
        return False

    def _drafts(self, running: Seq[Sequence], times: int) -> DraftPlan:
        """Of a repeated step of those who run: as many as pay, or as somebody insists on."""
        wishes = [seq.request.speculation for seq in running if self.graphs.decode.drafts_for(seq)]
        if not wishes:
            return PLAIN
        sources = self.graphs.decode.sources(running)
        count, fixed = len(running), [wish.k for wish in wishes if wish is not None and not wish.adaptive]
        if fixed:
            return self._draft_rows.insist(count, max(fixed), sources.heads)
        return self._draft_rows.choose(count, sources, times)

    def how_often(self, scheduler: Scheduler, since_arrival: float) -> int:
        """Just long enough for the host to keep up: who ends inside keeps others from a seat, and who comes waits for
        it. Never longer than a newcomer may wait, for this step and the one before it, or than somebody has tokens to
        come."""
        longest = max(seq.limit - seq.least_computed - 1 for seq in scheduler.running)
        patience = QUIET_ROUND_TRIP if since_arrival > QUIET else ROUND_TRIP
        wanted = min(2.0 + 2.0 * self._host_seconds / self._step_seconds, patience / AHEAD / self._step_seconds)
        return max(1, min(MOST_REPEATS, int(wanted), longest))

    def submit(self, step: Step) -> None:
        if step.repeated:
            flight = self._repeat(step)
        else:
            flight = Flight(step, self.graphs.captures, self._builder.of_step(step))
            with dropped_without_memory(step):
                self._go_on(flight, first=not self._flight or flight.known)
            self._attended.submitted(step, self._clock())
        if self._flight:
            flight.alone = self._flight[-1].alone = False
        self._flight.append(flight)

    def _repeat(self, step: Step) -> Flight:
        flight, launch = Flight(step, self.graphs.captures), self.graphs.decode.launch
        use, levels = Use.DECODE, None
        if step.drafted_rows:
            among = self._chances.among(group.seq.scope for group in step.groups)
            use, levels = Use.LOOKUP, among.levels()
        flight.started = True
        reading = self._memory.attempt(use, lambda: launch(step, levels), final=not step.drafted_rows)
        if reading is None:  # positions for its repeats are reserved: it can only be planned anew
            self._refuse(_plan(step))
            raise StepDropped(step, too_large=False)
        flight.reading, flight.began = reading, reading.began
        return flight

    def _refuse(self, plan: DraftPlan) -> None:
        """There is no memory for a repeated step with such drafts: none that takes as much is run again."""
        if plan.rows:
            self._memory.warn(Use.LOOKUP)
            self._draft_rows.refuse(plan)
            self.graphs.decode.release_like(plan)

    @property
    def oldest(self) -> Step | None:
        return self._flight[0].step if self._flight else None

    @property
    def stale(self) -> bool:
        # Not before it was launched: moves and copies of others travel with it.
        return bool(self._flight) and self._flight[0].started and over(self._flight[0].step)

    def settle(self) -> Settled:
        if self.stale:
            ended = self._flight.popleft()
            self._ended = ended.ended
            return nothing(ended.step)
        flight = self._flight[0]
        step = flight.step
        self._finish(flight)
        self._flight.popleft()
        started, repeats = self._clock(), None
        if flight.reading is not None:
            sampled = self._read(flight.reading)
            self._read_last = step if step.repeated and self._flight else None
            self._attended.read(step, self._clock(), alone=not self._flight)
            ran = self._clock()
            decisions = self._decider.decide_sampled(step, sampled)
            if isinstance(flight.reading, RepeatedInFlight):
                repeats = self._learn(step, flight.reading, sampled, decisions)
        else:
            assert flight.logits is not None
            self._read_at = self._read_last = None
            self._attended.read(step, self._clock(), alone=not self._flight)
            ran = self._clock()
            self.graphs.seats.forget(step.groups)
            decisions = self._decider.decide(step, flight.logits)
        self._note_gap(flight)
        forward_s, by_itself = flight.launch_s + ran - started, flight.alone
        device_s = None
        if flight.captures != self.graphs.captures:
            by_itself = False  # what captures and compiles on the way says nothing of the next step like it
        elif not step.repeated:
            device_s = flight.device_seconds
        if flight.known and device_s is not None:  # whatever else was in flight
            forward_s, by_itself = flight.launch_s + device_s, True
            if not self._measured and not step.prompt_rows:
                self._step_seconds = device_s
        return Settled(step, decisions, forward_s, self._clock() - ran, by_itself, device_s, repeats)

    def _note_gap(self, flight: Flight) -> None:
        """Where somebody in a step has tokens already, it could have begun when the one before it ended."""
        before, self._ended = self._ended, flight.ended
        if (before is not None and flight.began is not None and flight.began.passed
                and any(group.seq.output_len for group in flight.step.groups)):
            self.host_gaps.note(flight.kind, before.until(flight.began))

    def _learn(self, step: Step, reading: RepeatedInFlight, sampled: Seq[Sampled],
               decisions: Seq[Decision]) -> RepeatTimes:
        """What a repeated step took and yielded, each time."""
        self._step_seconds, self._measured = reading.seconds, True
        # As many tokens as all would have got that had some to come: what ends on the way says nothing of drafts.
        told = [one for one in sampled if one.tokens]
        for group, decision in zip(step.groups, decisions):
            # What comes behind the end of a text says nothing of it.
            rounds = decision.rounds if decision.finish is None else decision.rounds[:-1]
            if rounds:
                self._chances.of(group.seq.scope).learn(rounds)
        each = [len(one.tokens) / (len(one.rounds) or len(one.tokens)) for one in told]
        count, sources = len(step.groups), self._sources(step)
        if told:
            self._draft_rows.learn(count, _plan(step), sum(each) / len(each), reading.seconds, sources,
                                   step.repeat)
        return RepeatTimes(reading.seconds, self._draft_rows.plain(count))

    def _sources(self, step: Step) -> Sources:
        """Of drafts for those of a repeated step, whether or not there were some."""
        return self.graphs.decode.sources([group.seq for group in step.groups])

    def advance(self) -> None:
        if self._flight and not over(self._flight[0].step):
            self._finish(self._flight[0])

    def forget(self) -> None:
        self._flight.clear()
        self._read_at = self._ended = self._read_last = None
        self._attended.forget()

    def _finish(self, flight: Flight) -> None:
        """All steps before it are committed."""
        if not flight.launched:
            with dropped_without_memory(flight.step):
                self._go_on(flight, first=True)

    def _go_on(self, flight: Flight, first: bool) -> None:
        """Launch as much of a step as can be. `first`: all steps before it are committed, so everything can."""
        started = self._clock()
        if not flight.started and (first or flight.ahead):
            self._start(flight, first)
        if flight.buffer is not None and (first or flight.free):
            self._sample(flight, first)
        flight.launch_s += self._clock() - started

    @torch.inference_mode()
    def _start(self, flight: Flight, first: bool) -> None:
        """The forward. Until the steps before it are committed only a captured one can be launched."""
        step, batch = flight.step, flight.batch
        assert batch is not None
        if first:
            batch.fill_pending(step.groups)
        graphs, use = (self.graphs.verify, Use.VERIFY) if flight.drafted else (self.graphs.prefill, Use.PREFILL)
        ready, taps = None, step.taps
        if not taps and graphs.takes(step.groups, batch.rows):
            ready = self._memory.attempt(use, lambda: graphs.ready(batch), final=first)
        if ready is None and not first:
            return
        # Once its moves have started a lack of memory drops the step: they must not be carried out twice.
        flight.started = True
        self._runner.storage.apply(batch.moves, batch.copies)
        if ready is None:
            flight.began = Moment(self.graphs.device)
            flight.logits = self._runner.forward(batch, taps)
            flight.left = Moment(self.graphs.device)
            return
        if flight.drafted:
            flight.buffer = self.graphs.verify.launch(ready, batch, step.groups if flight.decided else ())
        else:
            flight.buffer = self.graphs.prefill.launch(ready, batch)
        flight.began = flight.buffer.began

    @torch.inference_mode()
    def _sample(self, flight: Flight, first: bool) -> None:
        """On the device, while the forward runs; or leave the logits to the host, where a grammar failed or there is no
        memory. A step that is not the first may find memory later."""
        step, batch, buffer = flight.step, flight.batch, flight.buffer
        assert batch is not None and buffer is not None
        after = AfterSampling.NOTED
        if flight.drafted:
            trees = any(group.parents is not None for group in step.groups)
            after = AfterSampling.TREES if trees else AfterSampling.CHAINS
        masks: Seq[Mask | None] | None = None
        if flight.decided:
            masks = () if flight.free else row_masks(step.groups)
        graph = None
        if masks is not None:
            seats, samples = self.graphs.seats, self.graphs.samples
            graph = self._memory.attempt(
                Use.VERIFY if flight.drafted else Use.PREFILL,
                lambda: samples.ready(buffer, seats.seat_all(sampling(step.groups), masks), after), final=first)
        if graph is not None:
            graph.replay()
            if flight.drafted:
                flight.reading = VerdictsInFlight(graph.out, step.groups, buffer.rows)
            else:
                count = max(1, len(batch.wanted))
                flight.reading = TokensInFlight([part[:count] for part in graph.out], batch.first)
            flight.buffer = None
        elif first:
            flight.logits = StepLogits(buffer.logits[:len(batch.wanted)], batch.first, {})
            flight.left = Moment(self.graphs.device)
            flight.buffer = None

    def _read(self, reading: InFlight) -> list[Sampled]:
        asked = time.perf_counter()
        if self._read_at is not None:
            host_seconds = min(asked - self._read_at, ROUND_TRIP)
            self._host_seconds = max(host_seconds, FORGETTING * self._host_seconds)
            if self._read_last is not None:
                step = self._read_last
                self._draft_rows.learn_host(len(step.groups), _plan(step), host_seconds / step.repeat,
                                            self._sources(step))
        sampled = reading.read()
        self._read_at = time.perf_counter() if self._flight else None
        return sampled


def _plan(step: Step) -> DraftPlan:
    """What a repeated step was planned as."""
    return DraftPlan(step.drafted_rows, step.heads)
