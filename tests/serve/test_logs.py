"""The logs of requests that do not end well say whose they were, under the id that the client knows."""

from __future__ import annotations

import json
import logging
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import WAIT, ServerCommand, events, served, slowed, until
from test_failures import broken_once

from engine.tiny import tiny_engine
from paceline.serve.logs import JsonLines, TextLines

LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}


def said(caplog: pytest.LogCaptureFixture, request_id: str) -> list[str]:
    """What was logged under an id, the access log aside."""
    return [record.getMessage() for record in caplog.records
            if getattr(record, "request_id", None) == request_id and record.name != "paceline.access"]


def test_ends_are_logged_under_their_ids(caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine()
    caplog.set_level(logging.INFO)
    with served(engine) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        def ask(name: str, **more: Any) -> httpx.Response:
            return http.post("/v1/completions", json=LONG | more, headers={"x-request-id": name})

        assert ask("late", timeout_s=0.05).json()["choices"][0]["paceline"]["finish_reason"] == "timeout"
        broken_once(engine)
        assert ask("broken").status_code == 500
        slowed(engine)
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "provenance": True},
                         headers={"x-request-id": "gone"}) as stream:
            next(events(stream))
        assert ask("fine", max_tokens=2).status_code == 200
        until(lambda: said(caplog, "gone"))
    assert said(caplog, "late") == ["a request's deadline passed"]
    assert said(caplog, "gone") == ["the client has gone: its request is cancelled"]
    assert said(caplog, "fine") == []
    [failed] = said(caplog, "broken")
    assert failed.startswith("a request failed: The engine could not run") and "no room" in failed
    [step] = [record for record in caplog.records if hasattr(record, "request_ids")]
    assert step.request_ids == ["cmpl-broken"] and step.exc_info
    assert json.loads(JsonLines().format(step))["request_ids"] == ["cmpl-broken"]
    assert " [cmpl-broken]\n" in TextLines().format(step)


def test_a_drain_says_whom_it_ends(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ServerCommand(monkeypatch, tiny_folder, "--drain", "0.2", "--log-format", "json") as server:
        body = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers={"x-request-id": "long"},
                          timeout=WAIT) as stream:
            chunks = events(stream)
            next(chunks)
            server.signal(signal.SIGTERM)
            assert list(chunks)[-1]["error"]["code"] == "draining"
        assert server.wait() == 0
    lines = [json.loads(line) for line in server.log().splitlines()]
    assert [line["request_ids"] for line in lines if "request_ids" in line] == [["cmpl-long"]] * 2
    assert [line["call_id"] for line in lines if "the server leaves" in line["message"]] == ["cmpl-long"]
