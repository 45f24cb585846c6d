"""Quotas of keys: requests and tokens a minute, requests at once, by a clock of the test's own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import NAME, served, until

from engine.tiny import tiny_engine
from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.request import Tenant
from paceline.serve import app
from paceline.serve.errors import ApiError
from paceline.serve.keys import Caller
from paceline.serve.keys_file import read_keys
from paceline.serve.options import ServeOptions
from paceline.serve.quotas import Bucket, Meter, Meters, Quota, QuotaGate


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(meter: Meter) -> ApiError | None:
    """What the next request hears; None: it is let in, and ends at once."""
    try:
        meter.begin()
    except ApiError as problem:
        return problem
    meter.end()
    return None


@given(events=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 40)), max_size=60))
def test_a_bucket_never_gives_more_than_its_size_and_what_flows_in(events: list[tuple[float, int]]) -> None:
    clock, taken, start = Clock(), 0, Clock.now
    bucket = Bucket(60, clock)
    for seconds, amount in events:
        clock.now += seconds
        if not bucket.seconds_until(amount):
            bucket.take(amount)
            taken += amount
        assert taken <= 60 + (clock.now - start) + 1e-6


def test_requests_a_minute(clock: Clock) -> None:
    meter = Meter(Quota(requests_per_minute=3), clock)
    assert [refused(meter) for _ in range(3)] == [None] * 3
    problem = refused(meter)
    assert problem is not None and problem.status_code == 429 and problem.code == "rate_limit_exceeded"
    assert problem.headers == {"retry-after": "20"}
    assert "3 requests a minute" in problem.detail and "20 s" in problem.detail
    clock.now += 19.9
    assert refused(meter) is not None
    clock.now += 0.2
    assert refused(meter) is None and refused(meter) is not None
    clock.now += 1000
    assert [refused(meter) is None for _ in range(4)] == [True, True, True, False], "no more than a minute's"


def test_tokens_a_minute_may_be_overdrawn_once_and_are_paid_off(clock: Clock) -> None:
    meter = Meter(Quota(tokens_per_minute=600), clock)
    assert refused(meter) is None
    meter.spend(800)
    problem = refused(meter)
    assert problem is not None and "600 tokens a minute" in problem.detail and problem.headers == {"retry-after": "21"}
    clock.now += 20.1  # to the last token
    assert refused(meter) is None


def test_requests_at_once(clock: Clock) -> None:
    meter = Meter(Quota(concurrent_requests=2), clock)
    meter.begin()
    meter.begin()
    problem = refused(meter)
    assert problem is not None and "2 requests under way" in problem.detail
    meter.end()
    assert refused(meter) is None


def test_a_refusal_costs_nothing(clock: Clock) -> None:
    meter = Meter(Quota(requests_per_minute=2, tokens_per_minute=60), clock)
    assert refused(meter) is None
    meter.spend(100)
    for _ in range(20):
        assert refused(meter) is not None
    clock.now += 42
    assert refused(meter) is None


def record(tenant: str, scheduled: float | None, output: int) -> Any:
    """Of a request with a prompt of 50 tokens."""
    return SimpleNamespace(request=SimpleNamespace(tenant=Tenant(tenant), prompt=[1] * 50),
                           metrics=SimpleNamespace(first_scheduled=scheduled, output_tokens=output))


def test_what_ended_is_counted_for_whose_it_was(clock: Clock) -> None:
    meters = Meters(clock)
    quota = Quota(tokens_per_minute=60)
    assert refused(meters.of("a", quota)) is None and refused(meters.of("b", quota)) is None
    meters.ended(record("a", 1.0, 20))
    meters.ended(record("b", None, 0))  # it never ran
    assert refused(meters.of("a", quota)) is not None and refused(meters.of("b", quota)) is None


def test_tokens_are_paid_off_from_when_they_were_used_and_not_from_the_next_request_on(clock: Clock) -> None:
    meters, quota = Meters(clock), Quota(tokens_per_minute=60)
    assert refused(meters.of("a", quota)) is None
    meters.ended(record("a", 1.0, 250))
    clock.now += 242  # 300 tokens, of which a minute's were there
    assert refused(meters.of("a", quota)) is None
    clock.now += 1000
    meters.ended(record("a", 1.0, 11))
    assert refused(meters.of("a", quota)) is not None, "what flowed in before fills no more than a minute's"
    clock.now += 3
    assert refused(meters.of("a", quota)) is None


@pytest.mark.parametrize("wrong", [0, -1, math.nan, "5", True])
def test_limits_that_make_no_sense_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="tokens_per_minute"):
        Quota(tokens_per_minute=wrong)


# ------------------------------------------------------------------ over HTTP

def ask(url: str, key: str, tokens: int = 4, **more: Any) -> httpx.Response:
    body = {"model": NAME, "prompt": [1, 2, 3, 4], "max_tokens": tokens} | more
    return httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)


@pytest.fixture
def by_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    original = app.Meters
    monkeypatch.setattr(app, "Meters", lambda _: original(clock))
    return clock


def test_each_key_has_its_own_quota(by_clock: Clock) -> None:
    with served(tiny_engine(), api_keys=("a", "b"), operator_keys=("o",), quota=Quota(requests_per_minute=2),
                key_quotas={"b": Quota(tokens_per_minute=6)}) as url:
        assert [ask(url, "a").status_code for _ in range(3)] == [200, 200, 429]
        assert ask(url, "b", stream=True).status_code == 200
        answers: list[httpx.Response] = []
        until(lambda: answers.append(ask(url, "b", tokens=1)) or answers[-1].status_code == 429)  # type: ignore
        error = answers[-1].json()["error"]
        assert error["type"] == "rate_limit_error" and error["code"] == "rate_limit_exceeded"
        assert "tokens a minute" in error["message"] and int(answers[-1].headers["retry-after"]) >= 1
        assert httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer a"}).status_code == 200
        by_clock.now += 300
        assert ask(url, "a").status_code == ask(url, "b").status_code == 200


def test_requests_at_once_are_counted_until_their_answers_end(clock: Clock) -> None:
    ended, statuses = asyncio.Event(), dict[str, int]()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["state"]["caller"].tenant.name == "slow":
            await ended.wait()
        await send({"type": "http.response.start", "status": 200})

    gate = QuotaGate(answer, Meters(clock))

    async def call(name: str, tenant: str) -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses[name] = message["status"]

        caller = Caller(Tenant(tenant), operator=False, quota=Quota(concurrent_requests=1))
        await gate({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [],
                    "state": {"caller": caller}}, None, send)  # type: ignore[arg-type]

    async def all_calls() -> None:
        first = asyncio.create_task(call("first", "slow"))
        await asyncio.sleep(0)
        await call("second", "slow")
        await call("other", "another")
        ended.set()
        await first
        await call("third", "slow")

    asyncio.run(all_calls())
    assert statuses == {"first": 200, "second": 429, "other": 200, "third": 200}


# ------------------------------------------------------------------ the file

@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def written(text: str) -> Path:
        (tmp_path / "keys.toml").write_text(text, encoding="utf-8")
        return tmp_path / "keys.toml"
    return written


def test_a_file_gives_each_key_its_own(write: Callable[[str], Path]) -> None:
    found = read_keys(write("""
        [[keys]]
        key = "alice"
        requests_per_minute = 60

        [[keys]]
        key = "root"
        operator = true
        tokens_per_minute = inf
    """), Quota(tokens_per_minute=1000))
    assert (found.clients, found.operators) == (("alice",), ("root",))
    assert found.quotas == {"alice": Quota(60, 1000), "root": Quota()}


@pytest.mark.parametrize(("text", "says"), [
    ("", "[[keys]]"), ("keys = 5", "[[keys]]"), ("[[keys]]\nname = 'a'", "no key"), ("[[keys]", "not TOML"),
    ("[[keys]]\nkey = 'secret'\nrequest = 5", "'request'"), ("[[keys]]\nkey = 'secret'\noperator = 1", "true or false"),
    ("[[keys]]\nkey = 'secret'\n[[keys]]\nkey = 'secret'", "twice"),
    ("[[keys]]\nkey = 'secret'\ntokens_per_minute = 0", "tokens_per_minute"),
])
def test_a_file_that_is_wrong_is_explained(text: str, says: str, write: Callable[[str], Path],
                                           capsys: pytest.CaptureFixture[str]) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(path, Quota())
    assert says in str(caught.value) and "secret" not in str(caught.value)
    assert main(["serve", "--port", "0", "--keys-file", str(path)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("key", [" a", "a ", ""])
def test_a_key_that_no_header_can_hold_is_refused(key: str, write: Callable[[str], Path]) -> None:
    """Spaces around a header's value are no part of it: such a key would let nobody in."""
    found = read_keys(write(f"[[keys]]\nkey = {key!r}"), Quota())
    with pytest.raises(ConfigError, match="API key"):
        ServeOptions(api_keys=found.clients)


def test_a_file_that_is_not_there_and_limits_that_are_none_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--keys-file", "nowhere.toml"]) == 2
    assert "nowhere.toml" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--requests-per-minute", "0"]) == 2
    assert "requests_per_minute" in capsys.readouterr().err
