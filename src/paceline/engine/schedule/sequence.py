"""Sequence: one sample of a request, the unit the scheduler moves. No torch here."""

from __future__ import annotations

from enum import Enum
from typing import Any

from paceline.request import Request

PENDING = -1
"""Stands for a token that an uncommitted step is still sampling."""


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens known so far and how many of them are in the cache.

    `tokens` holds prompt + committed output. `computed` counts tokens whose KV is in the cache or will be once
    the steps in flight have run; a sequence is caught up when only its newest token is missing.
    """

    __slots__ = ("adapter", "admitted", "allocation", "cache_miss", "cached_tokens", "computed", "draft", "emitter",
                 "epoch", "finish_reason", "free_running", "in_flight", "in_flight_draft", "limit", "on_device",
                 "order", "parked", "preemptions", "prompt_len", "rank", "record", "request", "rule", "runs_ahead",
                 "sample", "search", "seed", "siblings", "state", "status", "swapped", "tokens", "wait_for_commit")

    def __init__(self, request: Request, sample: int, seed: int, order: int = 0) -> None:
        self.request = request
        self.sample = sample
        self.seed = seed
        self.adapter = request.adapter
        """What its rows run with besides the model; None: nothing."""
        self.tokens: list[int] = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.computed = 0
        self.in_flight = 0
        """Steps scheduled and not yet committed that hold rows of this sequence (0 or 1, 2 when ahead)."""
        self.in_flight_draft = False
        """Whether one of those carries a draft: how far it got is unknown until commit."""
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.draft: Any = None
        """DraftTree to verify in the next step, set by the engine before schedule()."""
        self.rule = "coupled"
        """What its drafts are verified by (a name of speculation.verify.RULES), set by the engine with its drafter."""
        self.allocation: Any = None
        """cache.Allocation while running."""
        self.swapped: Any = None
        """cache.Swapped while it waits with its KV on the host."""
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
        self.rank = (-request.params.priority, order)
        """Smaller is served first: higher priority, then earlier arrival."""
        self.limit = self.prompt_len + request.max_tokens
        """Total tokens at which it ends with "length"; lowered by the scheduler to what model and cache can hold."""
        self.wait_for_commit = False
        """Set by the engine where the newest token is needed on the host (a host drafter): never scheduled ahead."""
        self.on_device = False
        """Set by the engine where a device, if there is one, can draw its tokens."""
        self.runs_ahead = False
        """Set by the engine where the next step may be launched before the host has read this one's token; before a
        draw the host may have its word all the same."""
        self.free_running = False
        """Set by the engine where nothing about the next token has to be known on the host before the one after it is
        drawn: a device may then run several steps by itself."""
        self.parked = False
        """It waits for peers that are decided about with it: there is nothing to run, so it keeps a seat only while
        nobody else needs it, and does not queue."""
        self.search: Any = None
        """engine.beams.BeamSearch that decides about this sequence and its peers together, set by the engine; None: it
        draws its own tokens."""
        self.admitted: float | None = None
        """When it first got a seat (engine clock, seconds)."""
        self.state: Any = None
        """sampling.SampleState, owned by the engine."""
        self.emitter: Any = None
        """engine.outputs.Emitter (detokeniser, stop matcher), owned by the engine."""
        self.record: Any = None
        """engine.outputs.Record of its request, owned by the engine."""

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def cache_salt(self) -> str:
        """What keeps its blocks apart from those of others: what the request asked for, and the adapter they were
        computed with. The first letters tell both kinds apart, whatever a request asks for."""
        own = self.request.params.cache_salt
        if self.adapter is not None:
            return f"adapter {self.adapter.revision} {own}"
        return f"salt {own}" if own else ""

    def __repr__(self) -> str:
        return (f"Sequence({self.request.id}/{self.sample}, {len(self.tokens)} tokens, {self.computed} computed, "
                f"{self.status.value})")
