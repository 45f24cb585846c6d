"""How many replicas there should be: what each says of itself, what Serve makes of it, and what is asked for."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.serve.config import AutoscalingContext

from paceline.cluster.autoscaling import policy, wanted
from paceline.cluster.deploy import deployments
from paceline.cluster.options import ClusterOptions
from paceline.cluster.replica import LOOK_BACK_S, Replica, ReplicaOptions
from paceline.request import SamplingParams


@pytest.mark.parametrize(("state", "number"), [
    ((2, 0, 1, 0), 2), ((2, 0, 0, 0), 1), ((1, 0, 0, 0), 1), ((2, 9, 4, 0), 3), ((2, 40, 4, 0), 10),
    ((2, 0, 9, 0.5), 3), ((2, 0, 0, 0.5), 3), ((0, 1, 0, 0), 1), ((0, 0, 0, 0), 0)])
def test_how_many_replicas_there_should_be(state: tuple[int, float, float, float], number: int) -> None:
    """By replicas, requests that wait, that run, the share of targets missed."""
    assert wanted(*state) == number


def context(replicas: int, metrics: dict[str, list[float]] | None) -> AutoscalingContext:
    """Serve's own; of each metric what each replica said."""
    given: dict[str, Any] = dict.fromkeys(list(inspect.signature(AutoscalingContext).parameters))
    said = None if metrics is None else {
        name: {f"r{place}": value for place, value in enumerate(values)} for name, values in metrics.items()}
    return AutoscalingContext(**given | {"current_num_replicas": replicas, "aggregated_metrics": lambda: said})


@pytest.mark.parametrize(("replicas", "metrics", "number"), [
    (2, {"running": [3, 4], "waiting": [0, 0], "late": [0.0, 0.0]}, 2),
    (2, {"running": [4, 4], "waiting": [9, 0], "late": [0.0, 0.0]}, 3),
    (2, {"running": [1, 4], "waiting": [0, 0], "late": [0.0, 0.2]}, 3),
    (2, {"running": [0, 0], "waiting": [0, 0], "late": [0.0, 0.0]}, 1),
    (3, {"running": [1, 0, 1], "waiting": [0, 0, 0]}, 3),
    (1, {}, 1), (1, None, 1), (0, None, 0)])
def test_the_policy_adds_up_what_replicas_say(replicas: int, metrics: dict[str, list[float]] | None,
                                              number: int) -> None:
    """By the worst of them where targets are missed, and with nothing yet where they have only begun."""
    assert policy(context(replicas, metrics)) == (number, {})


def test_a_replica_says_how_often_targets_were_missed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Replica(ReplicaOptions({"model": str(folder), "warm_up": False}, threads=1), "one")

    async def late(**targets: float) -> float:
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, **targets)
        await one._llm.complete("Once upon a time", params)
        said = await one.record_autoscaling_stats()
        assert (said["running"], said["waiting"]) == (0.0, 0.0)
        return said["late"]

    async def main() -> None:
        assert await late() == 0.0, "who has no target misses none"
        assert await late(target_ttft_ms=0.001) == 1.0
        assert await late(target_ttft_ms=1e6) == 0.5
        assert await late(target_tpot_ms=0.0001) == pytest.approx(2 / 3)
        long_ago = [(when - LOOK_BACK_S, missed) for when, missed in one._late]
        one._late.clear()
        one._late.extend(long_ago)
        assert await late() == 0.0, "it is of no interest any more"

    try:
        asyncio.run(main())
    finally:
        one._llm.close()


@pytest.mark.parametrize(("replicas", "first"), [(None, 2), (3, 3), (9, 5)])
def test_serve_is_told_the_bounds_and_whom_to_ask(replicas: int | None, first: int) -> None:
    options = ClusterOptions(autoscale=(2, 5), replicas=replicas, threads=1)
    made = deployments(options, ReplicaOptions({}), 0).serving._bound_deployment._deployment_config
    scaling = made.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (2, first, 5)
    found = scaling.policy.get_policy()
    assert (found.__module__, found.__name__) == (policy.__module__, policy.__name__)
    assert deployments(ClusterOptions(replicas=3), ReplicaOptions({}), 0).serving._bound_deployment.num_replicas == 3
