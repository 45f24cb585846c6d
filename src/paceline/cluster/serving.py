"""`paceline serve --replicas`: the server in this process, its engines in others."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI

from paceline.cluster import deploy
from paceline.cluster.front import ClusterLLM
from paceline.cluster.options import ClusterOptions
from paceline.cluster.reading import FrontModel, ModelTexts, check_blocks
from paceline.cluster.replica import ReplicaOptions
from paceline.cluster.views import ClusterViews
from paceline.errors import EngineError
from paceline.serve import server
from paceline.serve.app import app_around
from paceline.serve.options import ServeOptions

HELLO_S = 60.0


def serve_replicas(options: ClusterOptions, settings: ServeOptions, engine: Mapping[str, Any], texts: ModelTexts,
                   listening: socket.socket, announce: Callable[[], None], spans: Any = None, *,
                   prefill_speculation: Any = ...) -> None:
    """Until a signal ends it. `engine`: what AsyncLLM takes; `texts`: of the same model."""
    with deploy.running_ray(options):
        cards = deploy.cards_each(engine)
        replica = ReplicaOptions(engine, None if options.threads is None and cards else options.threads_each,
                                 timelines=settings.page or spans is not None)
        made = deploy.deployments(options, replica, cards, prefill_speculation=prefill_speculation)
        llm = front(deploy.run(options, made), texts, deploy.node_address() if options.beyond else "127.0.0.1")
        server.run_app(lambda: app(llm, settings, spans), llm, settings, listening, announce)


def app(llm: ClusterLLM, settings: ServeOptions, spans: Any = None) -> FastAPI:
    return app_around(llm, ClusterViews(llm.handles), settings, spans=spans)


def front(handles: deploy.Deployments, texts: ModelTexts, host: str) -> ClusterLLM:
    """Replicas that do not fit this front, or each other, are an error now and not in the middle of a text."""
    models = _greeted(handles.serving, texts)
    for prefill in [] if handles.prefill is None else _greeted(handles.prefill, texts):
        for decode in models:
            check_blocks(prefill.facts, decode.facts)
    return ClusterLLM(handles.serving, min(models, key=lambda model: model.config.max_model_len), host,
                      handles.prefill)


def _greeted(handle: Any, texts: ModelTexts) -> list[FrontModel]:
    greetings = handle.broadcast("hello").results(timeout_s=HELLO_S)
    if not greetings:
        raise EngineError("No replica is there: their logs say why.")
    return [FrontModel(texts, facts) for _, facts in greetings]
