"""simulate(): a trace through a fleet of replicas, by a virtual clock."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.garbage import only_new_objects_are_collected
from paceline.plan.simulate.costs import Costs, Speculation
from paceline.plan.simulate.front import Front
from paceline.plan.simulate.host import NO_FRONT, Apart, Ends, FrontCost, Host, Shared, Work
from paceline.plan.simulate.replica import Job, Replica, handed_over
from paceline.plan.simulate.traffic import Asked, Texts

MOST_REPLICAS = 10_000
FRONT = "front"
"""Its name, beside those of replicas."""


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
    host: Host | None = None
    """The machine that all replicas share, with their front; None: each has its own."""
    front: FrontCost = NO_FRONT
    """What fronts compute: told of fleets, and waited for where they share the host."""


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
    front: float = 0.0
    """Cores that fronts kept busy, on average."""


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
    context = sum(one.prompt_tokens + one.output_tokens / 2 for one in trace) / len(trace)
    with only_new_objects_are_collected():
        return _Fleet(engine, layout, jumps, seed, context).run(trace)


class _Fleet:
    def __init__(self, engine: Engine, layout: Layout, jumps: bool, seed: int, context: float) -> None:
        self.now = -math.inf
        self._engine, self._layout = engine, layout
        known, learns = engine.costs.known(context), engine.host is not None

        def replicas(names: str, number: int, prefills: bool = False) -> list[Replica]:
            return [Replica(f"{names}{place:05d}", engine.config, engine.costs, engine.speculation, self.clock, known,
                            prefills, jumps, learns) for place in range(number)]

        first = replicas("r", layout.replicas) + replicas("d", layout.decode)
        apart = replicas("p", layout.prefill, prefills=True)
        self._front = Front(layout.routing, first, self.clock, seed, handed_over=bool(apart))
        self._prefill = Front(layout.routing, apart, self.clock, seed) if apart else None
        self._replicas = {one.name: one for one in (*first, *apart)}
        self._ends: Ends = Apart() if engine.host is None else Shared(engine.host, engine.front.token)
        self._idle: dict[str, Replica] = {}
        """Those that have just become free, or have just been sent something."""
        self._read: deque[Job] = deque()
        """Requests that the front has not read yet; the first it reads now."""
        self._sent: list[tuple[float, int, Job, int]] = []
        """Jobs whose KV is on its way from prefill to decode, by when it arrives; and its first block."""
        self._links: dict[str, float] = {}
        """Until when a replica's link is taken."""

    def clock(self) -> float:
        return self.now

    def run(self, trace: Sequence[Asked]) -> Done:
        texts, coming = Texts(trace), 0
        jobs: list[Job] = []
        while coming < len(trace) or self._sent or self._ends or self._idle:
            arrival = trace[coming].at if coming < len(trace) else math.inf
            moved = self._sent[0][0] if self._sent else math.inf
            ends = self._ends.next()
            when = min(arrival, moved, ends)
            if self._idle and when > self.now:
                self._begin()
                continue
            self.now = when
            self._ends.advance(when)
            if ends <= when:
                self._end()
            elif moved <= when:
                _, _, job, first = heapq.heappop(self._sent)
                self._moved(job, first)
            else:
                asked = trace[coming]
                job = Job(asked, texts.tokens(asked, coming), coming, credit=_phase(coming))
                jobs += [job] if asked.at >= 0.0 else []
                coming += 1
                self._ask(job)
        return self._done(jobs)

    def _done(self, jobs: list[Job]) -> Done:
        elapsed, cost = max(0.0, self.now), self._engine.front
        told = sum(cost.request + cost.token * job.said for job in jobs)
        busy = sum(one.busy for one in self._replicas.values())
        return Done(self._layout, jobs, elapsed, busy / (elapsed * len(self._replicas)) if elapsed else 0.0,
                    sum(one.steps for one in self._replicas.values()), told / elapsed if elapsed else 0.0)

    def _ask(self, job: Job) -> None:
        """Where the front shares the machine it reads one request after the other, beside all that goes on."""
        if self._engine.host is None or not self._engine.front.request:
            self._arrive(job)
            return
        self._read.append(job)
        if len(self._read) == 1:
            self._read_next()

    def _read_next(self) -> None:
        if self._read:
            self._ends.begin(FRONT, Work(self._engine.front.request, threads=1))

    def _arrive(self, job: Job) -> None:
        """Somebody who prefills computes the prompt first, where who decodes lacks a block of it or more."""
        if self._prefill is None:
            self._send(job, self._front)
            return
        decodes = self._front.send(job)
        assert decodes is not None
        if decodes.held(job) < handed_over(job, self._engine.config.block_size):
            job.decodes_at = decodes.name
            if self._send(job, self._prefill):
                return
            job.decodes_at = None  # who decodes does it all
        self._seat(job, decodes)

    def _send(self, job: Job, front: Front) -> bool:
        """To a replica whose queue has room; False: none has."""
        full: set[str] = set()
        while (replica := front.send(job, full)) is not None:
            if self._take(job, replica):
                return True
            front.ended(job)
            full.add(replica.name)
        if front is self._front:
            self._refuse(job)
        return False

    def _seat(self, job: Job, replica: Replica) -> None:
        if not self._take(job, replica):
            self._front.ended(job)
            self._refuse(job)

    def _refuse(self, job: Job) -> None:
        job.refused, job.text = True, []

    def _take(self, job: Job, replica: Replica) -> bool:
        if not replica.arrive(job):
            return False
        if not replica.at_work:
            self._idle[replica.name] = replica
        elif (work := replica.disturb(self._ends.done(replica.name))) is not None:
            self._ends.begin(replica.name, work)
        return True

    def _end(self) -> None:
        name = self._ends.end()
        if name == FRONT:
            job = self._read.popleft()
            self._read_next()
            self._arrive(job)
            return
        replica = self._replicas[name]
        firsts, ended = replica.finish()
        front = self._prefill if self._prefill is not None and replica.prefills else self._front
        for job in firsts:
            front.answered(job)
        for job in ended:
            front.ended(job)
            if replica.prefills:
                self._move(job, replica)
            else:
                job.text = []  # a day of them does not fit into memory
        self._idle[replica.name] = replica

    def _move(self, job: Job, source: Replica) -> None:
        """Its prompt is computed. What who decodes lacks of it travels there, one text at a time on either's link."""
        assert job.decodes_at is not None
        size, target = self._engine.config.block_size, self._replicas[job.decodes_at]
        first = target.held(job)
        taken = max(0, handed_over(job, size) - first) * size * self._engine.token_bytes / self._engine.link
        begin = max(self.now, self._links.get(source.name, -math.inf), self._links.get(target.name, -math.inf))
        self._links[source.name] = self._links[target.name] = begin + taken
        heapq.heappush(self._sent, (begin + taken, job.number, job, first))

    def _moved(self, job: Job, first: int) -> None:
        assert job.decodes_at is not None
        target = self._replicas[job.decodes_at]
        target.receive(job, first)
        self._seat(job, target)

    def _begin(self) -> None:
        """Everything that happens now has happened: those who are free go on."""
        free, self._idle = self._idle, {}
        for replica in free.values():
            work = replica.begin()
            if work is not None:
                self._ends.begin(replica.name, work)


def _phase(number: int) -> int:
    """Progress that a request begins with, below a token: drafts of different requests do not succeed in step."""
    return (number * 2654435761) & ((1 << 20) - 1)
