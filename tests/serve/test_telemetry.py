"""Spans of finished requests: what they say, whose trace they continue, and that nobody waits for them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from serving import NAME, WAIT, until
from starlette.testclient import TestClient

from engine.tiny import VOCAB, tiny_engine
from paceline import LLM, SamplingParams
from paceline.async_llm import AsyncLLM
from paceline.cli.main import main
from paceline.engine.observe.timeline import Timelines
from paceline.engine.records.record import Record
from paceline.errors import ConfigError
from paceline.request import Tenant
from paceline.serve import spans, telemetry
from paceline.serve.app import create_app
from paceline.serve.options import ServeOptions
from paceline.serve.spans import Finished, Origin, span_of
from paceline.serve.telemetry import Telemetry, otlp_provider, trace_context, traces_url

ORIGIN = Origin("chat", "tiny", "chatcmpl-1")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def finished(params: SamplingParams, speculation: Any = None, end: Callable[[Any, str], None] = lambda *_: None,
             **options: Any) -> Finished:
    """A request that has run to its end on a tiny engine."""
    engine, timelines = tiny_engine(**options), Timelines()
    engine.observers.add(timelines)
    name = engine.add([(7 * i) % VOCAB for i in range(30)], params, speculation=speculation)
    record = engine.record(name)
    while record.open:
        engine.step()
        end(engine, name)
    timeline = timelines.of(record.request)
    assert timeline is not None
    return Finished(record, ORIGIN, list(timeline.events), timeline.dropped)


def test_a_request_is_a_span_with_its_phases() -> None:
    script = finished(SamplingParams(max_tokens=20, temperature=0.0)).record.emitters[0].token_ids
    one = finished(SamplingParams(max_tokens=20, temperature=0.0, seed=4, trace=True), max_prefill_chunk=16,
                   speculation={"method": "oracle", "tokens": script, "k": 3})
    span = span_of(one)
    assert span.name == "chat tiny" and [child.name for child in span.children] == ["queue", "prefill", "decode"]
    told = span.attributes
    assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.provider.name"] == "paceline"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "tiny"
    assert told["gen_ai.response.id"] == "chatcmpl-1" and told["gen_ai.response.finish_reasons"] == ["length"]
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (30, 20)
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.max_tokens"], told["gen_ai.request.seed"]) == (
        0.0, 20, 4)
    assert told["paceline.replay.path"] == "/paceline/trace?id=request-0"
    assert "error.type" not in told and span.error is None
    queue, prefill, decode = span.children
    assert prefill.attributes["paceline.prefill.chunks"] == 2 and prefill.attributes["paceline.prefill.rows"] == 30
    assert prefill.attributes["paceline.cached_tokens"] == 0 and prefill.attributes["paceline.cache_miss"]
    stats = one.record.speculation
    assert stats is not None and stats.accepted > 0
    assert decode.attributes["paceline.speculation.method"] == "oracle"
    assert decode.attributes["paceline.speculation.drafted"] == stats.drafted
    assert decode.attributes["paceline.speculation.accepted"] == stats.accepted
    assert decode.attributes["paceline.speculation.acceptance_rate"] == 1.0
    assert sum(event["paceline.step.tokens"] for _, event in decode.events) == 19
    assert sum(event.get("paceline.step.accepted", 0) for _, event in decode.events) == stats.accepted
    assert span.start == queue.start <= queue.end == prefill.start <= prefill.end == decode.start <= decode.end
    assert decode.end == span.end
    assert all(isinstance(value, str | int | float | list) for part in (span, *span.children)
               for value in part.attributes.values())


def test_steps_are_told_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MOST_EVENTS", 10)
    decode = span_of(finished(SamplingParams(max_tokens=31, temperature=0.0))).children[-1]
    assert len(decode.events) == 10 and decode.attributes["paceline.decode.steps"] == 30
    assert decode.attributes["paceline.decode.steps_left_out"] == 20


def test_preemptions_and_ends_before_the_first_token_are_told() -> None:
    def preempt(engine: Any, name: str) -> None:
        record = engine.record(name)
        if record.metrics.output_tokens == 3 and engine.scheduler.running and not record.metrics.preemptions:
            engine.scheduler.preempt(engine.scheduler.running[0])

    span = span_of(finished(SamplingParams(max_tokens=6, temperature=0.0), end=preempt))
    assert span.attributes["paceline.preemptions"] == 1
    assert any(event["paceline.step.kind"] == "preempted" for _, event in span.children[-1].events)

    engine = tiny_engine()
    name = engine.add([1, 2, 3], SamplingParams(max_tokens=6))
    engine.cancel(name)
    span = span_of(Finished(engine.take(name), ORIGIN))
    assert [child.name for child in span.children] == ["queue"]
    assert span.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert "paceline.replay.path" not in span.attributes


def test_numbers_that_no_collector_takes_are_left_out() -> None:
    """The exporter would write a traceback into the log for each, as often as a client likes."""
    params = SamplingParams(max_tokens=10**30, top_k=10**30, seed=2**64 - 1)
    told = span_of(finished(params, max_model_len=40)).attributes
    assert not {"gen_ai.request.max_tokens", "gen_ai.request.top_k", "gen_ai.request.seed"} & set(told)
    assert told["paceline.seed"] == str(2**64 - 1) and told["gen_ai.usage.output_tokens"] == 10


def test_an_error_is_named() -> None:
    one = finished(SamplingParams(max_tokens=4, allowed_token_ids=[5], logit_bias={5: -float("inf")}))
    span = span_of(one)
    assert one.record.error is not None and span.error == span.attributes["error.type"] == "EmptySupportError"


@pytest.mark.parametrize(("given", "url"), [
    (None, None), ("http://box:4318", "http://box:4318/v1/traces"), ("http://box:4318/", "http://box:4318/v1/traces"),
    ("https://box/api/traces", "https://box/api/traces")])
def test_where_spans_go(given: str | None, url: str | None) -> None:
    assert traces_url(given) == url


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match="like http://localhost:4318"):
        traces_url("localhost:4318")


def test_without_the_package_the_command_names_the_extra(monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk.trace"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["serve", "no such model", "--otel", "--port", "0"]) == 2
    assert "paceline[otel]" in capsys.readouterr().err.replace("\n", " ")


# ---------------------------------------------------------------------------------------------- with the SDK

@pytest.fixture
def exported() -> Iterator[tuple[Any, Any]]:
    """A TracerProvider, and what it exports in memory."""
    pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed (the extra 'otel')")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    yield provider, kept


def test_the_server_sends_spans_that_continue_the_clients_trace(exported: tuple[Any, Any], tiny_folder: Path) -> None:
    provider, kept = exported
    llm = AsyncLLM(engine=LLM(str(tiny_folder), deterministic=True).engine)
    secret = "a secret that only the client knows"
    body = {"model": NAME, "max_tokens": 5, "seed": 1}
    try:
        with TestClient(create_app(llm, ServeOptions(model_name=NAME), spans=provider),
                        base_url="http://localhost") as client:
            answers = [client.post("/v1/completions", json=body | {"prompt": [secret, secret + "!"], "trace": True},
                                   headers={"traceparent": PARENT, "x-request-id": "mine"}),
                       client.post("/v1/chat/completions", json=body | {
                           "messages": [{"role": "user", "content": secret}], "stream": True})]
            assert [answer.status_code for answer in answers] == [200, 200]
            until(lambda: sum(span.parent is None or span.parent.is_remote for span in kept.get_finished_spans()) == 3)
            made = kept.get_finished_spans()
            trace = client.get(next(span.attributes["paceline.replay.path"] for span in made
                                    if span.attributes.get("paceline.request.id") == "cmpl-mine#1"))
            assert trace.status_code == 200 and len(trace.json()["tokens"]) == 5
    finally:
        llm.close()
    assert not telemetry_thread_lives()
    roots = [span for span in made if "gen_ai.operation.name" in span.attributes]
    assert sorted(span.name for span in roots) == [f"chat {NAME}", f"text_completion {NAME}", f"text_completion {NAME}"]
    for span in roots:
        of_client = span.name.startswith("text")
        assert (f"{span.context.trace_id:032x}" == PARENT[3:35]) == of_client
        assert (span.parent is not None and f"{span.parent.span_id:016x}" == PARENT[36:52]) == of_client
        children = [other for other in made if other.parent is not None
                    and other.parent.span_id == span.context.span_id]
        assert sorted(child.name for child in children) == ["decode", "prefill", "queue"]
        assert all(span.start_time <= child.start_time <= child.end_time <= span.end_time for child in children)
        assert span.attributes["gen_ai.usage.output_tokens"] == 5
        assert span.kind.name == "SERVER"
    assert all("secret" not in span.to_json() for span in made)


def telemetry_thread_lives() -> bool:
    return any(thread.name == "paceline-telemetry" for thread in threading.enumerate())


def test_the_engine_waits_for_no_exporter(exported: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs costs spans, which are counted, and nothing else."""
    monkeypatch.setattr(telemetry, "MOST_WAITING", 2)
    provider, _ = exported
    go = threading.Event()
    telling = Telemetry(provider, Timelines(), lambda: 0.0, True)
    monkeypatch.setattr(telling, "_tell", lambda one: go.wait(WAIT))
    record: Record = finished(SamplingParams(max_tokens=1)).record
    for _ in range(9):
        telling.ended(record)  # would hang here
    assert 6 <= telling.dropped <= 7
    go.set()
    telling.close()
    assert not telemetry_thread_lives()


def test_a_span_that_cannot_be_made_costs_the_others_nothing(exported: tuple[Any, Any],
                                                             caplog: pytest.LogCaptureFixture) -> None:
    provider, kept = exported
    telling = Telemetry(provider, Timelines(), lambda: 0.0, True)
    one = finished(SamplingParams(max_tokens=2))
    telling.ended(finished(SamplingParams(max_tokens=2)).record)
    broken = finished(SamplingParams(max_tokens=2)).record
    broken.metrics = None  # type: ignore[assignment]
    telling.ended(broken)
    telling.ended(one.record)
    telling.close()
    assert [span.name for span in kept.get_finished_spans()].count("text_completion") == 2
    assert "could not be made" in caplog.text


def test_tenants_that_choose_the_same_id_keep_their_own_traces(exported: tuple[Any, Any]) -> None:
    """One may ask while the other's request, whose client has gone, has not ended yet."""
    provider, kept = exported
    telling = Telemetry(provider, Timelines(), lambda: 0.0, True)
    for tenant in ("a", "b"):
        telling.expect(tenant, "request-0", ORIGIN._replace(response_id=tenant))
    for tenant in ("a", "b"):
        record = finished(SamplingParams(max_tokens=1)).record
        record.request = replace(record.request, tenant=Tenant(tenant))
        telling.ended(record)
    telling.close()
    roots = [span for span in kept.get_finished_spans() if span.name == "chat tiny"]
    assert [span.attributes["gen_ai.response.id"] for span in roots] == ["a", "b"]


def test_of_headers_only_what_can_be_a_trace_is_kept() -> None:
    """They are kept until the request ends, of as many as clients send."""
    sent = {"traceparent": PARENT, "tracestate": "a=" + "b" * 60_000, "authorization": "Bearer key"}
    assert trace_context(sent) == {"traceparent": PARENT}
    assert trace_context(sent | {"tracestate": "a=b"}) == {"traceparent": PARENT, "tracestate": "a=b"}
    assert trace_context({"traceparent": "0" * 60_000}) == {}


def test_what_was_expected_and_never_came_is_bounded(exported: tuple[Any, Any],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MOST_ORIGINS", 4)
    telling = Telemetry(exported[0], Timelines(), lambda: 0.0, True)
    for index in range(20):
        telling.expect("", f"request-{index}", ORIGIN)
    assert list(telling._origins) == [("", f"request-{index}") for index in range(16, 20)]
    telling.close()


def test_spans_come_to_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter",
                        reason="the extra 'otel' is not installed")
    heard: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        telling = Telemetry(otlp_provider(f"http://127.0.0.1:{collector.server_port}"), Timelines(), lambda: 0.0, True)
        telling.ended(finished(SamplingParams(max_tokens=2)).record)
        telling.close()
        collector.shutdown()
        thread.join()
    assert [path for path, _ in heard] == ["/v1/traces"]
    assert b"gen_ai.usage.output_tokens" in heard[0][1] and b"my-service" in heard[0][1]
