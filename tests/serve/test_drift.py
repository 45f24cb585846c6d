"""The drift watch as operators see it: metrics, the page, the command line; and as clients do not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from serving import WAIT, parse_metrics, served, until

from engine.tiny import tiny_engine
from paceline.cli import serve as command
from paceline.engine.core import Engine
from paceline.engine.decide import decider
from paceline.speculation.rules.verdict import Verdict
from paceline.watch.acceptance import AcceptanceWatch, Change

NGRAM = {"method": "ngram", "k": 3, "adaptive": False}
BODY = {"prompt": [5, 6, 7, 8] * 8, "max_tokens": 24, "temperature": 0, "speculation": NGRAM, "logprobs": 1}


def frame(http: httpx.Client) -> dict[str, Any]:
    with http.stream("GET", "/paceline/live") as lines:
        found: dict[str, Any] = next(json.loads(line[6:]) for line in lines.iter_lines() if line.startswith("data: "))
        return found


def watched_engine() -> Engine:
    return tiny_engine(watch_share=1.0)


def shadows(http: httpx.Client) -> dict[str, float]:
    return {name: value for name, value in parse_metrics(http.get("/metrics").text).items() if "watch_shadows" in name}


def test_what_was_compared_is_counted_apart() -> None:
    with served(watched_engine()) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        for served_by_now in (1, 2):  # each after the shadow of the one before, in whose way it would stand
            assert http.post("/v1/completions", json=BODY).status_code == 200
            until(lambda count=served_by_now: shadows(http).get(
                'paceline_watch_shadows_total{outcome="equal"}') == count)
        found, seen = parse_metrics(http.get("/metrics").text), frame(http)
    assert found["paceline_watch_requests_total"] == 2 and found["paceline_watch_share"] == 1.0
    assert found['paceline_watch_tokens_total{method="ngram"}'] == 48
    assert found["vllm:generation_tokens_total"] == 48 and found["paceline_requests_total"] == 2
    assert found['vllm:request_success_total{finished_reason="length"}'] == 2
    assert found["paceline_watch_shadow_tokens_total"] >= 48
    assert seen["watch"]["shadows"] == {"equal": 2} and seen["watch"]["alarms"] == []
    assert seen["totals"]["output_tokens"] == 48 and sum(second[1] for second in seen["seconds"]) == 48


def test_an_alarm_is_shown_and_the_server_goes_on_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = decider.coupled

    def credulous(parents: Any, tokens: Any, chosen: Any) -> Verdict:
        return sound(parents, tokens, [tokens[1] ^ 1, *chosen[1:]])

    with served(watched_engine()) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        plain = http.post("/v1/completions", json=BODY | {"speculation": "none"}).json()["choices"]
        monkeypatch.setattr(decider, "coupled", credulous)
        assert http.post("/v1/completions", json=BODY).json()["choices"] != plain
        until(lambda: bool(shadows(http)))
        (alarm,) = frame(http)["watch"]["alarms"]
        found = parse_metrics(http.get("/metrics").text)
        again = http.post("/v1/completions", json=BODY).json()
    assert alarm["kind"] == "text" and alarm["method"] == "ngram" and alarm["suspended"]
    assert found['paceline_watch_alarms_total{kind="text",method="ngram"}'] == 1
    assert found['paceline_speculation_suspended{method="ngram"}'] == 1
    assert again["choices"] == plain


def test_a_change_of_acceptance_is_counted_apart_from_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceptanceWatch, "observe", lambda *_: Change(False, 0.6, 0.2, 12))
    with served(watched_engine()) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        assert http.post("/v1/completions", json=BODY).status_code == 200
        until(lambda: bool(shadows(http)))
        found, seen = parse_metrics(http.get("/metrics").text), frame(http)["watch"]
    assert found['paceline_watch_acceptance_changes_total{direction="fell",method="ngram"}'] == 1
    assert not any("watch_alarms" in name or "suspended" in name for name in found) and seen["alarms"] == []
    (change,) = seen["changes"]
    assert (change["method"], change["direction"], change["before"], change["after"]) == ("ngram", "fell", 0.6, 0.2)


def test_clients_see_nothing_of_it() -> None:
    """Neither on the page nor in their lists: a shadow is nobody's request."""
    with served(watched_engine(), api_keys=("a", "b"), operator_keys=("o",)) as url:
        http = httpx.Client(base_url=url, timeout=WAIT, headers={"authorization": "Bearer a"})
        operator = httpx.Client(base_url=url, timeout=WAIT, headers={"authorization": "Bearer o"})
        with http, operator:
            assert http.post("/v1/completions", json=BODY).status_code == 200
            until(lambda: bool(shadows(operator)))
            own = frame(http)
            listed = http.get("/paceline/requests").json()["requests"]
            everybody = operator.get("/paceline/requests").json()["requests"]
    assert "watch" not in own and own["running"] == own["waiting"] == []
    assert len(listed) == len(everybody) == 1 and not any("shadow" in one["id"] for one in everybody)


def test_it_is_on_in_the_server_and_off_elsewhere() -> None:
    import inspect

    assert inspect.signature(command.serve).parameters["watch_share"].default == 0.01
    assert tiny_engine().config.watch_share == 0.0
