"""Prometheus metrics: vLLM's names where the meaning is the same, so that dashboards for it work, and our own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from paceline.engine.core import Engine
from paceline.engine.records.metrics import RequestMetrics
from paceline.engine.records.record import Record
from paceline.measure.process_memory import ProcessMemory
from paceline.serve import drift
from paceline.watch.watch import DriftWatch

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
GAPS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
        1.0, 2.0)
LAGS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
LABEL = "model_name"
CANCELLED = "cancelled"
VLLM_REASONS = {CANCELLED: "abort"}
"""Where its name for a reason is another."""
HOST_BLOCKS = {"swapped": "swap_blocks", "prefix": "host_cache_blocks"}
"""What host blocks hold (a preempted sequence, or what the prefix cache had no room for), and its name in reports."""


HERE = ""
"""The name of an engine that is the only one."""


class Report(NamedTuple):
    """engine_state(), and the memory of its process where that is known."""

    engine: dict[str, Any]
    memory: ProcessMemory | None = None


def engine_state(engine: Engine, watch: DriftWatch | None = None) -> dict[str, Any]:
    """Engine.report(), the states of cache blocks and what the drift watch found; asked between two steps."""
    idle = sum(1 for pool in engine.cache.pools for cached, refs in zip(pool.cached, pool.refs) if cached and not refs)
    return engine.report() | {"watch": None if watch is None else watch.report(),
                              "cache_blocks_idle_cached": idle, "cache_blocks_shared": engine.cache.usage().shared}


class Gaps:
    """A histogram that takes all gaps of a request at once: there is one per token."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(GAPS) + 1, dtype=np.int64)
        self._sum = 0.0

    def add(self, times: list[float]) -> None:
        gaps = np.diff(times)
        self._counts += np.bincount(np.searchsorted(GAPS, gaps), minlength=len(GAPS) + 1)
        self._sum += float(gaps.sum())

    def family(self, name: str, text: str, model: str) -> Metric:
        made = HistogramMetricFamily(name, text, labels=(LABEL,))
        counts = np.cumsum(self._counts).tolist()
        made.add_metric((model,), [(str(bound), float(count)) for bound, count in zip((*GAPS, "+Inf"), counts)],
                        self._sum)
        return made


class HttpMetrics:
    """What is counted of a server, whichever model is meant."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        """`model_name`: "" where there are several."""
        self._model = model_name
        self.registry = registry
        self.lag = Histogram("paceline_event_loop_lag_seconds", "How late the server's event loop is.", (LABEL,),
                             registry=registry, buckets=LAGS).labels(model_name)
        self._responses = Counter("paceline_http_responses", "Responses by status.", (LABEL, "status"),
                                  registry=registry)

    def responded(self, status: int) -> None:
        self._responses.labels(self._model, str(status)).inc()


class Metrics(Protocol):
    """Those of a server."""

    @property
    def lag(self) -> Any: ...

    def responded(self, status: int) -> None: ...

    def expositions(self, reports: Mapping[str, Report]) -> bytes:
        """The text Prometheus reads. `reports`: of every engine, by name."""


class ServerMetrics:
    """What requests that ended tell, kept here; what the engine counts is read when somebody asks."""

    def __init__(self, model_name: str, http: HttpMetrics | None = None) -> None:
        """`http`: where there are several models, what they have together."""
        self._model = model_name
        self._ended: deque[Record] = deque()
        """Not counted yet."""
        self.registry = CollectorRegistry()
        self._http = http or HttpMetrics(model_name, self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, [LABEL], registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", SECONDS)
        self._gaps = Gaps()
        self._tpot = histogram("vllm:request_time_per_output_token_seconds",
                               "Mean time of a request's tokens after the first.", GAPS)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", SECONDS)
        self._queue = histogram("vllm:request_queue_time_seconds", "Arrival to first step.", SECONDS)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "First step to first token.", SECONDS)
        self._decode = histogram("vllm:request_decode_time_seconds", "First token to last.", SECONDS)
        self._inference = histogram("vllm:request_inference_time_seconds", "First step to last token.", SECONDS)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._generation = histogram("vllm:request_generation_tokens", "Tokens a request got.", TOKENS)
        self._success = Counter("vllm:request_success", "Finished samples by reason.", (LABEL, "finished_reason"),
                                registry=self.registry)
        self._failed = Counter("paceline_request_failures", "Requests that ended with an error.", (LABEL,),
                               registry=self.registry).labels(model_name)

    @property
    def lag(self) -> Any:
        return self._http.lag

    def responded(self, status: int) -> None:
        self._http.responded(status)
        self.count_ended()

    def ended(self, record: Record) -> None:
        """A request that was admitted has ended, however it did. In the engine's thread, which has better to do than
        to count: that is done when a response ends, or somebody asks."""
        self._ended.append(record)

    def count_ended(self) -> None:
        """In the event loop."""
        while self._ended:
            self._count(self._ended.popleft())

    def _count(self, record: Record) -> None:
        metrics = record.metrics
        reasons = [emitter.finish_reason or "" for emitter in record.emitters]
        if record.error is not None:
            self._failed.inc()
        else:
            for reason in reasons:
                self._success.labels(self._model, VLLM_REASONS.get(reason, reason)).inc()
        self._prompt.observe(metrics.prompt_tokens)
        _observe(self._queue, metrics.queue_time)
        _observe(self._ttft, metrics.ttft)
        if metrics.first_token is not None and metrics.first_scheduled is not None:
            self._prefill.observe(metrics.first_token - metrics.first_scheduled)
        self._gaps.add(metrics.token_times)
        if CANCELLED not in reasons:
            self._count_whole(metrics)

    def _count_whole(self, metrics: RequestMetrics) -> None:
        """What one cannot say of a request that was broken off."""
        self._generation.observe(metrics.output_tokens)
        _observe(self._tpot, metrics.tpot)
        if metrics.finished is not None:
            self._whole.observe(metrics.finished - metrics.arrival)
        if metrics.first_token is not None and metrics.first_scheduled is not None:
            last = metrics.token_times[-1]
            self._decode.observe(last - metrics.first_token)
            self._inference.observe(last - metrics.first_scheduled)

    def exposition(self, report: dict[str, Any], memory: ProcessMemory | None = None) -> bytes:
        """The text Prometheus reads. `report`: engine_state(). `memory`: of this process, where that is known."""
        return self.expositions({HERE: Report(report, memory)})

    def expositions(self, reports: Mapping[str, Report]) -> bytes:
        """Of several engines: what each of them counts has its name in the label `replica`."""
        return exposition(self.families(reports))

    def families(self, reports: Mapping[str, Report]) -> Iterator[Metric]:
        """All that there is to tell; families of one name may come several times, of several engines."""
        self.count_ended()
        yield from self.registry.collect()
        yield from self._own()
        for name, report in reports.items():
            for family in (*self._engine(report.engine), *self.memory(report.memory)):
                if name != HERE:
                    family.samples = [sample._replace(labels={**sample.labels, "replica": name})
                                      for sample in family.samples]
                yield family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        made = GaugeMetricFamily(name, text, labels=(LABEL,))
        made.add_metric((self._model,), value)
        return made

    def _several(self, kind: type[Metric], name: str, text: str, label: str, values: dict[str, float]) -> Metric:
        made: Any = kind(name, text, labels=(LABEL, label))  # type: ignore[call-arg]
        for key, value in values.items():
            made.add_metric((self._model, key), value)
        return made  # type: ignore[no-any-return]

    def memory(self, memory: ProcessMemory | None) -> Iterator[Metric]:
        if memory is None:
            return
        yield self._several(GaugeMetricFamily, "paceline_memory_bytes",
                            "Resident memory by what it holds; the parts add up to all.", "part",
                            {part: getattr(memory, part) for part in ("cache", "files", "heap", "other")})
        yield self._several(GaugeMetricFamily, "paceline_malloc_bytes",
                            "What the C library has given out, and what it keeps to give out again.", "state",
                            {"used": memory.malloc_used, "free": memory.malloc_free})
        yield self._gauge("paceline_python_blocks", "Python's small objects.", memory.python_blocks)

    def _own(self) -> Iterator[Metric]:
        # The second is the name it had in vLLM before; dashboards of both ages find it.
        for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
            yield self._gaps.family(name, "Between two tokens of a sample.", self._model)

    def _engine(self, report: dict[str, Any]) -> Iterator[Metric]:
        gauge, several = self._gauge, self._several

        def counter(name: str, text: str, value: float) -> CounterMetricFamily:
            made = CounterMetricFamily(name, text, labels=(LABEL,))
            made.add_metric((self._model,), value)
            return made

        yield gauge("vllm:num_requests_running", "Sequences that hold cache.", report["running"])
        yield gauge("vllm:num_requests_waiting", "Sequences in the queue.", report["waiting"])
        yield gauge("vllm:num_requests_swapped", "Of those, sequences whose cache is on the host.", report["swapped"])
        yield gauge("vllm:cpu_cache_usage_perc", "Share of host blocks in use, 0 to 1.", report["host_use"])
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield gauge(name, "Share of cache blocks in use, 0 to 1.", report["cache_use"])
        yield counter("vllm:prompt_tokens", "Prompt tokens, computed or cached.", report["prompt_tokens"])
        yield counter("vllm:prompt_tokens_cached", "Prompt tokens that the cache had.", report["cached_tokens"])
        yield counter("paceline_prompt_rows", "Prompt rows computed, again after preemptions.",
                      report["prefill_tokens"])
        yield counter("vllm:generation_tokens", "Tokens generated.", report["output_tokens"])
        yield counter("vllm:num_preemptions", "Sequences that lost their blocks.", report["preemptions"])
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", report["cache_looked_up_tokens"])
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found.", report["cache_hit_tokens"])
        yield from self._speculation(report["speculation"], counter, several)

        used, cached = report["cache_blocks_used"], report["cache_blocks_idle_cached"]
        yield several(GaugeMetricFamily, "paceline_cache_blocks", "Cache blocks by state; they add up to all.", "state",
                      {"used": used, "cached": cached, "free": report["cache_blocks"] - used - cached})
        yield gauge("paceline_cache_blocks_shared", "Blocks in use that several hold.", report["cache_blocks_shared"])
        yield counter("paceline_cache_evictions", "Cached blocks given up for others.", report["cache_evictions"])
        yield several(GaugeMetricFamily, "paceline_host_blocks", "Host blocks in use, by what they hold.", "kind",
                      {kind: report[f"{key}_used"] for kind, key in HOST_BLOCKS.items()})
        for way in ("out", "in"):
            yield several(CounterMetricFamily, f"paceline_host_blocks_{way}",
                          f"Blocks copied {'to' if way == 'out' else 'from'} the host, by what they hold.", "kind",
                          {kind: report[f"{key}_{way}"] for kind, key in HOST_BLOCKS.items()})
        yield counter("paceline_requests", "Requests admitted.", report["requests"])
        yield several(CounterMetricFamily, "paceline_sequences_finished", "Finished sequences by reason.", "reason",
                      report["finished"])
        yield counter("paceline_steps", "Steps run.", report["steps"])
        yield counter("paceline_rows", "Rows computed.", report["rows"])
        yield several(CounterMetricFamily, "paceline_step_seconds", "Where the steps' time went.", "stage",
                      {stage: report[f"{stage}_s"] for stage in ("schedule", "forward", "sample", "commit", "draft")})
        yield counter("paceline_drafter_failures", "Drafters, and parts of drafters, switched off because they failed.",
                      report["drafter_failures"])
        yield several(GaugeMetricFamily, "paceline_speculation_suspended",
                      "Methods that the drift watch has switched off.", "method",
                      dict.fromkeys(report["suspended"], 1.0))
        if (handovers := report.get("handovers")) is not None:
            yield counter("paceline_handovers", "Requests whose prompts came from a prefill replica.",
                          handovers["done"])
            yield several(CounterMetricFamily, "paceline_handover_failures",
                          "Requests whose prompts should have come from one and did not, by kind of error.", "error",
                          handovers["failed"])
        if report["watch"] is not None:
            yield from drift.families(report["watch"], (LABEL, self._model))

    def _speculation(self, totals: dict[str, dict[str, Any]], counter: Any, several: Any) -> Iterator[Metric]:
        """Totals by method."""

        def summed(key: str) -> float:
            return float(sum(total[key] for total in totals.values()))

        yield counter("vllm:spec_decode_num_drafts", "Verification passes with a draft.", summed("cycles"))
        yield counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", summed("drafted"))
        yield counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.", summed("accepted"))
        by_depth: dict[str, float] = {}
        for total in totals.values():
            for depth, count in enumerate(total["accepted_by_depth"]):
                by_depth[str(depth)] = by_depth.get(str(depth), 0) + count
        yield several(CounterMetricFamily, "vllm:spec_decode_num_accepted_tokens_per_pos",
                      "Drafted tokens accepted, by depth.", "position", by_depth)
        for key, name, text in (
                ("cycles", "paceline_speculation_cycles", "Verification passes with a draft, by method."),
                ("drafted", "paceline_speculation_drafted_tokens", "Tokens drafted, by method."),
                ("accepted", "paceline_speculation_accepted_tokens", "Drafted tokens accepted, by method."),
                ("overlap", "paceline_speculation_overlap",
                 "Sum of min(p, q) of drafted tokens that were tested and whose q is known, by method."),
                ("overlapped", "paceline_speculation_overlap_tokens", "How many tokens those are, by method."),
                ("plain", "paceline_speculation_plain_tokens", "Tokens of steps without a draft, by method."),
                ("spent_s", "paceline_speculation_spent_seconds", "Time of speculating requests' steps, by method."),
                ("compared_s", "paceline_speculation_compared_seconds",
                 "That of steps whose like without drafts was measured, by method."),
                ("plain_s", "paceline_speculation_plain_seconds",
                 "What plain decoding would have taken instead of those, estimated, by method.")):
            yield several(CounterMetricFamily, name, text, "method",
                          {method: float(total[key]) for method, total in totals.items()})
        yield several(GaugeMetricFamily, "paceline_speculation_won_seconds",
                      "Seconds won against plain decoding, estimated, by method; below 0: lost.", "method",
                      {method: total["won_s"] or 0.0 for method, total in totals.items()})


def exposition(families: Iterable[Metric]) -> bytes:
    """The text Prometheus reads: one family a name, with the samples of all who have it in it."""
    together: dict[str, Metric] = {}
    for family in families:
        if family.name in together:
            together[family.name].samples += family.samples
        else:
            together[family.name] = family
    return generate_latest(_Scrape(together.values()))


def _observe(histogram: Any, value: float | None) -> None:
    if value is not None:
        histogram.observe(value)


class _Scrape:
    """Metrics made for one scrape, as a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
