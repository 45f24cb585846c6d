"""How many replicas there should be: by what waits and by targets missed. Ray Serve asks, bounds and delays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

MUCH_WAITS = 4.0
"""Requests that wait, on average over the replicas: beyond that another one would have work."""
OFTEN_LATE = 0.1
"""Share of the requests with a target that missed it."""
IDLE = 1.0
"""Requests that run for each replica that would be left: below that one is too many."""


def wanted(replicas: int, waiting: float, running: float, late: float) -> int:
    """Sums over all replicas, `late` the largest share of any."""
    if replicas == 0:
        return 1 if waiting or running else 0
    if waiting > MUCH_WAITS * replicas:
        return max(replicas + 1, math.ceil(waiting / MUCH_WAITS))
    if late > OFTEN_LATE:
        return replicas + 1
    if not waiting and replicas > 1 and running < IDLE * (replicas - 1):
        return replicas - 1
    return replicas


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """For AutoscalingPolicy. Fed by Replica.record_autoscaling_stats()."""
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}

    def values(name: str) -> Iterable[float]:
        return (metrics.get(name) or {}).values()

    number = wanted(context.current_num_replicas, sum(values("waiting")), sum(values("running")),
                    max(values("late"), default=0.0))
    return number, {}
