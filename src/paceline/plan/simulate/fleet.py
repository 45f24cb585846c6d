"""simulate(): a trace through a fleet of replicas, by a virtual clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.garbage import only_new_objects_are_collected
from paceline.plan.simulate.costs import Costs, Speculation
from paceline.plan.simulate.front import Front
from paceline.plan.simulate.replica import Job, Replica
from paceline.plan.simulate.traffic import Asked, Texts

MOST_REPLICAS = 10_000


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A fleet: so many replicas that do everything, or some that compute prompts and others that go on."""

    replicas: int = 0
    prefill: int = 0
    decode: int = 0
    routing: str = "prefix"

    def __post_init__(self) -> None:
        for name in ("replicas", "prefill", "decode"):
            if not 0 <= getattr(self, name) <= MOST_REPLICAS:
                raise ConfigError(f"{name} must be from 0 to {MOST_REPLICAS}, got {getattr(self, name)}.")
        if (self.prefill > 0) != (self.decode > 0):
            raise ConfigError("--prefill-replicas and --decode-replicas go together: give both.")
        if bool(self.replicas) == bool(self.prefill):
            raise ConfigError("A fleet has replicas that do everything, or such that prefill and such that decode.")

    @property
    def size(self) -> int:
        return self.replicas + self.prefill + self.decode

    @property
    def name(self) -> str:
        kind = f"{self.replicas}" if self.replicas else f"{self.prefill} prefill + {self.decode} decode"
        return f"{kind}, {self.routing}"


@dataclass(frozen=True)
class Engine:
    """What every replica of a fleet is."""

    config: EngineConfig
    costs: Costs
    speculation: Speculation | None = None
    token_bytes: float = 0.0
    """Of a token's KV, which goes from a replica that prefills to one that decodes."""
    link: float = 12.5e9
    """Bytes a second between two replicas."""
    cores: int | None = None
    """Replicas share a machine in which so many compute at a time; None: each has its own."""


@dataclass(frozen=True)
class Done:
    """What became of a trace."""

    layout: Layout
    jobs: list[Job]
    elapsed: float
    """From the first arrival to the last end, in seconds."""
    busy: float
    """Share of that time in which replicas were at work, on average."""
    steps: int


def check(trace: Sequence[Asked], config: EngineConfig) -> None:
    """Every request has to fit into an empty replica."""
    room = config.kv_blocks * config.block_size
    most = min(config.max_model_len, room + 1)
    for place, one in enumerate(trace, 1):
        if one.prompt_tokens + one.output_tokens > most:
            which = f"Line {one.line} of the trace" if one.line else f"Request {place}"
            raise ConfigError(
                f"{which} has {one.prompt_tokens} + {one.output_tokens} tokens, and "
                + (f"a replica's cache holds {room}: use more memory, fewer bits or --kv-blocks."
                   if room <= config.max_model_len else
                   f"the context holds {most}: shorten it, or choose a model for longer texts."))


def simulate(trace: Sequence[Asked], engine: Engine, layout: Layout, *, jumps: bool = True, seed: int = 0) -> Done:
    """`trace` by time of arrival, the first that counts at 0. `jumps`: steps that are alike are taken at once."""
    check(trace, engine.config)
    with only_new_objects_are_collected():
        return _Fleet(engine, layout, jumps, seed).run(trace)


class _Fleet:
    """Two clocks: `now` by which requests arrive, and `work`, which is slower while more replicas are at work than
    there are cores. Steps end by the second."""

    def __init__(self, engine: Engine, layout: Layout, jumps: bool, seed: int) -> None:
        self.now = self.work = -math.inf
        self._engine, self._layout = engine, layout

        def replicas(names: str, number: int, prefills: bool = False) -> list[Replica]:
            return [Replica(f"{names}{place:05d}", engine.config, engine.costs, engine.speculation, self.clock,
                            prefills, jumps) for place in range(number)]

        first = replicas("p", layout.prefill, prefills=True) if layout.prefill else replicas("r", layout.replicas)
        self._front = Front(layout.routing, first, self.clock, seed)
        self._replicas = [*first, *replicas("d", layout.decode)]
        self._behind = Front(layout.routing, self._replicas[len(first):], self.clock, seed) if layout.decode else None
        self._ends: list[tuple[float, int, Replica]] = []
        """When replicas are done with what they do, by work; those that were disturbed stand here twice."""
        self._due: dict[str, int] = {}
        """By replica: which of its entries counts."""
        self._idle: dict[str, Replica] = {}
        """Those that have just become free, or have just been sent something."""
        self._numbers = count()
        self._sent: list[tuple[float, int, Job]] = []
        """Jobs on their way from prefill to decode, by when they arrive."""

    def clock(self) -> float:
        return self.now

    def run(self, trace: Sequence[Asked]) -> Done:
        texts, coming = Texts(trace), 0
        jobs: list[Job] = []
        while coming < len(trace) or self._sent or self._due or self._idle:
            self._forget()
            arrival = trace[coming].at if coming < len(trace) else float("inf")
            moved = self._sent[0][0] if self._sent else float("inf")
            ends = self._when(self._ends[0][0]) if self._ends else float("inf")
            if self._idle and min(arrival, moved, ends) > self.now:
                self._begin()
            elif ends <= min(arrival, moved):
                self._end(ends)
            elif moved <= arrival:
                self._advance(moved)
                job = heapq.heappop(self._sent)[2]
                assert self._behind is not None
                self._arrive(job, self._behind)
            else:
                self._advance(arrival)
                asked = trace[coming]
                job = Job(asked, texts.tokens(asked, coming), coming, credit=_phase(coming))
                jobs += [job] if asked.at >= 0.0 else []
                coming += 1
                self._arrive(job, self._front)
        elapsed = max(0.0, self.now)
        busy = sum(one.busy for one in self._replicas) / (elapsed * len(self._replicas)) if elapsed else 0.0
        return Done(self._layout, jobs, elapsed, busy, sum(one.steps for one in self._replicas))

    def _arrive(self, job: Job, front: Front) -> None:
        replica = front.send(job)
        replica.arrive(job)
        if job.moved:
            front.answered(job)  # nobody waits for its prompt
        if not replica.at_work:
            self._idle[replica.name] = replica
        elif (end := replica.disturb(self.work)) is not None:
            self._expect(replica, end)

    def _end(self, when: float) -> None:
        work, _, replica = heapq.heappop(self._ends)
        self._advance(when, work)
        del self._due[replica.name]
        firsts, ended = replica.finish()
        front = self._behind if self._behind is not None and not replica.prefills else self._front
        for job in firsts:
            front.answered(job)
        for job in ended:
            front.ended(job)
            if replica.prefills and job.said < job.asked.output_tokens:
                self._move(job)
            else:
                job.text = []  # a day of them does not fit into memory
        self._idle[replica.name] = replica

    def _move(self, job: Job) -> None:
        """Its prompt is computed; its KV goes to who decodes."""
        job.end, job.brought, job.moved = None, job.asked.prompt_tokens, True
        taken = job.asked.prompt_tokens * self._engine.token_bytes / self._engine.link
        heapq.heappush(self._sent, (self.now + taken, job.number, job))

    def _begin(self) -> None:
        """Everything that happens now has happened: those who are free go on."""
        free, self._idle = self._idle, {}
        for replica in free.values():
            end = replica.begin(self.work)
            if end is not None:
                self._expect(replica, end)

    def _expect(self, replica: Replica, end: float) -> None:
        number = self._due[replica.name] = next(self._numbers)
        heapq.heappush(self._ends, (end, number, replica))

    def _forget(self) -> None:
        while self._ends and self._due.get(self._ends[0][2].name) != self._ends[0][1]:
            heapq.heappop(self._ends)

    @property
    def _speed(self) -> float:
        cores = self._engine.cores
        return 1.0 if cores is None or len(self._due) <= cores else cores / len(self._due)

    def _when(self, work: float) -> float:
        return work if self._engine.cores is None else self.now + max(0.0, work - self.work) / self._speed

    def _advance(self, now: float, work: float | None = None) -> None:
        if work is None:
            idle = self._engine.cores is None or not self._due
            work = now if idle else self.work + (now - self.now) * self._speed
        self.now, self.work = now, work


def _phase(number: int) -> int:
    """Progress that a request begins with, below a token: drafts of different requests do not succeed in step."""
    return (number * 2654435761) & ((1 << 20) - 1)
