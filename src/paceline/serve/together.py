"""What several engines show, as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.engine.observe.timeline import SECONDS_KEPT, Second
from paceline.serve.snapshot import EngineState, Listed

MOST_LINES = 200


def newest(lines: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The lines of requests of several, newest first."""
    return sorted((line for some in lines for line in some), key=lambda line: float(line["age_s"]))[:MOST_LINES]


def together(states: Mapping[str, EngineState], now: float) -> EngineState:
    """Sums where sums mean something; else everything of everybody, under the engine's name."""
    report: dict[str, Any] = {name: sum(state.report[name] for state in states.values()) for name in (
        "requests", "output_tokens", "prefill_tokens", "steps", "drafted", "accepted", "preemptions",
        "cache_evictions", "running", "waiting", "cache_hit_tokens", "cache_looked_up_tokens")}
    looked = report["cache_looked_up_tokens"]
    report["cache_hit_rate"] = report["cache_hit_tokens"] / looked if looked else None
    report["speculation"] = {f"{method} ({name})": {**total, "method": f"{total['method']} ({name})"}
                             for name, state in states.items() for method, total in state.report["speculation"].items()}
    return EngineState(
        now, report, max((state.block_size for state in states.values()), default=1),
        [(f"{name} {group}", refs, cached) for name, state in states.items() for group, refs, cached in state.pools],
        _listed(state.running for state in states.values()), _listed(state.waiting for state in states.values()),
        _seconds(states.values(), now), [pair for state in states.values() for pair in state.latencies])


def _listed(several: Iterable[Mapping[str, Listed]]) -> dict[str, Listed]:
    """By tenant. Blocks are numbered by engine, and the page shows those of one."""
    found: dict[str, Listed] = {}
    for listed in several:
        for tenant, own in listed.items():
            kept = found.setdefault(tenant, Listed())
            kept.count += own.count
            kept.first += [{**one, "blocks": []} for one in own.first]
    return found


def _seconds(states: Iterable[EngineState], now: float) -> list[Second]:
    """On this process's clock: those of other machines began at other times."""
    found: dict[int, Second] = {}
    for state in states:
        shift = round(now - state.clock)
        for one in state.seconds:
            at = one.second + shift
            known = found.get(at, Second(at, 0, 0, 0))
            found[at] = Second(at, known.tokens + one.tokens, known.prompt_rows + one.prompt_rows,
                               known.steps + one.steps)
    return [found[at] for at in sorted(found)][-SECONDS_KEPT:]
