"""Names a server answers to: a page whose name was pointed at this machine gets nothing from a server without keys."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest
from serving import WAIT, ServerThread, served

from engine.tiny import tiny_engine
from paceline.serve.hosts import Hosts, is_loopback, name_of, trusted_hosts
from paceline.serve.options import ServeOptions

PATHS = ("/v1/models", "/health", "/", "/page/app.js", "/paceline/requests", "/metrics", "/nothing")


def test_a_server_without_keys_answers_to_this_machines_names_alone(server: ServerThread) -> None:
    port = server.url.rpartition(":")[2]
    with httpx.Client(base_url=server.url, timeout=WAIT) as http:
        for name in ("localhost", "LOCALHOST", f"localhost:{port}", "127.0.0.1", f"127.0.0.1:{port}", "[::1]",
                     f"[::1]:{port}"):
            assert http.get("/v1/models", headers={"host": name}).status_code == 200, name
        for name in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example", "",
                     "192.168.1.7", "0.0.0.0", "[::2]", "[::1].evil.example", "[::1]:80.evil.example"):
            for path in PATHS:
                refused = http.get(path, headers={"host": name})
                assert refused.status_code == 403, (name, path)
                told = refused.json()["error"]
                assert told["code"] == "host_not_allowed" and told["type"] == "permission_error"
                assert set(told) == {"message", "type", "param", "code"} and refused.headers["x-request-id"]
        refused = http.post("/v1/completions", json={"prompt": "a"}, headers={"host": "evil.example"})
        assert refused.status_code == 403
    found = server.metrics()
    assert found['paceline_http_responses_total{status="403"}'] >= 10 * len(PATHS) + 1


def test_an_operator_may_name_others() -> None:
    with (served(tiny_engine(), allowed_hosts=("Box.example", "10.0.0.5")) as url,
          httpx.Client(base_url=url, timeout=WAIT) as http):
        for name in ("box.example", "box.example:8080", "10.0.0.5", "localhost"):
            assert http.get("/v1/models", headers={"host": name}).status_code == 200, name
        assert http.get("/v1/models", headers={"host": "other.example"}).status_code == 403


def test_with_a_key_any_name_will_do() -> None:
    with served(tiny_engine(), api_keys=("k",)) as url:
        answer = httpx.get(f"{url}/v1/models", headers={"host": "box.example", "authorization": "Bearer k"},
                           timeout=WAIT)
        assert answer.status_code == 200


@pytest.mark.parametrize("options, checked", [
    ({}, True), ({"host": "localhost"}, True), ({"host": "::1"}, True), ({"host": "127.0.0.9"}, True),
    ({"api_keys": ("k",)}, False), ({"host": "0.0.0.0"}, False), ({"host": "0.0.0.0", "api_keys": ("k",)}, False),
    ({"host": "0.0.0.0", "allowed_hosts": ("box.example",)}, True),
])
def test_who_is_checked(options: dict[str, object], checked: bool) -> None:
    settings = ServeOptions(**options)  # type: ignore[arg-type]
    trusted = trusted_hosts(settings)
    assert bool(trusted) == checked
    assert not checked or settings.host in trusted


def test_names_in_one_spelling() -> None:
    assert [name_of(host) for host in ("LocalHost:80", "[::1]:80", "::1", "a.example.", "10.0.0.1:1")] == [
        "localhost", "::1", "::1", "a.example", "10.0.0.1"]
    assert is_loopback("127.0.0.1") and is_loopback("::1") and not is_loopback("nowhere.invalid")
    assert not is_loopback("a..b")
    for host in ("[::1].evil.example", "[::1]:", "[::1]:80x", "[::1]]", "[[::1]"):
        assert name_of(host) != "::1", host


@pytest.mark.parametrize("sent, status", [
    (b"GET /health HTTP/1.0\r\n\r\n", 200), (b"GET /health HTTP/1.0\r\nhost: localhost\r\n\r\n", 200),
    (b"GET /health HTTP/1.0\r\nhost: evil.example\r\n\r\n", 403), (b"GET /health HTTP/1.0\r\nhost:\r\n\r\n", 403),
])
def test_a_probe_may_leave_the_name_out(server: ServerThread, sent: bytes, status: int) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), WAIT) as client:
        client.sendall(sent)
        assert client.makefile("rb").readline().split()[1] == b"%d" % status


def test_two_names_are_refused() -> None:
    statuses: list[int] = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    async def never(*call: Any) -> None:
        raise AssertionError("let through")

    scope = {"type": "http", "method": "GET", "headers": [(b"host", b"localhost"), (b"host", b"localhost")]}
    asyncio.run(Hosts(never, ["localhost"])(scope, never, send))
    assert statuses[0] == 403
