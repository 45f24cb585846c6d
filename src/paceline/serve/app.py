"""The application: endpoints, the page, and what surrounds them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from paceline import __version__
from paceline.async_llm import AsyncLLM
from paceline.engine.observe.timeline import Timelines
from paceline.engine.records.record import Record
from paceline.serve import chat, completions, errors, lag, live, system
from paceline.serve.calls import Service
from paceline.serve.choosing import Leases
from paceline.serve.hosts import Hosts, trusted_hosts
from paceline.serve.house import House
from paceline.serve.keys import ApiKeys
from paceline.serve.llm import ServedLLM
from paceline.serve.metrics import ServerMetrics
from paceline.serve.middleware import BodyLimit, Failures, RequestIds
from paceline.serve.options import ServeOptions
from paceline.serve.page import mount_page
from paceline.serve.quotas import LOADING, METERED, Meters, QuotaGate
from paceline.serve.routes import docs, embeddings, llamacpp, messages, ollama, responses
from paceline.serve.several import Several
from paceline.serve.spellings import Spellings
from paceline.serve.telemetry import Telemetry
from paceline.serve.views import EngineViews, Views

ROUTERS = (completions.router, chat.router, responses.router, embeddings.router, messages.router, ollama.router,
           llamacpp.router, system.router)


def create_app(llm: AsyncLLM, options: ServeOptions, clock: Callable[[], float] = time.monotonic,
               spans: Any = None) -> FastAPI:
    """Around an engine in this process. `spans`: OpenTelemetry's TracerProvider, where spans are wanted."""
    timelines = Timelines()
    if options.page or spans is not None:
        llm.engine.observers.add(timelines)
    return app_around(llm, EngineViews(llm, timelines), options, clock, spans)


def app_around(llm: ServedLLM, views: Views, options: ServeOptions, clock: Callable[[], float] = time.monotonic,
               spans: Any = None) -> FastAPI:
    """The caller closes `llm`."""
    metrics = ServerMetrics(options.model_name)
    meters = Meters(clock)
    telemetry = None if spans is None else Telemetry(spans, views.timelines, views.clock, options.page)

    def ended(record: Record) -> None:
        metrics.ended(record)
        meters.ended(record)
        if telemetry is not None:
            telemetry.ended(record)

    llm.on_end = ended
    return _app_of(Service(llm, views, options, metrics, telemetry), meters, llm.engine.config.max_model_len)


def several_app(several: Several) -> FastAPI:
    """Around models that are loaded when they are asked for. The caller closes `several.llm`."""
    app = _app_of(several, several.meters, None)
    app.state.several = several
    return app


def _app_of(house: House, meters: Meters, max_model_len: int | None) -> FastAPI:
    """All state hangs on the app: app.state.llm, .options, .service, .several."""
    options, metrics, telemetry = house.options, house.metrics, house.telemetry

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(lag.watch(metrics.lag))
        house.begin()
        yield
        watching.cancel()
        if telemetry is not None:
            await asyncio.to_thread(telemetry.close)

    # FastAPI's own pages for its documentation fetch scripts from elsewhere; the document itself is at /openapi.json.
    app = FastAPI(title="Paceline", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.llm = house.llm
    app.state.options = options
    app.state.service = house
    app.state.several = None
    app.state.started = int(time.time())
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)
    app.include_router(docs.router)
    if options.page:
        app.include_router(live.router)
        live.attach(app)
        mount_page(app)
    # The last one added is the outermost.
    if isinstance(house, Several):
        app.add_middleware(Leases)
    app.add_middleware(BodyLimit, limit=options.body_limit(max_model_len))
    app.add_middleware(QuotaGate, meters=meters, paths=METERED | LOADING if isinstance(house, Several) else METERED)
    app.add_middleware(ApiKeys, options=options)
    app.add_middleware(Spellings)
    app.add_middleware(Failures)
    if options.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=options.cors_origins, allow_methods=["GET", "POST", "DELETE"],
                           allow_headers=["*"], expose_headers=["x-request-id"])
    if trusted := trusted_hosts(options):
        app.add_middleware(Hosts, trusted=trusted)
    app.add_middleware(RequestIds, metrics=metrics)
    return app
