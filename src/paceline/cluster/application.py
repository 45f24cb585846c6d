"""The whole as a Ray Serve application: `serve run paceline.cluster:app model=... replicas=2`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from fastapi import FastAPI
from ray import serve

from paceline.cluster import deploy
from paceline.cluster.front import COMING_S
from paceline.cluster.options import ClusterOptions, read_autoscale
from paceline.cluster.reading import ModelTexts
from paceline.cluster.replica import ReplicaOptions
from paceline.cluster.serving import app as front_app
from paceline.cluster.serving import front
from paceline.cluster.views import GONE
from paceline.errors import ConfigError, EngineError
from paceline.serve.options import ServeOptions

OF_CLUSTER = ("replicas", "prefill_replicas", "decode_replicas", "transfer", "routing", "autoscale", "threads",
              "prefill_threads", "drain_s")
FRONT_DRAIN_S = 3600.0
"""Serve replaces the front with every deployment, and so long the old one may take to finish its clients' streams."""
OF_SERVER = tuple(one.name for one in fields(ServeOptions) if one.name not in ("host", "port", "drain_s"))


class Front:
    """The ingress: the same application as `paceline serve` has, behind Serve's HTTP proxy."""

    async def __init__(self, serving: Any, prefill: Any, model: str | None,  # type: ignore[misc]
                       settings: ServeOptions, chat_template: str | None = None) -> None:
        def begin() -> Any:
            texts, until = ModelTexts.read(model, chat_template=chat_template), time.monotonic() + COMING_S
            while True:
                try:
                    return front(deploy.Deployments(serving, prefill), texts, deploy.node_address())
                except (*GONE, EngineError):  # Serve is about to start them, or to replace them
                    if time.monotonic() > until:
                        raise
                    time.sleep(1.0)

        self._llm = await asyncio.to_thread(begin)
        self._settings = settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        return front_app(self._llm, self._settings)


def app(arguments: dict[str, Any]) -> Any:
    """Takes what `paceline serve` and AsyncLLM take, by their Python names; values may be JSON. `cards`: of each
    replica; by default one for each of its ranks, where this machine has any: the cluster is not asked yet when this is
    called. `front_drain_s`: see FRONT_DRAIN_S."""
    given = {name: _read(value) for name, value in arguments.items()}
    cluster = {name: given.pop(name) for name in OF_CLUSTER if name in given}
    if "autoscale" in cluster:
        cluster["autoscale"] = read_autoscale(str(cluster["autoscale"]))
    settings = {name: given.pop(name) for name in OF_SERVER if name in given}
    prefill_speculation = given.pop("prefill_speculation", ...)
    front_drain_s = float(given.pop("front_drain_s", FRONT_DRAIN_S))
    ranks = given.get("tensor_parallel_size", 1)
    options = ClusterOptions(ray="auto", ranks=ranks, **cluster)
    model = given.get("model")
    served = ServeOptions(**{"model_name": model or "model", **_tuples(settings)})
    engine: dict[str, Any] = {"capture": "start", "speculation": "auto", **given}
    cards = engine.pop("cards", ranks * (engine.get("device", "auto") != "cpu" and torch.cuda.is_available()))
    made = deploy.deployments(options, ReplicaOptions(engine, options.threads_each, served.page), cards,
                              prefill_speculation=prefill_speculation)
    # A new front takes requests before the old one, which ends when it has none left, stops taking them.
    ingress = serve.deployment(serve.ingress()(Front), name="front", max_ongoing_requests=served.max_connections,
                               max_surge_percent=100, graceful_shutdown_timeout_s=front_drain_s,
                               graceful_shutdown_wait_loop_s=0.5, ray_actor_options={"num_cpus": 0})
    return ingress.bind(made.serving, made.prefill, model, served, engine.get("chat_template"))


def _read(value: Any) -> Any:
    """`serve run` gives texts."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    if "quota" in settings or "key_quotas" in settings:
        raise ConfigError("Quotas are for `paceline serve`, with --ray too: an application has none.")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
