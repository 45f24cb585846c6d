"""Front: which replica a request goes to, by the real router's policies."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from paceline.cache.prefix import chain
from paceline.cluster.routing import (
    HANDED_OVER,
    POLICIES,
    SEQUENCE_TOKENS,
    Candidate,
    Features,
    Policy,
    PrefixAware,
    Random,
)
from paceline.errors import ConfigError
from paceline.plan.simulate.replica import Job, Replica
from paceline.request import Tenant, scope_of

PUBLISHED_S = 1.0
"""So often a replica says how busy it is."""
LISTED = 16
"""Of larger fleets the policy is shown so many: who holds most of a beginning, and who is least busy."""
HOLDERS = 4
"""Replicas that are remembered of those that were sent a block."""
REMEMBERED = 1 << 20
"""Blocks of which that is remembered."""


class Front:
    """Sends requests to one group of replicas."""

    def __init__(self, routing: str, replicas: Sequence[Replica], clock: Callable[[], float], seed: int = 0,
                 handed_over: bool = False) -> None:
        """`handed_over`: the replicas do not compute prompts, they are brought them."""
        self.replicas = {replica.name: replica for replica in replicas}
        self._clock = clock
        self._prompt_cost = HANDED_OVER if handed_over else 1.0
        self._policy = _policy(routing, clock, seed, self._prompt_cost)
        self._said = {name: self._state(replica) for name, replica in self.replicas.items()}
        self._heard = dict.fromkeys(self.replicas, -math.inf)
        self._places = {name: place for place, name in enumerate(self.replicas)}
        self._names = list(self.replicas)
        self._load = np.zeros(len(self._names))
        self._sent: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        """Where the last few requests with a block went."""
        self._orders: dict[int, tuple[Features, str, float]] = {}

    def send(self, job: Job, full: AbstractSet[str] = frozenset()) -> Replica | None:
        """The replica that it goes to, which is none of those that are full; None: there is no other."""
        asked = job.asked
        digests = chain(job.text[:asked.prompt_tokens], scope_of(Tenant(asked.tenant), ""), self._block_size)
        order = Features(asked.prompt_tokens, tuple(digests), self._block_size, priority=asked.priority,
                         avoid=full)
        names = self._listed(order)
        name = self._policy.choose(order, [self._candidate(name) for name in names])
        if name is None or name in full:
            return None
        self._policy.begun(order, name)
        order.progress.replica = name
        load = self._prompt_cost * asked.prompt_tokens + SEQUENCE_TOKENS
        self._load[self._places[name]] += load
        self._orders[job.number] = (order, name, load)
        if self._large:
            self._remember(order, name)
        return self.replicas[name]

    def answered(self, job: Job) -> None:
        """Its first token came."""
        order, name, load = self._orders[job.number]
        order.progress.answered = True
        self._load[self._places[name]] -= load - SEQUENCE_TOKENS
        self._orders[job.number] = (order, name, SEQUENCE_TOKENS)

    def ended(self, job: Job) -> None:
        order, name, load = self._orders.pop(job.number)
        order.progress.over = True
        self._load[self._places[name]] -= load
        self._policy.ended(order, name)

    @property
    def _block_size(self) -> int:
        return self.replicas[self._names[0]].config.block_size

    @property
    def _large(self) -> bool:
        return len(self._names) > 2 * LISTED and isinstance(self._policy, PrefixAware)

    def _listed(self, order: Features) -> Sequence[str]:
        """Those whom the policy chooses among. A thousand of them for every request would take longer than all the
        rest."""
        if not self._large:
            return self._names
        found = dict.fromkeys(self._names[place] for place in np.argpartition(self._load, LISTED)[:LISTED])
        deepest = next((self._sent[digest] for digest in reversed(order.digests) if digest in self._sent), ())
        first = self._sent.get(order.digests[0], ()) if order.digests else ()
        return [*(found | dict.fromkeys(deepest) | dict.fromkeys(first))]

    def _remember(self, order: Features, name: str) -> None:
        for digest in order.digests:
            others = self._sent.pop(digest, ())
            self._sent[digest] = others if others[:1] == (name,) else (
                name, *(other for other in others if other != name))[:HOLDERS]
        while len(self._sent) > REMEMBERED:
            self._sent.popitem(last=False)

    def _candidate(self, name: str) -> Candidate:
        """As it last described itself."""
        tick = math.floor(self._clock() / PUBLISHED_S)
        if tick > self._heard[name]:
            self._heard[name] = tick
            self._said[name] = self._state(self.replicas[name])
        return self._said[name]

    def _state(self, replica: Replica) -> Candidate:
        if not replica.used:
            return Candidate(replica.name)
        return Candidate(replica.name, replica.cache.prefix.known, len(replica.scheduler.running),
                         dict(replica.pending))


def _policy(routing: str, clock: Callable[[], float], seed: int, prompt_cost: float) -> Policy:
    if routing not in POLICIES:
        raise ConfigError(f"--routing must be one of {', '.join(POLICIES)}, got {routing!r}.")
    if routing == "prefix":
        return PrefixAware(clock, prompt_cost=prompt_cost)
    return Random(seed) if routing == "random" else POLICIES[routing]()
