"""Snapshots: what the page shows of the engine. Copied on the engine's thread, made readable on another."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.engine.core import Engine
from paceline.engine.observe.timeline import Second, Timelines
from paceline.engine.schedule.sequence import Sequence as Sample
from paceline.serve.drift import shown
from paceline.watch.watch import DriftWatch

FREE, USED, SHARED, CACHED = range(4)
"""What a block may be; two bits in the map."""

MOST_LISTED = 100
"""Requests of a tenant that are listed in each of running and waiting; all are counted."""


@dataclass(slots=True)
class Listed:
    """Some of a tenant's requests, and how many there are."""

    count: int = 0
    first: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class EngineState:
    """Copies, cheap to take: nothing in them changes any more."""

    clock: float
    report: dict[str, Any]
    block_size: int
    pools: list[tuple[str, list[int], bytes]]
    """Per cache group: its name, the holders of each block, whether the prefix cache knows it."""
    running: dict[str, Listed]
    waiting: dict[str, Listed]
    """By tenant."""
    seconds: list[Second]
    latencies: list[tuple[float | None, float | None]]
    watch: dict[str, Any] | None = None


def engine_state(engine: Engine, timelines: Timelines, watch: DriftWatch | None = None) -> EngineState:
    """Between two steps, on the engine's thread."""
    cache, scheduler, now = engine.cache, engine.scheduler, engine.clock()
    return EngineState(
        now, engine.report(), cache.block_size,
        [(group.name, pool.refs.copy(), bytes(pool.cached)) for group, pool in zip(cache.groups, cache.pools)],
        _by_tenant(scheduler.running, now), _by_tenant(scheduler.waiting, now),
        list(timelines.seconds), list(timelines.latencies), None if watch is None else watch.report())


def _by_tenant(samples: Iterable[Sample], now: float) -> dict[str, Listed]:
    found: dict[str, Listed] = {}
    for seq in samples:
        if seq.request.shadow:
            continue
        listed = found.setdefault(seq.request.tenant.name, Listed())
        listed.count += 1
        if listed.count <= MOST_LISTED:
            listed.first.append(_listed(seq, now))
    return found


def _listed(seq: Sample, now: float) -> dict[str, Any]:
    speculation = seq.record.speculation
    return {"id": seq.request.id, "sample": seq.sample, "age_s": now - seq.request.arrival,
            "prompt": seq.prompt_len, "computed": seq.computed, "output": seq.output_len,
            "limit": seq.limit - seq.prompt_len, "preemptions": seq.preemptions,
            "priority": seq.request.params.priority, "cached": seq.cached_tokens,
            "method": None if speculation is None else speculation.method,
            "tokens_per_step": None if speculation is None else speculation.tokens_per_step,
            "blocks": list(seq.allocation.blocks[0]) if seq.seated else []}


def own_frame(state: EngineState, tenant: str) -> dict[str, Any]:
    """What a tenant may see of it: its own requests. How much others read and write shows in every figure of the engine
    as a whole."""
    running, waiting = state.running.get(tenant, Listed()), state.waiting.get(tenant, Listed())
    return {"clock": state.clock, "running_count": running.count, "waiting_count": waiting.count,
            "running": [{**one, "blocks": []} for one in running.first],
            "waiting": [{**one, "blocks": []} for one in waiting.first]}


def _all(listed: dict[str, Listed]) -> list[dict[str, Any]]:
    return [one for some in listed.values() for one in some.first][:MOST_LISTED]


def frame(state: EngineState) -> dict[str, Any]:
    """What the page draws for operators, in JSON's types."""
    report = state.report
    return {
        "clock": state.clock,
        "totals": {name: report[name] for name in ("requests", "output_tokens", "prefill_tokens", "steps", "drafted",
                                                   "accepted", "preemptions", "cache_evictions", "cache_hit_rate")},
        "running_count": report["running"], "waiting_count": report["waiting"],
        "running": [{**one, "blocks": runs(one["blocks"])} for one in _all(state.running)],
        "waiting": [{**one, "blocks": []} for one in _all(state.waiting)],
        "seconds": [list(second) for second in state.seconds],
        "latency": {"count": len(state.latencies), "ttft_s": percentiles(ttft for ttft, _ in state.latencies),
                    "tpot_s": percentiles(tpot for _, tpot in state.latencies)},
        "speculation": [{name: total[name] for name in ("method", "cycles", "drafted", "accepted", "tokens_per_step",
                                                        "net_speed", "acceptance_by_position")}
                        for total in report["speculation"].values()],
        "watch": shown(state.watch, state.clock),
        "cache": {"block_size": state.block_size,
                  "groups": [_group(name, refs, cached) for name, refs, cached in state.pools]},
    }


def _group(name: str, refs: list[int], cached: bytes) -> dict[str, Any]:
    states = block_states(refs, cached)
    counts = np.bincount(states, minlength=4)
    return {"name": name, "blocks": len(states), "map": packed(states), "free": int(counts[FREE]),
            "used": int(counts[USED]), "shared": int(counts[SHARED]), "cached": int(counts[CACHED])}


def block_states(refs: Sequence[int], cached: bytes) -> npt.NDArray[np.uint8]:
    """One of FREE, USED, SHARED, CACHED a block; the null block, which holds nothing ever, is left out."""
    holders = np.asarray(refs[1:], dtype=np.int32)
    idle = np.where(np.frombuffer(cached, dtype=np.uint8)[1:] > 0, CACHED, FREE)
    held = np.where(holders > 1, SHARED, USED)
    return np.where(holders == 0, idle, held).astype(np.uint8)


def packed(states: npt.NDArray[np.uint8]) -> str:
    """Two bits a block, the first block in the lowest bits of the first byte, as base64."""
    padded = np.zeros(-(-len(states) // 4) * 4, dtype=np.uint8)
    padded[:len(states)] = states
    four = padded.reshape(-1, 4)
    return base64.b64encode((four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6).tobytes()).decode()


def runs(blocks: Iterable[int]) -> list[int]:
    """Blocks a sequence holds as first, length, first, length, ...; numbered like the map, the null block left out."""
    flat: list[int] = []
    for block in blocks:
        if block == 0:
            continue
        if flat and flat[-2] + flat[-1] == block - 1:
            flat[-1] += 1
        else:
            flat += [block - 1, 1]
    return flat


def percentiles(values: Iterable[float | None]) -> list[float] | None:
    """The median, the 90th and the 99th percentile (nearest rank); None: there are no values."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return [known[max(0, math.ceil(share * len(known)) - 1)] for share in (0.5, 0.9, 0.99)]
