"""Story: what a request's client has been told, by however many workers: how the next one goes on, and the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paceline.cluster.order import Order
from paceline.engine.records.deltas import Delta, SampleDelta
from paceline.engine.records.metrics import RequestMetrics
from paceline.request import Completion, RequestOutput, TokenLogprob
from paceline.sampling.noise import sample_seed
from paceline.so_far import Moved, SampleSoFar
from paceline.speculation.stats import Provenance


@dataclass(slots=True)
class _Sample:
    """What one sample has said."""

    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    origins: list[Provenance] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: SampleDelta) -> None:
        self.token_ids += delta.token_ids
        self.text.append(delta.text)
        self.logprobs += delta.logprobs or ()
        self.origins += delta.origins or ()
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def so_far(self) -> SampleSoFar:
        return SampleSoFar(tuple(self.token_ids), sum(map(len, self.text)), self.finish_reason, self.stop_reason)


class Story:
    """Of one request. Times are those at which its client heard of things, on the clock where it is told."""

    def __init__(self, order: Order, clock: Callable[[], float]) -> None:
        if order.so_far or order.moves:
            raise ValueError("a story begins with a new order")
        self.moves = 0
        """Workers that were lost over it."""
        self.tokens = 0
        """That have been said, by all samples."""
        self._first = order
        self._clock = clock
        self._arrival = clock() - order.age_s
        self._samples = [_Sample() for _ in range(order.params.samples)]
        self._begun: RequestMetrics | None = None
        self._exact = True
        """Whether all who said something of it said what anybody would have."""
        self._told_before = 0
        """Tokens that were said when the present worker got the order: it knows no more of them than that."""
        self._times: list[float] = []
        """When each token of sample 0 was said."""

    @property
    def age_s(self) -> float:
        """Seconds since the client asked."""
        return self._clock() - self._arrival

    def order(self) -> Order:
        """What to send now."""
        so_far = tuple(sample.so_far() for sample in self._samples) if self.tokens else ()
        self._told_before = self.tokens
        return replace(self._first, age_s=self.age_s, moves=self.moves, so_far=so_far)

    def told(self, delta: Delta) -> Delta:
        """The client hears this: a worker's delta, the last one with what others have said as well."""
        self._begun = self._begun or delta.begun
        self._exact = self._exact and delta.exact
        for sample in delta.samples:
            self._samples[sample.index].add(sample)
            self.tokens += len(sample.token_ids)
            if sample.index == 0:
                self._times += [self._clock()] * len(sample.token_ids)
        if delta.output is None or not self._told_before:
            return delta
        return replace(delta, output=self._whole(delta.output))

    def expired(self) -> Delta:
        """The deadline passed where no worker could say so."""
        for sample in self._samples:
            sample.finish_reason = sample.finish_reason or "timeout"
        ended = [SampleDelta(index, "", [], finish_reason=sample.finish_reason)
                 for index, sample in enumerate(self._samples) if sample.finish_reason == "timeout"]
        order, params = self._first, self._first.params
        seed = params.seed or 0
        metrics = self._metrics(RequestMetrics(self._arrival, prompt_tokens=len(order.prompt)))
        completions = [Completion(index, "".join(sample.text), sample.token_ids, sample.finish_reason,
                                  sample.stop_reason, None if params.logprobs is None else sample.logprobs,
                                  sample_seed(seed, index)) for index, sample in enumerate(self._samples[:params.n])]
        return Delta(ended, RequestOutput(
            order.request_id, None, list(order.prompt), completions, finished=True, seed=seed, metrics=metrics,
            moved=Moved(self.moves, exact=False) if self.moves else None))

    def _whole(self, output: RequestOutput) -> RequestOutput:
        """What the last worker says in the end has all tokens in it, and of those of others nothing else."""
        stats, moved = output.speculation, output.moved
        return replace(output, moved=None if moved is None else replace(moved, exact=moved.exact and self._exact),
                        outputs=[self._completed(one) for one in output.outputs],
                       metrics=self._metrics(output.metrics),
                       speculation=None if stats is None else replace(stats, provenance=self._samples[0].origins))

    def _completed(self, completion: Completion) -> Completion:
        if completion.logprobs is None:
            return replace(completion, cumulative_logprob=None)
        logprobs = self._samples[completion.index].logprobs
        total = 0.0
        for score in logprobs:
            total += score.raw
        return replace(completion, logprobs=logprobs, cumulative_logprob=total)

    def _metrics(self, last: RequestMetrics) -> RequestMetrics:
        """Queue, cache and first token are those of the first worker that said something."""
        first = self._begun or last
        scheduled = None if first.queue_time is None else self._arrival + first.queue_time
        return replace(last, arrival=self._arrival, first_scheduled=scheduled, finished=self._clock(),
                       output_tokens=self.tokens, cached_tokens=first.cached_tokens, cache_miss=first.cache_miss,
                       token_times=self._times)
