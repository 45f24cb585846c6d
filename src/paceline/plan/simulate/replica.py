"""Replica: one engine without a model. Its scheduler and its cache are the real ones; time passes as steps would take.

Between two events that concern a replica (somebody arrives, a text ends, a prompt is computed, blocks run out) its
decode steps are all alike. Such a run of steps is planned once, at its end, when it is known how many there were: the
scheduler repeats a step, as it does for a card that runs several by itself. So a simulation costs by requests, not by
tokens."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property

from paceline.cache.handover import Piece
from paceline.cache.manager import CacheManager
from paceline.config import EngineConfig
from paceline.engine.schedule.limits import SchedulerLimits
from paceline.engine.schedule.pace import decodes, load_of
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import Placement, Sequence, Status
from paceline.engine.schedule.step import GroupResult, Repeat, RowGroup, Step
from paceline.errors import QueueFullError
from paceline.kernels.groups import CacheGroup
from paceline.plan.simulate.costs import PLAIN, TOKEN, Costs, Draft, Part, Speculation
from paceline.plan.simulate.host import Work
from paceline.plan.simulate.traffic import Asked
from paceline.request import Request, SamplingParams, Tenant, scope_of
from paceline.speculation.step_cost import Load, StepCost
from paceline.speculation.tree import DraftTree

FINISHED = Status.FINISHED
GROUP = CacheGroup("all", (0,), 1, 1)
"""The cache's one group: a block stands for all that the model keeps of its tokens."""
SEEN = 8
"""Steps of a run that an engine learns from: those after them tell it nothing new."""


@dataclass(slots=True)
class Job:
    """A request on its way through the fleet."""

    asked: Asked
    text: list[int]
    """Prompt and output."""
    number: int
    first: float | None = None
    """When its first token came."""
    end: float | None = None
    cached: int = 0
    """Prompt tokens that the cache had."""
    preemptions: int = 0
    credit: int = 0
    """Progress below a token, by drafts."""
    decodes_at: str | None = None
    """The replica that takes over what another has computed of its prompt; None: one does it all."""
    said: int = 0
    """Tokens of its output that it has."""
    refused: bool = False
    """Every queue was full."""


@dataclass(slots=True)
class Run:
    """Steps that are all alike: up to `times` of them."""

    times: int
    batch: int
    context: float
    draft: Draft
    first: float
    """Seconds of the first of them, drafting not counted."""


@dataclass
class Replica:
    name: str
    config: EngineConfig
    costs: Costs
    speculation: Speculation | None
    clock: Callable[[], float]
    known: StepCost
    """What its engine knows of steps when it starts."""
    prefills: bool = False
    """It computes prompts alone, for others."""
    jumps: bool = True
    """Steps that are alike are taken at once; else one by one."""
    learns: bool = False
    """Steps may take longer than it knows: others use its machine."""
    busy: float = 0.0
    """Seconds, by the clock, from 0 on."""
    steps: int = 0
    live: int = 0
    """Requests that are here."""
    pending: dict[int, int] = field(default_factory=dict)
    """Prompt tokens of those that have no token yet, by priority."""

    def __post_init__(self) -> None:
        self._jobs: dict[Sequence, Job] = {}
        self._step: tuple[Step, float, Draft] | None = None
        self._run: Run | None = None
        self._since = 0.0

    @cached_property
    def cache(self) -> CacheManager:
        config = self.config
        return CacheManager([GROUP], [config.kv_blocks + 1], config.block_size, config.max_num_seqs,
                            -(-config.max_model_len // config.block_size), config.enable_prefix_caching)

    @cached_property
    def scheduler(self) -> Scheduler:
        """Made for the first request: a replica that has nothing to do costs nothing."""
        config = self.config
        limits = SchedulerLimits(config.max_batch_tokens, config.max_num_seqs, config.max_model_len, config.watermark,
                                 max_queue=config.max_queue, max_chunk=config.max_prefill_chunk,
                                 max_step_s=None if config.max_step_ms is None else 1e-3 * config.max_step_ms)
        return Scheduler(limits, self.cache, self.clock, cost=deepcopy(self.known) if self.learns else self.known)

    @property
    def used(self) -> bool:
        """Whether it ever had a request."""
        return "scheduler" in self.__dict__

    @property
    def at_work(self) -> bool:
        return self._step is not None or self._run is not None

    def arrive(self, job: Job) -> bool:
        """It queues here; False: the queue is full."""
        asked = job.asked
        most = 1 if self.prefills else asked.output_tokens
        request = Request(f"{job.number}", job.text[:asked.prompt_tokens], _params(asked.priority), 0, most,
                          self.clock(), tenant=Tenant(asked.tenant))
        try:
            seq = self.scheduler.add(request, [0])[0]
        except QueueFullError:
            return False
        seq.placement = Placement.FREE
        self._jobs[seq] = job
        self.live += 1
        self._wait(asked.priority, asked.prompt_tokens)
        return True

    def held(self, job: Job) -> int:
        """Blocks of its prompt that are here."""
        return self.cache.handover.held(job.text[:job.asked.prompt_tokens], _scope(job)) if self.used else 0

    def receive(self, job: Job, first: int) -> None:
        """Take over the blocks of its prompt from `first` on, as far as there is room."""
        tokens = job.text[:job.asked.prompt_tokens]
        pieces = [Piece(0, place) for place in range(first, handed_over(job, self.config.block_size))]
        if pieces and self.config.enable_prefix_caching:
            intake, _ = self.cache.begin_intake(tokens, _scope(job), pieces)
            self.cache.handover.end(intake, arrived=True)

    def begin(self) -> Work | None:
        """Start what comes next. None: there is nothing."""
        self._since = self.clock()
        if not self.scheduler.has_work():
            return None
        self._run = self._alike()
        if self._run is not None:
            return self._work(self._run)
        draft = self._draft(sum(seq.computed >= seq.prompt_len for seq in self.scheduler.running))
        for seq in self.scheduler.running:
            left = seq.limit - len(seq.tokens)
            if draft.k and left > 1 and self._caught_up(seq):
                seq.draft = DraftTree.chain([0] * min(draft.k, left - 1))
        step = self.scheduler.schedule()
        if step is None:
            raise RuntimeError(f"{self.name} has work and can do none of it")
        for seq in self.scheduler.running if draft.k else ():
            seq.draft = None  # of those for whom there was no room
        work = self._step_work(step, draft)
        self._step = (step, work.seconds, draft)
        return work

    def disturb(self, done: float) -> Work | None:
        """Somebody arrived, when so many seconds were over. Where that changes anything, what goes on is over with the
        step that is under way; None: as it was."""
        run = self._run
        if run is None or self.scheduler.can_repeat():
            return None
        run.times = self._under_way(run, done)
        return self._work(run)

    def finish(self) -> tuple[list[Job], list[Job]]:
        """What was begun is over: whose first token this was, and who has ended."""
        now = self.clock()
        self.busy += max(0.0, now) - max(0.0, self._since)
        if self._run is not None:
            run, self._run = self._run, None
            if self.learns:
                rows = run.batch * (run.draft.k + 1)
                self._learn(Load(rows, rows * run.context), self._seconds(run, run.times),
                            run.draft.seconds * run.times, run.times)
            return [], self._ended(self._repeat(run), now)
        assert self._step is not None
        (step, seconds, draft), self._step = self._step, None
        self.steps += 1
        results = [self._result(group, draft) for group in step.groups]
        self.scheduler.commit(step, results)
        if self.learns:
            self._learn(load_of(step), seconds, draft.seconds if any(group.draft for group in step.groups) else 0.0)
        firsts = []
        for group, result in zip(step.groups, results):
            job, seq = self._jobs[group.seq], group.seq
            if result.tokens and seq.output_len == len(result.tokens):
                if not self.prefills:
                    job.first = now
                if self.prefills or job.decodes_at is None:
                    job.cached = seq.cached_tokens
                self._wait(job.asked.priority, -job.asked.prompt_tokens)
                firsts.append(job)
        return firsts, self._ended(step.groups, now)

    def _learn(self, load: Load, seconds: float, drafting: float, times: int = 1) -> None:
        """What such steps took by the clock, drafting not counted."""
        took = (self.clock() - self._since) * (1.0 - drafting / seconds) if seconds > 0.0 else 0.0
        for _ in range(min(times, SEEN)):
            self.scheduler.pace.cost.observe(load, took / times)

    def _alike(self) -> Run | None:
        """The steps that come next, where they are all alike and nobody who waits could be let in meanwhile."""
        scheduler = self.scheduler
        running = scheduler.running
        if (not self.jumps or not scheduler.can_repeat() or len(running) > self.config.max_batch_tokens
                or len(scheduler.due()) < len(running)):
            return None
        draft = self._draft(len(running))
        if draft.k and len(running) * (draft.k + 1) > scheduler.pace.decoding_rows(self.config.max_batch_tokens, True):
            return None  # there is no room for all drafts
        times = min(self._steps_left(seq, draft) for seq in running)
        times = self._affordable(running, times, draft.most)
        if times < 1:
            return None
        context = sum(seq.computed for seq in running) / len(running)
        return Run(times, len(running), context, draft, self.costs.seconds(len(running), draft.k + 1, context))

    def _steps_left(self, seq: Sequence, draft: Draft) -> int:
        """Until its text ends."""
        missing = (seq.limit - len(seq.tokens)) * TOKEN - self._jobs[seq].credit
        return -(-missing // draft.gain)

    def _affordable(self, running: list[Sequence], times: int, most: int) -> int:
        """So many steps at most find blocks for everybody; at the next one somebody has to give way."""
        needed, free = self.cache.needed, self.cache.pools[0].free
        if len(running) * (times * most // self.cache.block_size + 1) <= free:
            return times

        def fits(steps: int) -> bool:
            return sum(needed(seq.allocation, 0, min(seq.computed + steps * most, seq.limit - 1))
                       for seq in running) <= free

        if fits(times):
            return times
        low, high = 0, times
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _repeat(self, run: Run) -> list[RowGroup]:
        """Have the scheduler take the steps of a run, whose number is known by now."""
        scheduler, draft = self.scheduler, run.draft
        groups: list[RowGroup] = []
        left = run.times
        for seq in scheduler.running:
            seq.lookup = draft.k > 0
        while left:
            step = scheduler.schedule(Repeat(left, run.batch * (draft.k + 1) if draft.k else 0, draft.most - 1))
            if step is None or not step.repeat:
                raise RuntimeError(f"{self.name} cannot repeat the step that it planned")
            gain = draft.gain if step.drafted_rows else TOKEN
            results = [GroupResult(self._next(group.seq, self._progress(group.seq, step.repeat * gain)))
                       for group in step.groups]
            scheduler.commit(step, results)
            groups, left = step.groups, left - step.repeat
            self.steps += step.repeat
        return groups

    def _result(self, group: RowGroup, draft: Draft) -> GroupResult:
        """Of a step that ran once."""
        if not group.sampled_rows:
            return GroupResult([])
        if group.draft is None:
            return GroupResult(self._next(group.seq, 1))
        count = min(self._progress(group.seq, draft.gain), 1 + len(group.draft))
        return GroupResult(self._next(group.seq, count), path=range(1, count))

    def _progress(self, seq: Sequence, gain: int) -> int:
        """Whole tokens; what is left of one counts with the next."""
        job = self._jobs[seq]
        tokens, job.credit = divmod(job.credit + gain, TOKEN)
        return tokens

    def _next(self, seq: Sequence, count: int) -> list[int]:
        at = len(seq.tokens)
        return self._jobs[seq].text[at:min(at + count, seq.limit)]

    def _ended(self, groups: list[RowGroup], now: float) -> list[Job]:
        found = []
        for group in groups:
            seq = group.seq
            if seq.status is FINISHED:
                job = self._jobs.pop(seq)
                job.end, job.said = now, seq.output_len
                job.preemptions += seq.preemptions
                self.live -= 1
                found.append(job)
        return found

    def _draft(self, batch: int) -> Draft:
        return PLAIN if self.speculation is None or not batch or self.prefills else self.speculation.draft(batch)

    def _caught_up(self, seq: Sequence) -> bool:
        return seq.computed >= seq.prompt_len and seq.computed == len(seq.tokens) - 1

    def _seconds(self, run: Run, times: int) -> float:
        """Of so many steps of a run: contexts grow evenly, and what steps take with them."""
        grown = (times - 1) * run.draft.gain / TOKEN
        last = self.costs.seconds(run.batch, run.draft.k + 1, run.context + grown) if grown else run.first
        return times * ((run.first + last) / 2 + run.draft.seconds)

    def _under_way(self, run: Run, done: float) -> int:
        """Which of a run's steps that is. Later steps take no less than earlier ones: it is not beyond the one that it
        would be if all took as long as the first, nor before the one that it would be if all took as long as each does
        on average."""
        whole = self._seconds(run, run.times)
        if done >= whole:
            return run.times
        high = min(int(done / (run.first + run.draft.seconds)) + 2, run.times)
        low = max(0, min(int(done * run.times / whole), high) - 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._seconds(run, middle) >= done else (middle, high)
        return high

    def _work(self, run: Run) -> Work:
        seconds = self._seconds(run, run.times)
        if not self.learns:
            return Work(seconds)
        middle = run.context + (run.times - 1) * run.draft.gain / TOKEN / 2
        return Work(seconds, run.times * self.costs.read_bytes(run.batch, run.draft.k + 1, middle),
                    run.times * run.batch * run.draft.gain / TOKEN)

    def _step_work(self, step: Step, draft: Draft) -> Work:
        batch, drafted, context, prompts, tokens = 0, 0, 0, [], 0.0
        for group in step.groups:
            if decodes(group):
                batch, context = batch + 1, context + group.start
                if group.draft is not None or group.seq.limit - len(group.seq.tokens) == 1:
                    drafted += draft.k > 0  # also where the text leaves no room for as many
                continue
            prompts.append(Part(len(group.tokens), group.start))
            tokens += group.sampled_rows > 0
        rows = 1 + -(-drafted * draft.k // max(1, batch))  # where there is no room for all drafts, on average
        drafting = draft.seconds if drafted else 0.0
        held = (batch, rows, context / max(1, batch), prompts)
        return Work(self.costs.seconds(*held) + drafting, self.costs.read_bytes(*held) if self.learns else 0.0,
                    0.0 if self.prefills else tokens + batch + drafted * (draft.gain / TOKEN - 1))

    def _wait(self, priority: int, tokens: int) -> None:
        left = self.pending.get(priority, 0) + tokens
        self.pending[priority] = left
        if not left:
            del self.pending[priority]


def handed_over(job: Job, block_size: int) -> int:
    """Blocks of a prompt that can be: the last token is computed by who decodes."""
    return (job.asked.prompt_tokens - 1) // block_size


def _scope(job: Job) -> str:
    return scope_of(Tenant(job.asked.tenant), "")


@cache
def _params(priority: int) -> SamplingParams:
    return SamplingParams(priority=priority)
