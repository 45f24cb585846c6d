"""Sequence: one sample of a request, the unit the scheduler moves. No torch here."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from paceline.request import Request, scope_of

if TYPE_CHECKING:
    import torch

    from paceline.cache.allocation import Allocation
    from paceline.cache.swap import Swapped
    from paceline.engine.records.emitter import Emitter
    from paceline.engine.records.record import Record
    from paceline.sampling.state import SampleState
    from paceline.speculation.tree import DraftTree

UNSEATED: Allocation = cast("Allocation", None)
"""In place of what a sequence holds of the cache, while it does not run: whoever uses it fails at once."""
BEHIND_ALL = (1 << 31) + 1
"""The place of shadows among priorities: no client can choose one as low."""
PENDING = -1
"""Stands for a token that an uncommitted step is still sampling."""


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Placement(IntEnum):
    """Who samples a sequence's tokens, and how far a device may get meanwhile. Each allows what those above it do."""

    HOST = 0
    """The host, from the logits."""
    DEVICE = 1
    """A device, if there is one. The host reads each token before the next step is planned."""
    AHEAD = 2
    """The next step may be submitted before the host has read this one's token. Before it is sampled the host may have
    its word all the same, on what is masked."""
    UNMASKED = 3
    """Nor has the host a word before it is sampled; but each step's scores are to be read."""
    FREE = 4
    """Nothing about a token has to be known on the host before the next one is sampled: a device may run several steps
    by itself."""


@dataclass(slots=True)
class Branch:
    """What one of several sequences does next that are decided together (decide/beams.py): it goes on with `tokens`
    after the text of `source`, itself or a peer of the same length, whose blocks it then shares; or it ends. Without
    tokens or end it rests: it has no text until it follows a peer again."""

    seq: Sequence
    source: Sequence
    tokens: list[int]
    finish: str | None = None


class Reach(NamedTuple):
    """Of a repeated step in which a device drafts for a sequence."""

    times: int
    most: int
    """Positions that it may advance each time; one at least, before the end."""
    end: int
    """The first position that it must not write."""


class Search(Protocol):
    """Decides about several sequences together (decide/beams.py)."""

    def offer(self, seq: Sequence, logits: torch.Tensor) -> list[Branch]:
        """The logits [V] after a sequence's last token. Once those of all its peers have come: what each does next."""

    def end(self, reason: str, last: Seq[int] = ()) -> list[Branch]:
        """It is over; what is still offered is dropped."""


class Sequence:
    """Tokens known so far and how many of them are in the cache.

    `tokens` holds prompt + committed output. `computed` counts tokens whose KV is in the cache or will be once
    the steps in flight have run; a sequence is caught up when only its newest token is missing.
    """

    __slots__ = ("adapter", "admitted", "allocation", "cache_miss", "cached_tokens", "computed", "draft", "drifting",
                 "emitter", "epoch", "finish_reason", "in_flight", "in_flight_drafts", "last_step", "limit", "lookup",
                 "masking", "order", "parked", "placement", "preemptions", "prompt_len", "rank", "record", "request",
                 "rule", "said", "sample", "scope", "search", "seed", "siblings", "slow_masks", "state", "status",
                 "swapped", "taps", "tokens", "wait_for_commit")

    # Set by the engine when it admits the request; the scheduler looks at none of them.
    state: SampleState
    emitter: Emitter
    record: Record

    def __init__(self, request: Request, sample: int, seed: int, order: int = 0) -> None:
        self.request = request
        self.sample = sample
        self.seed = seed
        self.adapter = request.adapter
        """What its rows run with besides the model; None: nothing."""
        self.scope = request.scope if self.adapter is None else scope_of(
            request.tenant, request.params.cache_salt, self.adapter.revision)
        """What keeps its blocks and its text apart from those of others: the request's scope, and the adapter."""
        self.tokens: list[int] = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.said = 0
        """Output tokens that it came with, from another engine."""
        self.computed = 0
        self.in_flight = 0
        """Steps scheduled and not yet committed that hold rows of this sequence (0 or 1, 2 when ahead)."""
        self.in_flight_drafts = 0
        """How many of those carry a draft, or drift: how far they got is unknown until commit."""
        self.last_step = 0
        """The newest step that it took part in, as the scheduler counts them."""
        self.drifting: list[Reach] = []
        """How far each of those may get, oldest first, while one of them drifts."""
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.draft: DraftTree | None = None
        """To verify in the next step, set by the engine before schedule()."""
        self.rule = "coupled"
        """By which its drafts are verified (speculation.verify.RULES)."""
        self.allocation: Allocation = UNSEATED
        """What it holds of the cache, while it runs. A plain attribute: every row of every step asks for it."""
        self.swapped: Swapped | None = None
        """While it waits with its KV on the host."""
        self.epoch = 0
        """Counts preemptions: a step scheduled in an older epoch must not touch the cache at commit."""
        self.preemptions = 0
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache at first admission."""
        self.cache_miss: str | None = None
        """Why the prefix cache did not cover (more of) the prompt."""
        self.siblings: list[Sequence] = []
        """On sample 0 until the prompt is computed: samples 1..n-1, forked from it then."""
        self.order = order
        """Arrival order, for FCFS inside a priority; kept across preemption."""
        self.rank = (BEHIND_ALL if request.shadow else -request.params.priority, order)
        """Smaller is served first: higher priority, then earlier arrival; shadows behind everybody."""
        self.limit = self.prompt_len + request.max_tokens
        """Total tokens at which it ends with "length"; lowered by the scheduler to what model and cache can hold."""
        self.wait_for_commit = False
        """Set by the engine where the newest token is needed on the host (a host drafter): never scheduled ahead."""
        self.taps: frozenset[int] = frozenset()
        """Layers whose hidden states its drafter reads, or that its embedding is made of; set by the engine."""
        self.lookup = 0
        """How a device looks its drafts up in its text by itself (kernels.device.columns.LOOKUP); 0: it does not. Set
        by the engine with the placement."""
        self.placement = Placement.HOST
        """Set by the engine (rows/placement.py)."""
        self.parked = False
        """It waits for peers that are decided about with it: there is nothing to run, so it keeps a seat only while
        nobody else needs it, and does not queue."""
        self.masking = False
        """What its structure allows next is being worked out beside the loop: until then it sits out. Set by the
        engine."""
        self.slow_masks = False
        """That takes long: no drafts for it, and nothing ahead of its newest token. Set by the engine."""
        self.search: Search | None = None
        """What decides about this sequence and its peers together, set by the engine; None: its tokens are its own."""
        self.admitted: float | None = None
        """When it first got a seat (engine clock, seconds)."""

    @property
    def seated(self) -> bool:
        """Whether it holds something of the cache."""
        return self.allocation is not UNSEATED

    @property
    def least_computed(self) -> int:
        """How far the steps in flight get at least; `computed` is how far they may."""
        if not self.drifting:
            return self.computed
        least = len(self.tokens) - 1
        for reach in self.drifting:
            least = max(least, min(least + reach.times, reach.end))
        return least

    def drift(self) -> None:
        """Set `computed` to how far the steps in flight may get from the tokens that are known."""
        most = len(self.tokens) - 1
        for reach in self.drifting:
            most = max(most, min(most + reach.times * reach.most, reach.end))
        self.computed = most

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log-probabilities are asked for and may be missing yet: with its first token they are
        there."""
        return self.request.params.prompt_logprobs is not None and self.output_len == self.said

    @property
    def wants_every_row(self) -> bool:
        """Whether every token of the prompt has to be computed, whatever the cache has of it."""
        return self.scores_prompt or self.request.params.pooling == "mean"

    def __repr__(self) -> str:
        return (f"Sequence({self.request.id}/{self.sample}, {len(self.tokens)} tokens, {self.computed} computed, "
                f"{self.status.value})")
