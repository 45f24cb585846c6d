"""A load test: warm up, then one level after another, each as often as asked, and the document that comes of it."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.bench.report import Row, document, say
from paceline.bench.serving.arrivals import Arrival, Level, schedule
from paceline.bench.serving.datasets import Ask, Asks, body
from paceline.bench.serving.figures import LATENCIES, Run, rows
from paceline.bench.serving.target import Target, refuse_key
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from paceline.bench.serving.in_process import InProcess

ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
WARM_UP_CLIENTS = 4
LATE_MS = 50.0
"""From here on the load generator's own lateness is worth a word."""
SLICES = 100
"""Of a level's time, in its charts."""
LINES_S = 10.0
"""Between two lines of progress where there is no terminal."""


@dataclass(frozen=True)
class LoadTest:
    """`trace`: arrivals of a replay, else none. `extra`: further fields of every body."""

    levels: Sequence[Level]
    asks: Asks
    requests: int = 100
    repeats: int = 1
    warmup: int = 4
    endpoint: str = "auto"
    temperature: float = 0.0
    usage: bool = True
    timeout_s: float = 600.0
    burst: int = 8
    seed: int = 0
    trace: Sequence[Arrival] = ()
    slo: dict[str, float] = field(default_factory=dict)
    percentiles: Sequence[float] = (50.0, 90.0, 99.0)
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint not in ("auto", *ENDPOINTS):
            raise ConfigError(f"--endpoint must be auto, {' or '.join(ENDPOINTS)}, got {self.endpoint!r}.")

    @property
    def chat(self) -> bool:
        return self.endpoint == "chat" or (self.endpoint == "auto" and self.asks.has_messages)

    @property
    def path(self) -> str:
        return ENDPOINTS["chat" if self.chat else "completions"]

    @property
    def lengths(self) -> list[tuple[int | None, int | None]]:
        """Of the prompts and answers of a level's run; None: the dataset's own."""
        return [(one.input_len, one.output_len) for one in self.trace] or [(None, None)] * self.requests

    def body(self, ask: Ask, model: str, seed: int) -> dict[str, Any]:
        """Fields that every server with OpenAI's API knows, and `extra`. A seed only where there is chance."""
        return {"model": model, **body(ask, self.chat), "temperature": self.temperature, "stream": True,
                **({"stream_options": {"include_usage": True}} if self.usage else {}),
                **({"seed": seed} if self.temperature > 0 else {}), **self.extra}


def run(target: Target | InProcess, test: LoadTest, settings: dict[str, Any]) -> dict[str, Any]:
    """The bench document of a load test on whoever is there."""
    luck = random.Random(f"{test.seed} arrivals")
    warm_up(target, test, [test.asks.next() for _ in range(test.warmup)])
    found: list[Row] = []
    described = []
    for level in test.levels:
        runs = []
        for turn in range(test.repeats):
            asks = [test.asks.next(*lengths) for lengths in test.lengths]
            title = level.name + (f", run {turn + 1} of {test.repeats}" if test.repeats > 1 else "")
            runs.append(once(target, test, plan_of(level, test, asks, target.model, luck), title))
        figures = rows(level, runs, test.slo, test.percentiles, test.seed)
        found += figures
        described.append(describe(level, runs))
        tell(level.name, level, figures)
    if not any(row.paceline for row in found if row.case.endswith("_completed")):
        said = [f"{kind}: {text}" for one in described for kind, text in one["messages"].items()]
        raise PacelineError(f"No request was answered ({'; '.join(said[:3])}): see whether the server is well, or "
                            "offer it less.")
    asked = test.warmup + sum(one["requests"] for one in described)
    if test.asks.size is not None and asked > test.asks.size:
        say(f"serve: {asked} requests came from {test.asks.size} prompts: some came again, which caches notice")
    return document(found, **settings, server_model=target.model) | {"measured": target.kind, "levels": described}


def plan_of(level: Level, test: LoadTest, asks: Sequence[Ask], model: str, luck: random.Random) -> dict[str, Any]:
    """Of a run: a request for each of `asks`, and when they leave."""
    arrivals: list[float] | None = [one.at_s for one in test.trace]
    if not test.trace:
        arrivals = None if level.clients else schedule(level, len(asks), luck, test.burst)
    return {"bodies": [test.body(ask, model, luck.getrandbits(31)) for ask in asks], "arrivals": arrivals,
            "clients": level.clients, "timeout_s": test.timeout_s}


def once(target: Target | InProcess, test: LoadTest, plan: dict[str, Any], title: str) -> Run:
    """What became of a plan, and what the server counted meanwhile."""
    before = target.counters()
    result = target.drive(test.path, plan, Progress(title))
    after = target.counters()
    return Run.of(result, None if before is None or after is None else {
        name: after[name] - before.get(name, 0.0) for name in after})


def warm_up(target: Target | InProcess, test: LoadTest, asks: Sequence[Ask]) -> None:
    """A server that refuses everything is told of here, before anything is measured."""
    if not asks:
        return
    say(f"serve: {len(asks)} requests to warm up")
    bodies = [test.body(ask, target.model, place) for place, ask in enumerate(asks)]
    plan = {"bodies": bodies, "arrivals": None, "timeout_s": test.timeout_s,
            "clients": min(WARM_UP_CLIENTS, len(asks))}
    for one in target.drive(test.path, plan, Progress("warm-up"))["requests"]:
        if one["fault"] is None or one["status"] == 429:
            continue
        refuse_key(one["status"], target.base)
        if 400 <= one["status"] < 500:
            hint = " If it does not know stream_options, try --no-usage." if test.usage else ""
            raise ConfigError(f"{target.base} refuses what is asked (HTTP {one['status']}: {one['message']}): correct "
                              f"--model, --endpoint or the dataset.{hint}")
        raise PacelineError(f"A request to warm up failed ({one['fault']}: {one['message']}): see whether "
                            f"{target.base} is well.")


class Progress:
    """How far a level is: a line that is written again on a terminal, a line now and then elsewhere."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._last = time.monotonic()

    def __call__(self, seen: dict[str, Any]) -> None:
        done = seen["begun"] - seen["running"]
        text = f"serve: {self._title}: {done} of {seen['of']} done, {seen['running']} under way, " \
               f"{seen['elapsed_s']:.0f} s"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last >= LINES_S:
            self._last = time.monotonic()
            say(text)


def tell(title: str, level: Level, figures: Sequence[Row]) -> None:
    """One line of a run that is over, and a warning where the load generator did not keep up."""
    values = {row.case.removeprefix(f"{level.name}_"): row.paceline for row in figures}
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    say(f"{start}serve: {title}: {values['completed']:.0f} done, {values['failed']:.0f} failed, "
        f"{values['request_rate']:.2f} req/s, {values['output_rate']:.1f} tok/s")
    if values["client_late_p99"] > LATE_MS:
        say(f"serve: {title}: the load generator itself was late by {values['client_late_p99']:.0f} ms (p99): "
            "its machine is too busy for this rate")


def describe(level: Level, runs: Sequence[Run]) -> dict[str, Any]:
    """What charts need and rows do not have."""
    samples = [one for run in runs for one in run.samples]
    messages: dict[str, str] = {}
    for run in runs:
        messages = run.messages | messages
    return {
        "name": level.name, "kind": level.kind, "rate": level.rate, "clients": level.clients,
        "requests": len(samples), "elapsed_s": [run.elapsed_s for run in runs],
        "faults": dict(Counter(one.fault for one in samples if one.fault)), "messages": messages,
        "quantiles_ms": {name: _quantiles([value for one in samples for value in one.latencies(name)])
                         for name in LATENCIES},
        "timeline": _timeline(runs[0]),
        "samples": [[_ms(one.start), _ms(one.ttft), _ms(one.tpot), _ms(one.e2e), one.prompt_tokens, one.tokens,
                     one.fault] for one in samples],
        "samples_are": ["start_ms", "ttft_ms", "tpot_ms", "e2e_ms", "prompt_tokens", "tokens", "fault"]}


def _quantiles(values: list[float]) -> list[float]:
    """At 0 %, 1 %, up to 100 %."""
    return [round(1e3 * float(one), 3) for one in np.quantile(values, np.linspace(0.0, 1.0, 101))] if values else []


def _timeline(run: Run) -> dict[str, Any]:
    """Of the first run: requests under way, and pieces of text a second."""
    edges = np.linspace(0.0, run.elapsed_s, SLICES + 1)
    starts = np.sort([one.start for one in run.samples])
    ends = np.sort([one.start + one.e2e for one in run.samples])
    step = run.elapsed_s / SLICES
    return {"step_s": step, "pieces_per_s": (np.histogram(run.times, edges)[0] / step).round(2).tolist(),
            "running": (np.searchsorted(starts, edges[:-1], "right")
                        - np.searchsorted(ends, edges[:-1], "right")).tolist()}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
