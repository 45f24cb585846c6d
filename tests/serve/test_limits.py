"""What a client may ask for: each dear thing is bounded, and the refusal says what the operator may raise."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serving import WAIT, served

from engine.tiny import tiny_engine
from paceline.errors import ConfigError, RequestError
from paceline.request import SamplingParams
from paceline.sampling.setup import Setup
from paceline.sampling.trace import Trace
from paceline.serve.limits import ClientLimits
from paceline.serve.options import ServeOptions
from paceline.serve.params import chat_params, completion_params
from paceline.serve.schema import ChatBody, CompletionBody
from paceline.serve.stories import told_trace
from paceline.speculation.spec import BUILDERS, parse

LOW = ClientLimits(max_samples=8, max_output_tokens=50, max_n=4, max_beams=3, max_logprobs=2, max_draft_tokens=8,
                   max_priority=5)
HIGH = ClientLimits(max_n=128, max_beams=64, max_logprobs=100, max_draft_tokens=1024, max_priority=100)


@pytest.mark.parametrize("asked, param, option", [
    ({"n": 5}, "n", "--max-n"), ({"best_of": 5}, "best_of", "--max-n"),
    ({"use_beam_search": True, "n": 4}, "use_beam_search", "--max-beams"),
    ({"prompt": ["x"] * 3, "n": 3}, "n", "--max-samples"), ({"max_tokens": 51}, "max_tokens", "--max-output-tokens"),
    ({"logprobs": 3}, "logprobs", "--max-logprobs"), ({"priority": 6}, "priority", "--max-priority"),
    ({"speculation": {"method": "ngram", "k": 9}}, "speculation", "--max-draft-tokens"),
    ({"speculation": {"method": "merge", "drafters": [{"method": "ngram", "nodes": 9}]}}, "speculation",
     "--max-draft-tokens"),
    ({"speculation": "precision"}, "speculation", "--allow-speculation precision"),
])
def test_what_is_dear_is_bounded_and_the_refusal_names_the_option(asked: dict[str, Any], param: str,
                                                                  option: str) -> None:
    body = CompletionBody.model_validate({"prompt": "x", **asked})

    def ask(limits: ClientLimits) -> None:
        limits.check(completion_params(body, limits), len(body.prompt))
        if body.speculation is not None:
            limits.speculation(body.speculation, None)

    with pytest.raises(RequestError) as caught:
        ask(LOW)
    assert caught.value.param == param and option in str(caught.value)
    if option.startswith("--max"):
        ask(HIGH)


def test_a_chat_has_the_same_limits() -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "logprobs": True,
                                    "top_logprobs": 3})
    with pytest.raises(RequestError, match="--max-logprobs"):
        chat_params(body, LOW, {})


@pytest.mark.parametrize("priority", [-101, 101, 1 << 40])
def test_priorities_have_bounds(priority: int) -> None:
    with pytest.raises(RequestError) as caught:
        ClientLimits().check(SamplingParams(priority=priority), 1)
    assert caught.value.param == "priority"


@pytest.mark.parametrize("keys, most", [((), 100), (("a",), 100), (("a", "b"), 0)])
def test_no_key_gets_ahead_of_others_by_asking(keys: tuple[str, ...], most: int) -> None:
    options = ServeOptions(api_keys=keys)
    options.check(SamplingParams(priority=most), 1)
    options.check(SamplingParams(priority=-100), 1)
    with pytest.raises(RequestError, match="--max-priority"):
        options.check(SamplingParams(priority=most + 1), 1)
    ServeOptions(api_keys=keys, max_priority=7).check(SamplingParams(priority=7), 1)


DEAR = ("rest", "draft", "skip", "exit", "precision", "oracle", "wrong")


@pytest.mark.parametrize("method", BUILDERS)
@pytest.mark.parametrize("wish", [
    lambda method: method, lambda method: {"method": method},
    lambda method: {"method": "merge", "drafters": ["ngram", method]},
    lambda method: {"method": "auto", "drafters": [{"method": "merge", "drafters": [{"method": method}]}]},
    lambda method: {"method": "cascade", "drafter": "ngram", "by": method},
])
def test_methods_that_others_pay_for_need_to_be_allowed_by_name(method: str, wish: Any) -> None:
    if method in DEAR:
        with pytest.raises(RequestError, match=f"--allow-speculation {method}"):
            ClientLimits().speculation(wish(method), None)
    else:
        assert ClientLimits().speculation(wish(method), None) is not None
    assert ClientLimits(allow_speculation=("default", method)).speculation(wish(method), None) is not None
    with pytest.raises(RequestError, match="--allow-speculation"):
        ClientLimits(allow_speculation=("none",)).speculation(wish(method), None)


def test_what_the_server_drafts_with_may_be_named_but_not_changed() -> None:
    """Other options would have other weights made."""
    own = parse({"method": "auto", "drafters": ["ngram", {"method": "precision", "bits": 8}]})
    limits = ClientLimits()
    assert limits.speculation({"method": "precision", "bits": 8, "k": 3}, own) is not None
    for wish in ("precision", {"method": "precision", "bits": 4}):
        with pytest.raises(RequestError, match="--allow-speculation precision"):
            limits.speculation(wish, own)


def test_a_name_alone_stands_for_what_the_server_has_loaded() -> None:
    own = parse({"method": "draft", "model": "/models/small", "k": 3})
    assert ClientLimits().speculation("draft", own) is own
    with pytest.raises(RequestError, match="--allow-speculation draft"):
        ClientLimits().speculation({"method": "draft"}, own)
    ngram = ClientLimits().speculation("ngram", parse({"method": "ngram", "max_n": 7}))
    assert ngram is not None and not ngram.options


def test_files_need_an_allowance_of_their_own() -> None:
    wish = {"method": "draft", "model": "/models/small"}
    for allowed in (("default",), ("default", "draft")):
        with pytest.raises(RequestError, match="names a file"):
            ClientLimits(allow_speculation=allowed).speculation(wish, None)
    assert ClientLimits(allow_speculation=("draft", "files")).speculation(wish, None) is not None


def test_default_sizes_of_drafts_bend_to_the_limit() -> None:
    wanted = LOW.speculation("ngram", None)
    assert wanted is not None and (wanted.k, wanted.nodes) == (8, 8)
    kept = ClientLimits().speculation({"method": "ngram", "k": 3, "adaptive": False}, None)
    assert kept is not None and (kept.k, kept.nodes, kept.adaptive) == (3, 64, False)


@pytest.mark.parametrize("bad", [{"max_n": 0}, {"max_beams": 0}, {"max_logprobs": -1}, {"max_draft_tokens": 0},
                                 {"max_priority": 101}, {"allow_speculation": ("nonsense",)}])
def test_limits_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ClientLimits(**bad)


def test_limits_hold_over_http() -> None:
    with served(tiny_engine(), max_n=2) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        body: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 1}
        assert http.post("/v1/completions", json=body | {"n": 2}).status_code == 200
        for asked, param in (({"n": 3}, "n"), ({"speculation": "precision"}, "speculation"),
                             ({"speculation": {"method": "oracle", "tokens": [1]}}, "speculation")):
            answer = http.post("/v1/completions", json=body | asked)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        offered = http.get("/paceline/about").json()["methods"]
        assert "ngram" in offered and "precision" not in offered
    with served(tiny_engine(), allow_speculation=("default", "oracle", "precision")) as url:
        answer = httpx.post(f"{url}/v1/completions", timeout=WAIT,
                            json=body | {"speculation": {"method": "oracle", "tokens": [1]}})
        assert answer.status_code == 200
        assert "precision" in httpx.get(f"{url}/paceline/about", timeout=WAIT).json()["methods"]


def test_a_trace_tells_nothing_of_where_files_lie() -> None:
    trace = Trace(Setup(model="m"), [1], SamplingParams(), 0, speculation={
        "method": "merge", "drafters": ["ngram", {"method": "draft", "model": "/srv/secret"},
                                        {"method": "rest", "datastore": "/srv/store"}], "k": 4})
    told = told_trace(trace)
    assert "/srv" not in str(told) and told["speculation"]["k"] == 4
    assert told["speculation"]["drafters"][1] == {"method": "draft"}
    assert told_trace(Trace(Setup(model="m"), [1], SamplingParams(), 0))["speculation"] is None
