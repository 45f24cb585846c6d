"""Replicas as a Ray Serve application, and Ray itself where nobody has started one."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from paceline import errors
from paceline.cluster.environment import check_ray
from paceline.cluster.family import descendants, end, ends_with_signals
from paceline.cluster.options import ClusterOptions
from paceline.cluster.replica import Replica, ReplicaOptions
from paceline.cluster.roles import DECODE, PREFILL, DecodeReplica, PrefillReplica
from paceline.cluster.transfer.chosen import TransferOptions
from paceline.errors import ConfigError, EngineError, PacelineError

try:
    import ray

    check_ray(ray.__version__)
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
except ImportError as missing:
    raise ConfigError(f"Replicas need Ray, and {missing.name!r} is not installed: pip install 'paceline[cluster]'."
                      ) from None

from paceline.cluster.router import ReplicaRouter

log = logging.getLogger("paceline.cluster")
OBJECT_STORE = 80 << 20
"""Bytes of a Ray of our own: requests and answers are no objects of that kind."""
MOST_ONGOING = 10_000
"""Orders of a replica at once. The engine's own queue says when it is full."""
REACH_S = 5.0
PUBLISHED_S = 1.0
"""How often replicas say what they hold."""
_NAMED = re.compile(r"paceline\.errors\.(\w+): (.*)")


class Deployments(NamedTuple):
    """Of an application: as Serve is to run them, or their handles."""

    serving: Any
    """They carry out orders."""
    prefill: Any = None
    """They compute prompts for those; None: each its own."""


def deployments(options: ClusterOptions, replica: ReplicaOptions, cards: float, *,
                prefill_speculation: Any = ...) -> Deployments:
    """`cards`: of each replica. `prefill_speculation`: of prefill replicas; ...: as the others'."""
    if not options.apart:
        return Deployments(_made(Replica, "replica", options, cards).bind(replica))
    if not replica.engine.get("enable_prefix_caching", True):
        raise ConfigError("Blocks are handed over from prefix cache to prefix cache: leave --no-prefix-caching out, or "
                          "use --replicas.")
    transfer = TransferOptions(options.transfer, options.token, beyond=options.beyond)
    engine = dict(replica.engine)
    if prefill_speculation is not ...:
        engine["speculation"] = prefill_speculation
    threads = replica.threads if options.prefill_threads is None else options.prefill_threads
    prefill = _made(PrefillReplica, PREFILL, options, cards).bind(
        replace(replica, engine=engine, threads=threads, role=PREFILL), transfer)
    return Deployments(_made(DecodeReplica, DECODE, options, cards).bind(
        replace(replica, role=DECODE), transfer, prefill), prefill)


def _made(kind: type[Replica], name: str, options: ClusterOptions, cards: float) -> Any:
    prefills = name == PREFILL
    scale: dict[str, Any] = {"num_replicas": options.prefill_replicas if prefills else options.serving}
    if options.autoscale is not None:
        fewest, most = options.autoscale
        scale = {"autoscaling_config": AutoscalingConfig(
            min_replicas=fewest, max_replicas=most, initial_replicas=min(max(options.serving, fewest), most),
            policy=AutoscalingPolicy(policy_function="paceline.cluster.autoscaling:policy"))}
    threads = options.prefill_threads_each if prefills else options.threads_each * options.ranks
    routing = {"routing": options.routing, "handed_over": name == DECODE}
    return serve.deployment(
        kind, name=name, max_ongoing_requests=MOST_ONGOING, max_constructor_retry_count=1,
        ray_actor_options={"num_cpus": threads, "num_gpus": cards},
        graceful_shutdown_timeout_s=options.drain_s, graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0, health_check_timeout_s=30.0,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        request_router_config=RequestRouterConfig(
            request_router_class=ReplicaRouter, request_router_kwargs=routing,
            request_routing_stats_period_s=PUBLISHED_S), **scale)


@contextmanager
def running_ray(options: ClusterOptions) -> Iterator[None]:
    """Ray, found or started; what was started is stopped. Before one is: environment.set_for_own_ray()."""
    logging.getLogger("ray").setLevel(logging.WARNING)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if options.ray is not None:
        _join(options.ray)
        try:
            serve.start(proxy_location="Disabled")  # unless it runs already: then this changes nothing
            yield
        finally:
            with suppress(Exception):
                serve.delete(options.name)
            ray.shutdown()
        return
    try:
        # It puts a handler for SIGTERM of its own in place, which raises SystemExit.
        ray.init(address="local", include_dashboard=False, num_cpus=max(options.cores, os.cpu_count() or 1),
                 object_store_memory=OBJECT_STORE, log_to_driver=False, configure_logging=False,
                 _node_ip_address="127.0.0.1")
    except BaseException as problem:
        end(descendants())
        if not isinstance(problem, Exception):
            raise
        raise ConfigError(f"Ray could not be started on this machine ({problem}): `ray start --head` says more, and "
                          "--ray uses one that runs.") from problem
    try:
        with ends_with_signals():
            serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
            yield
    finally:
        family = descendants()
        ray.shutdown()
        end(family)


def _join(address: str) -> None:
    """An existing cluster. One that is not there is told at once: Ray itself would try for long."""
    if address != "auto" and "://" not in address:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"--ray takes an address such as 10.0.0.5:6379, or auto, got {address!r}.")
        try:
            socket.create_connection((host, int(port)), REACH_S).close()
        except OSError as problem:
            raise ConfigError(f"There is no Ray cluster at {address} ({problem.strerror or problem}): start one with "
                              "`ray start --head`, or leave --ray out to have one started here.") from None
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as problem:
        raise ConfigError(f"The Ray cluster at {address} cannot be joined ({problem}): check the address, that both "
                          "have the same versions of Ray and Python, and RAY_AUTH_TOKEN.") from problem


def run(options: ClusterOptions, made: Deployments) -> Deployments:
    """The replicas, started: handles of them. What kept one from starting is raised as it was raised there."""
    try:
        serving = serve.run(made.serving, name=options.name, route_prefix=None)
        return Deployments(serving, None if made.prefill is None else serve.get_deployment_handle(PREFILL,
                                                                                                  options.name))
    except RuntimeError as problem:
        message = str(problem)
        with suppress(Exception):
            told = [one.message for one in serve.status().applications[options.name].deployments.values()]
            message = next((one for one in told if _NAMED.search(one)), max(told, key=len)) or message
        with suppress(Exception):
            serve.delete(options.name)
        raise _told(message) from None


def _told(message: str) -> PacelineError:
    """The sentence within what Serve says of a replica that did not start."""
    found = _NAMED.findall(message)
    if found:
        name, sentence = found[-1]
        kind = getattr(errors, name, None)
        return kind(sentence) if isinstance(kind, type) and issubclass(kind, PacelineError) else EngineError(sentence)
    return EngineError(f"A replica did not start. {message}")


def cards_each(engine: Mapping[str, Any]) -> float:
    """A card for each rank of each replica, where the cluster has any and the CPU is not asked for."""
    if engine.get("device", "auto") == "cpu" or not ray.cluster_resources().get("GPU"):
        return 0
    return int(engine.get("tensor_parallel_size", 1))


def node_address() -> str:
    """Of this machine, as other nodes of the cluster know it."""
    return str(ray.util.get_node_ip_address())
