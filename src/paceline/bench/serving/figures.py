"""From what the load generator saw of a level to its figures: latencies, rates, goodput, what the server counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from paceline.bench.report import Row
from paceline.bench.serving.arrivals import Level
from paceline.bench.serving.bootstrap import Interval, Resampled, percentile
from paceline.errors import ConfigError

LATENCIES = ("ttft", "tpot", "itl", "e2e")
LIMITS = ("ttft", "tpot", "e2e")
"""What an SLO may bound, of each request."""
OF_TOKENS = ("output_rate", "total_rate", "tpot", "output_tokens_mean", "prompt_tokens_mean", "cache_hits")
"""How figures begin that a server's own count of tokens decides."""


@dataclass(frozen=True)
class Sample:
    """One request. Seconds; a latency is None where there is none (a time a token of one token)."""

    start: float
    ttft: float | None
    tpot: float | None
    e2e: float
    gaps: tuple[float, ...]
    tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    fault: str | None
    late: float
    counted: bool
    """Whether `tokens` are the server's count."""

    @staticmethod
    def of(seen: dict[str, Any]) -> Sample:
        """An answer without any text has its first token at its end. Where the server does not count tokens, events
        with text in them are counted."""
        times, fault = seen["times"], seen["fault"]
        tokens = seen["tokens"] if seen["tokens"] is not None else len(times)
        ttft = None if fault else times[0] if times else seen["e2e_s"]
        tpot = (times[-1] - times[0]) / (tokens - 1) if not fault and times and tokens > 1 else None
        return Sample(seen["start_s"], ttft, tpot, seen["e2e_s"],
                      () if fault else tuple(later - sooner for sooner, later in pairwise(times)),
                      0 if fault else tokens, seen["prompt_tokens"], seen["cached_tokens"], fault, seen["late_s"],
                      seen["tokens"] is not None)

    def latencies(self, name: str) -> list[float]:
        if self.fault is not None:
            return []
        if name == "itl":
            return list(self.gaps)
        value = getattr(self, name)
        return [] if value is None else [value]

    def meets(self, slo: dict[str, float]) -> bool:
        return self.fault is None and all(value <= limit for name, limit in slo.items()
                                          for value in self.latencies(name))


@dataclass(frozen=True)
class Run:
    """A level, once."""

    elapsed_s: float
    cpu_s: float
    samples: list[Sample]
    messages: dict[str, str]
    """The first of each kind of fault."""
    times: list[float]
    """At which text came, after the start."""
    counted: dict[str, float] | None
    """By the server, in this time; None where it does not tell."""
    texts: list[str | None]
    """Of the answers, in the order in which they were asked for; None: there is no whole answer."""

    @property
    def answered(self) -> bool:
        return any(text is not None for text in self.texts)

    @property
    def uncounted(self) -> int:
        """Answers whose tokens the server has not counted: events stand for them, of which drafts make fewer."""
        return sum(one.fault is None and not one.counted for one in self.samples)

    @staticmethod
    def of(result: dict[str, Any], counted: dict[str, float] | None) -> Run:
        seen = sorted(result["requests"], key=lambda one: one["start_s"])
        messages: dict[str, str] = {}
        for one in seen:
            if one["fault"]:
                messages.setdefault(one["fault"], one["message"])
        return Run(result["elapsed_s"], result["cpu_s"], [Sample.of(one) for one in seen], messages,
                   [one["start_s"] + time for one in seen for time in one["times"]], counted,
                   [None if one["fault"] else one["text"] for one in result["requests"]])


def parse_slo(text: str | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        name, _, value = part.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name.strip() not in LIMITS or not limit > 0:
            raise ConfigError(f"--slo {part!r} is no target: write seconds of {', '.join(LIMITS)}, such as "
                              "ttft=0.5,tpot=0.05.")
        found[name.strip()] = limit
    return found


def parse_percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < one <= 100 for one in found):
        raise ConfigError(f"--percentiles must be numbers above 0 up to 100 separated by commas, got {text!r}.")
    return found


def rows(level: Level, runs: Sequence[Run], slo: dict[str, float], percentiles: Sequence[float],
         seed: int) -> list[Row]:
    samples = [one for run in runs for one in run.samples]
    drawn = Resampled([len(run.samples) for run in runs], seed)
    elapsed = sum(run.elapsed_s for run in runs)
    spans = [span for run in runs for span in _spans(level, run)]
    found: list[Row] = []

    def add(name: str, unit: str, value: float | None, interval: Interval | None = None, better: bool = True,
            note: str = "") -> None:
        if value is not None:
            found.append(Row(name, unit, value, higher_is_better=better, note=note, interval=interval))

    def rate(name: str, unit: str, amount: Callable[[Sample], float], note: str = "") -> None:
        """A sum over requests by the time, whose share each request has by its span."""
        amounts = [amount(one) for one in samples]
        ratio, scale = drawn.ratio(amounts, spans), sum(spans) / elapsed
        add(name, unit, sum(amounts) / elapsed, None if ratio is None else (ratio[0] * scale, ratio[1] * scale),
            note=note)

    done = [one for one in samples if one.fault is None]
    faults = Counter(one.fault for one in samples if one.fault)
    add("completed", "requests", len(done), note=f"of {len(samples)} in {elapsed:.1f} s")
    add("failed", "requests", sum(faults.values()), better=False, note="; ".join(
        f"{count} {kind}: {next(run.messages[kind] for run in runs if kind in run.messages)}"
        for kind, count in faults.most_common()))
    for kind in ("http_429", "timeout"):
        add(kind, "requests", faults[kind], better=False)
    rate("request_rate", "req/s", lambda one: one.fault is None)
    rate("output_rate", "tok/s", lambda one: one.tokens)
    if all(one.prompt_tokens is not None for one in done):
        rate("total_rate", "tok/s", lambda one: one.tokens + (one.prompt_tokens or 0) * (one.fault is None))
    if slo:
        said = ", ".join(f"{name} <= {limit:g} s" for name, limit in slo.items())
        rate("goodput", "req/s", lambda one: one.meets(slo), said)
        met = [float(one.meets(slo)) for one in samples]
        add("slo_share", "", sum(met) / len(met), drawn.ratio(met, [1.0] * len(met)), note="of all requests")
    for name in LATENCIES:
        values = [one.latencies(name) for one in samples]
        for share in percentiles:
            value = percentile(values, share / 100)
            bounds = None if value is None else drawn.percentile(values, share / 100)
            add(f"{name}_p{share:g}", "ms", None if value is None else 1e3 * value,
                None if bounds is None else (1e3 * bounds[0], 1e3 * bounds[1]), better=False)
    found += [*_tokens(samples, drawn), *_counted(runs)]
    late = percentile([[one.late for one in samples]], 0.99)
    add("client_late_p99", "ms", 1e3 * (late or 0.0), better=False, note="how late the load generator sent requests")
    add("client_cpu", "cores", sum(run.cpu_s for run in runs) / elapsed, better=False,
        note="what the load generator used")
    return [replace(row, case=f"{level.name}_{row.case}") for row in found]


def of_tokens(name: str, slo: dict[str, float]) -> bool:
    return name.startswith(OF_TOKENS) or (name in ("goodput", "slo_share") and "tpot" in slo)


def _spans(level: Level, run: Run) -> list[float]:
    """What each request has of a run's time: up to the next one's arrival, where arrivals go by a clock; where
    answers decide when it is over, the time it took."""
    if level.rate is None and level.kind != "trace":
        return [one.e2e for one in run.samples]
    starts = [one.start for one in run.samples]
    gaps = [later - sooner for sooner, later in pairwise(starts)]
    return [*gaps, sum(gaps) / len(gaps) if gaps else run.elapsed_s]


def _tokens(samples: Sequence[Sample], drawn: Resampled) -> list[Row]:
    done = [one for one in samples if one.fault is None]
    prompts = [one.prompt_tokens for one in done if one.prompt_tokens is not None]
    found = [Row("output_tokens_mean", "tokens", sum(one.tokens for one in done) / len(done))] if done else []
    if prompts:
        found.append(Row("prompt_tokens_mean", "tokens", sum(prompts) / len(prompts)))
    if any(one.cached_tokens is not None for one in done) and sum(prompts) > 0:
        cached = [float(one.cached_tokens or 0) for one in samples]
        whole = [float(one.prompt_tokens or 0) for one in samples]
        found.append(Row("cache_hits", "", sum(cached) / sum(whole), interval=drawn.ratio(cached, whole)))
    return found


def _counted(runs: Sequence[Run]) -> list[Row]:
    """By the server itself, of all its clients."""
    totals: dict[str, float] = {}
    for run in runs:
        for name, value in (run.counted or {}).items():
            totals[name] = totals.get(name, 0.0) + value
    shares = (("acceptance", "", "accepted", "drafted"), ("accepted_per_draft", "tokens", "accepted", "drafts"),
              ("server_cache_hits", "", "found", "looked_up"))
    return [Row(name, unit, totals.get(above, 0.0) / totals[below], note="by the server's metrics, of all its clients")
            for name, unit, above, below in shares if totals.get(below, 0.0) > 0]
