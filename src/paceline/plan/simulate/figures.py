"""What a simulation says: rates, latencies, goodput, hits and cost of each fleet, and which of them to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.serving.bootstrap import percentile
from paceline.plan.simulate.fleet import Done
from paceline.plan.simulate.replica import Job

SHARES = (50, 90, 99)
KEPT = 0.99
"""Share of requests that have to keep to the targets for a fleet to do."""
CLOSE = 0.02
"""Differences below this share decide nothing."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None

    def __bool__(self) -> bool:
        return self.ttft is not None or self.tpot is not None

    def met(self, job: Job) -> bool:
        """A request that was refused keeps to nothing."""
        if job.refused:
            return False
        between = tpot(job)
        return (self.ttft is None or ttft(job) <= self.ttft) and (
            self.tpot is None or between is None or between <= self.tpot)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one fleet. Latencies in seconds, by percentile."""

    fleet: str
    replicas: int
    routing: str
    disaggregated: bool
    requests: int
    elapsed_s: float
    request_rate: float
    output_rate: float
    goodput: float | None
    """Requests a second that kept to the targets; None: there are none."""
    slo_share: float | None
    ttft: dict[int, float]
    tpot: dict[int, float]
    e2e: dict[int, float]
    hit_rate: float
    """Share of prompt tokens that were in the cache of who computed them."""
    preemptions: int
    utilisation: float
    dollars: float | None
    """For the time of the trace; None: the price is not known."""
    dollars_per_million: float | None
    """Output tokens."""
    steps: int
    refused: int = 0
    """Requests that found every queue full; they are in no latency."""
    front: float = 0.0
    """Cores that fronts keep busy."""


def ttft(job: Job) -> float:
    assert job.first is not None
    return job.first - job.asked.at


def tpot(job: Job) -> float | None:
    """None: there is one token alone."""
    assert job.first is not None and job.end is not None
    return (job.end - job.first) / (job.asked.output_tokens - 1) if job.asked.output_tokens > 1 else None


def figures(done: Done, targets: Targets, price: float | None, cards: int = 1) -> Figures:
    """`price`: dollars an hour of a card; a replica has `cards`."""
    jobs, elapsed = [job for job in done.jobs if not job.refused], max(done.elapsed, 1e-9)
    tokens = sum(job.asked.output_tokens for job in jobs)
    prompts = sum(job.asked.prompt_tokens for job in jobs)
    met = sum(map(targets.met, jobs))
    dollars = None if price is None else price * cards * done.layout.size * done.elapsed / 3600
    between = [value for job in jobs if (value := tpot(job)) is not None]
    return Figures(
        done.layout.name, done.layout.size, done.layout.routing, done.layout.prefill > 0, len(jobs), done.elapsed,
        len(jobs) / elapsed, tokens / elapsed, met / elapsed if targets else None,
        met / len(done.jobs) if targets else None, _percentiles([ttft(job) for job in jobs]), _percentiles(between),
        _percentiles([job.end - job.asked.at for job in jobs if job.end is not None]),
        sum(job.cached for job in jobs) / prompts, sum(job.preemptions for job in jobs), done.busy, dollars,
        None if dollars is None else dollars / tokens * 1e6, done.steps,
        len(done.jobs) - len(jobs), done.front)


def _percentiles(values: list[float]) -> dict[int, float]:
    return {share: found for share in SHARES if (found := percentile([values], share / 100)) is not None}


def best(found: Sequence[Figures]) -> Figures:
    """Of fleets that keep to the targets for nearly everybody the cheapest; where none does, the one with the most
    goodput. Of equals, and where there are no targets, the one whose first tokens come soonest."""
    def late(one: Figures) -> float:
        return one.ttft[SHARES[-1]]

    kept = [one for one in found if one.slo_share is not None and one.slo_share >= KEPT]
    if kept:
        fewest = min(one.replicas for one in kept)
        return min((one for one in kept if one.replicas == fewest), key=late)
    most = max(one.goodput or 0.0 for one in found)
    return min((one for one in found if (one.goodput or 0.0) >= (1.0 - CLOSE) * most), key=late)


def advice(found: Sequence[Figures], targets: Targets) -> str:
    """Which is best, and why."""
    chosen = best(found)
    others = [one for one in found if one is not chosen]
    said = f"Best: {chosen.fleet}."
    if not others:
        return said if chosen.slo_share is None else f"{said} {chosen.slo_share:.1%} of requests keep to the targets."
    if chosen.slo_share is not None and chosen.slo_share >= KEPT:
        said += f" {chosen.slo_share:.1%} of requests keep to the targets, with the fewest replicas of those that do."
    elif chosen.slo_share is not None:
        said += (f" None keeps to the targets for {KEPT:.0%} of requests: it has the most that do "
                 f"({chosen.slo_share:.1%}); more replicas are needed.")
    else:
        said += " First tokens come soonest."
    rival = min(others, key=lambda one: (abs(one.replicas - chosen.replicas), one.ttft[SHARES[-1]]))
    return (f"{said} TTFT p99 {_ms(chosen.ttft[99])} against {_ms(rival.ttft[99])} of {rival.fleet}, hits "
            f"{chosen.hit_rate:.0%} against {rival.hit_rate:.0%}, {chosen.utilisation:.0%} at work against "
            f"{rival.utilisation:.0%}." + ("" if targets else " Give --ttft and --tpot to weigh that against cost."))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"
