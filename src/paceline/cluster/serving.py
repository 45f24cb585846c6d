"""`paceline serve --replicas`: the server in this process, its engines in others."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fastapi import FastAPI

from paceline.cluster import deploy
from paceline.cluster.front import ClusterLLM
from paceline.cluster.options import ClusterOptions
from paceline.cluster.reading import FrontModel, ModelTexts
from paceline.cluster.replica import ReplicaOptions
from paceline.cluster.views import ClusterViews
from paceline.errors import EngineError
from paceline.serve import server
from paceline.serve.app import app_around
from paceline.serve.hosts import is_loopback
from paceline.serve.options import ServeOptions

HELLO_S = 60.0


def serve_replicas(options: ClusterOptions, settings: ServeOptions, engine: Mapping[str, Any], texts: ModelTexts,
                   listening: socket.socket, announce: Callable[[], None], spans: Any = None) -> None:
    """Until a signal ends it. `engine`: what AsyncLLM takes; `texts`: of the same model."""
    with signals_raise(), deploy.running_ray(options):
        replica = ReplicaOptions(engine, None if options.threads is None and uses_cards(engine) else
                                 options.threads_each, timelines=settings.page or spans is not None)
        handle = deploy.run(options, replica, deploy.cards_each(engine))
        llm = front(handle, texts, mail_host(options))
        server.run_app(lambda: app(llm, settings, spans), llm, settings, listening, announce)


def app(llm: ClusterLLM, settings: ServeOptions, spans: Any = None) -> FastAPI:
    return app_around(llm, ClusterViews(llm.handle), settings, spans=spans)


def front(handle: Any, texts: ModelTexts, host: str) -> ClusterLLM:
    """Replicas that do not fit this front, or each other, are an error now and not in the middle of a text."""
    greetings = handle.broadcast("hello").results(timeout_s=HELLO_S)
    if not greetings:
        raise EngineError("No replica is there: their logs say why.")
    models = [FrontModel(texts, facts) for _, facts in greetings]
    return ClusterLLM(handle, min(models, key=lambda model: model.config.max_model_len), host)


def mail_host(options: ClusterOptions) -> str:
    """Loopback, unless replicas may be on other machines."""
    if options.ray is None or is_loopback(options.ray.rpartition(":")[0]):
        return "127.0.0.1"
    return deploy.node_address()


def uses_cards(engine: Mapping[str, Any]) -> bool:
    return deploy.cards_each(engine) > 0


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM while nothing serves yet ends this process in good order: what was started is stopped."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
