"""Telemetry: spans of finished requests to an OpenTelemetry collector. The engine never waits for it."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from paceline import __version__
from paceline.engine.observe.timeline import Timelines
from paceline.engine.records.record import Record
from paceline.errors import ConfigError
from paceline.serve.spans import Finished, Origin, Span, span_of

log = logging.getLogger("paceline.serve")

MOST_WAITING = 1024
"""Finished requests that wait to be told; further ones are dropped, and counted in the log."""
MOST_ORIGINS = 8192
LEAVING_S = 3.0
"""How long what is left may take to be sent when the server leaves."""
HEADERS = ("traceparent", "tracestate")
LONGEST_HEADER = 1024
"""Characters: twice what W3C asks everybody to hand on."""
UNKNOWN = Origin("text_completion", "", "")


class Telemetry:
    """Takes finished requests in the engine's thread, makes spans of them in its own.

    An exporter sends them in batches in yet another thread, from a bounded queue (OTEL_BSP_* variables size it).
    """

    def __init__(self, provider: Any, timelines: Timelines, clock: Callable[[], float], replayable: bool) -> None:
        """`provider`: the SDK's TracerProvider. `clock`: the engine's. `replayable`: the server gives traces out."""
        self.dropped = 0
        self._provider = provider
        self._tracer = provider.get_tracer("paceline", __version__)
        self._timelines = timelines
        self._clock = clock
        self._replayable = replayable
        self._origins: OrderedDict[tuple[str, str], Origin] = OrderedDict()
        """By tenants and the engine's names of requests, which are made of what clients choose; of one that was never
        admitted it stays until there are too many."""
        self._lock = threading.Lock()
        self._waiting: queue.Queue[Finished | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="paceline-telemetry", daemon=True)
        self._thread.start()

    def expect(self, tenant: str, request_id: str, origin: Origin) -> None:
        """A request is about to be admitted. In the event loop's thread."""
        with self._lock:
            self._origins[tenant, request_id] = origin
            while len(self._origins) > MOST_ORIGINS:
                self._origins.popitem(last=False)

    def ended(self, record: Record, timelines: Timelines | None = None) -> None:
        """In the engine's thread, which has better to do than to wait. `timelines`: of that engine, where there are
        several."""
        request = record.request
        with self._lock:
            origin = self._origins.pop((request.tenant.name, request.id), UNKNOWN)
        try:
            timeline = (timelines or self._timelines).of(request)
            self._waiting.put_nowait(Finished(record, origin) if timeline is None else
                                     Finished(record, origin, list(timeline.events), timeline.dropped))
        except queue.Full:
            if not self.dropped:
                log.warning("spans are made slower than requests end: some are dropped")
            self.dropped += 1

    def close(self) -> None:
        """Send what is left, as far as there is time for it."""
        try:
            self._waiting.put(None, timeout=LEAVING_S)
        except queue.Full:
            return
        self._thread.join(LEAVING_S)

    def _work(self) -> None:
        while (finished := self._waiting.get()) is not None:
            try:
                self._tell(finished)
            except Exception as problem:
                log.error("the spans of request %s could not be made", finished.record.request.id, exc_info=problem)
        self._provider.shutdown()

    def _tell(self, finished: Finished) -> None:
        from opentelemetry import propagate

        offset = time.time_ns() - int(self._clock() * 1e9)  # the engine's clock knows no date
        context = propagate.extract(dict(finished.origin.headers))
        _emit(self._tracer, span_of(finished, self._replayable), offset, context)


def _emit(tracer: Any, span: Span, offset: int, context: Any, root: bool = True) -> None:
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

    def at(seconds: float) -> int:
        return offset + int(seconds * 1e9)

    made = tracer.start_span(span.name, context, SpanKind.SERVER if root else SpanKind.INTERNAL, span.attributes,
                             start_time=at(span.start))
    for when, attributes in span.events:
        made.add_event("step", attributes, at(when))
    if span.error is not None:
        made.set_status(Status(StatusCode.ERROR, span.error))
    inner = set_span_in_context(made, context)
    for child in span.children:
        _emit(tracer, child, offset, inner, root=False)
    made.end(at(span.end))


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """Of an HTTP call's headers those that say whose trace it continues."""
    found = {name: headers.get(name, "") for name in HEADERS}
    return {name: value for name, value in found.items() if 0 < len(value) <= LONGEST_HEADER}


def otlp_provider(endpoint: str | None) -> Any:
    """A TracerProvider that sends by OTLP over HTTP. What `endpoint` leaves open, and all else, is said by the usual
    OTEL_* variables. A ConfigError where that cannot be."""
    url = traces_url(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as missing:
        raise ConfigError(f"--otel needs OpenTelemetry, and {missing.name!r} is not installed: pip install "
                          "'paceline[otel]'.") from None
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "paceline"}
    provider = TracerProvider(resource=Resource.create({**named, "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


def traces_url(endpoint: str | None) -> str | None:
    """Where traces go: an address without a path is a collector's, which takes them at /v1/traces."""
    if endpoint is None:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--otel-endpoint must be an address like http://localhost:4318, got {endpoint!r}.")
    return endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"
