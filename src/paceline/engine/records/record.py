"""Record: everything the engine keeps of one request until its last output is taken."""

from __future__ import annotations

import math

from paceline.engine.records.emitter import Emitter
from paceline.engine.records.metrics import RequestMetrics
from paceline.engine.records.pooling import Pooling
from paceline.engine.records.witness import Witness
from paceline.errors import PacelineError
from paceline.request import Completion, Request, RequestOutput, TokenLogprob
from paceline.sampling.trace import Trace
from paceline.so_far import SampleSoFar
from paceline.speculation.stats import SpeculationStats

BROKEN_OFF = ("cancelled", "timeout", "error")
"""Ends that are no decision of the model's or the request's."""


class Record:
    """Everything the engine keeps of one request until its last output is taken."""

    __slots__ = (
        "emitters",
        "error",
        "metrics",
        "open",
        "pooling",
        "prompt_logprobs",
        "request",
        "so_far",
        "speculation",
        "trace",
        "witness",
    )

    def __init__(self, request: Request, emitters: list[Emitter], trace: Trace | None,
                 so_far: tuple[SampleSoFar, ...] = ()) -> None:
        self.request = request
        self.so_far = so_far
        """What each sample came with, from another engine; empty: the request is new."""
        self.emitters = emitters
        """One per sample."""
        self.metrics = RequestMetrics(request.arrival, prompt_tokens=len(request.prompt),
                                      output_tokens=sum(len(one.token_ids) for one in so_far))
        self.speculation: SpeculationStats | None = None
        self.trace = trace
        self.prompt_logprobs: list[TokenLogprob | None] | None = (
            None if request.params.prompt_logprobs is None else [None])
        self.witness: Witness | None = None
        """Who looks at its drafts as they are verified; None, most of the time."""
        self.pooling: Pooling | None = None
        """Where an embedding of its prompt is asked for."""
        self.error: PacelineError | None = None
        self.open = sum(emitter.finish_reason is None for emitter in emitters)
        """Samples that have not ended."""

    @property
    def behind(self) -> bool:
        """Whether tokens come more slowly than they should."""
        target = self.request.target_tpot_s
        return target is not None and (self.metrics.tpot or 0.0) > target

    def snapshot(self) -> RequestOutput:
        request = self.request
        return RequestOutput(
            request.id, request.prompt_text, request.prompt, self._completions(),
            finished=self.open == 0, seed=request.seed, metrics=self.metrics, speculation=self.speculation,
            trace=self.trace if self.open == 0 else None, prompt_logprobs=self.prompt_logprobs,
            embedding=self.pooling.vector() if self.pooling is not None and self.open == 0 else None, error=self.error)

    def _completions(self) -> list[Completion]:
        """One a sample; of a request that chooses among more the best n, best first, once all have ended."""
        params = self.request.params
        if not params.chosen_at_end:
            return [emitter.completion() for emitter in self.emitters]
        if self.open:
            return []
        emitters = self.emitters
        broken = next((one.finish_reason for one in emitters if one.finish_reason in BROKEN_OFF), None)
        if broken is not None:  # there is no best of what did not all end
            return [Completion(index, finish_reason=broken, logprobs=None if params.logprobs is None else [],
                               seed=emitter.seed) for index, emitter in enumerate(emitters[:params.n])]
        if not params.searches:  # beams are in their order already
            for emitter in emitters:
                if emitter.token_ids and emitter.cumulative is not None:
                    emitter.score = emitter.cumulative / len(emitter.token_ids)
            emitters = sorted(emitters, key=lambda emitter: math.inf if emitter.score is None else -emitter.score)
        best = [emitter.completion() for emitter in emitters[:params.n]]
        for index, completion in enumerate(best):
            completion.index = index
        return best
