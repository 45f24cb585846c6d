"""What one key's holder learns of another's texts: nothing, from no answer and no page."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from serving import WAIT, parse_metrics, served, until

from engine.tiny import tiny_engine

LETTER = [(i * 17 + 5) % 97 for i in range(19)]
DIGITS = range(10, 20)
SECRET = [17, 13, 10, 11, 19, 19, 12, 14, 18, 15]
"""Ten digits, each a token."""
ALICE, MALLORY, ROOT = "key-alice", "key-mallory", "key-root"
TWO = {"api_keys": (ALICE, MALLORY)}
OPERATED = TWO | {"operator_keys": (ROOT,)}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def ask(url: str, key: str, prompt: list[int], name: str = "", **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "speculation": "none"} | more
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT,
                        headers=bearer(key) | ({"x-request-id": name} if name else {}))
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def get(url: str, path: str, key: str, **params: str) -> httpx.Response:
    return httpx.get(f"{url}{path}", params=params, headers=bearer(key), timeout=WAIT)


def first_frame(url: str, key: str) -> dict[str, Any]:
    with httpx.stream("GET", f"{url}/paceline/live", headers=bearer(key), timeout=WAIT) as response:
        told: dict[str, Any] = json.loads(next(line for line in response.iter_lines() if line)[6:])
        return told


def seen(told: dict[str, Any]) -> tuple[Any, ...]:
    """What an answer says of caches and drafts."""
    metrics, stats = told["paceline"]["metrics"], told["paceline"]["speculation"]
    return (metrics["cache_miss"], metrics["cached_tokens"], told["usage"]["prompt_tokens_details"]["cached_tokens"],
            stats and (stats["drafted"], stats["accepted"]))


def steal(guess: Callable[[list[int]], dict[str, Any]]) -> list[int]:
    """Digit by digit: whatever an answer says of one guess alone gives that digit away."""
    found: list[int] = []
    while len(found) < len(SECRET):
        said: dict[tuple[Any, ...], list[int]] = {}
        for digit in DIGITS:
            said.setdefault(seen(guess([*LETTER, *found, digit, *[0] * 20])), []).append(digit)
        odd = [digits for digits in said.values() if len(digits) == 1]
        if len(odd) != 1:
            return found
        found += odd[0]
    return found


def interview(url: str, key: str) -> list[tuple[Any, ...]]:
    """What is said to who asks about every beginning of the secret, right and wrong."""
    suffix = {"method": "suffix", "adaptive": False, "k": 4}
    return [seen(ask(url, key, [*LETTER, *SECRET[:length], digit, *[0] * 9], max_tokens=3, speculation=suffix))
            for length in range(len(SECRET)) for digit in (SECRET[length], 16)]


@pytest.fixture
def two_keys() -> Iterator[str]:
    with served(tiny_engine(), **TWO) as url:
        yield url


@pytest.mark.parametrize(("options", "keys"), [(TWO | {"share_cache": True}, (ALICE, MALLORY)), ({}, ("", ""))])
def test_what_a_shared_cache_says_gives_no_secret_away(options: dict[str, Any], keys: tuple[str, str]) -> None:
    alice, mallory = keys
    with served(tiny_engine(), **options) as url:
        ask(url, alice, [*LETTER, *SECRET, *LETTER])
        assert steal(lambda prompt: ask(url, mallory, prompt)) == []


def test_one_key_is_told_the_same_whatever_another_has_sent() -> None:
    told = []
    for secret in (True, False):
        with served(tiny_engine(), **TWO) as url:
            if secret:
                for speculation in (None, {"method": "suffix", "adaptive": False}):
                    ask(url, ALICE, [*LETTER, *SECRET, *[0] * 9], max_tokens=20, speculation=speculation)
            told.append(interview(url, MALLORY))
    assert told[0] == told[1]


def test_whose_cache_it_is(two_keys: str) -> None:
    def cached(key: str, **more: Any) -> tuple[int, str | None]:
        metrics = ask(two_keys, key, LETTER, **more)["paceline"]["metrics"]
        return metrics["cached_tokens"], metrics["cache_miss"]

    assert cached(ALICE)[0] == 0
    assert cached(ALICE) == (16, None)
    assert cached(MALLORY)[0] == 0
    assert cached(ALICE, cache_salt="narrower")[0] == 0, "a salt narrows further"
    assert cached(ALICE, cache_salt="narrower") == (16, None)
    assert cached(MALLORY, cache_salt="narrower")[0] == 0, "and opens nobody else's"
    other = ask(two_keys, ALICE, [*LETTER[:11], *[1] * 10])["paceline"]["metrics"]
    assert other["cache_miss"] == "diverged at token 11", "one's own texts may be spoken of"


def test_one_pool_for_who_asks_for_it() -> None:
    with served(tiny_engine(), **TWO, share_cache=True) as url:
        ask(url, ALICE, LETTER)
        metrics = ask(url, MALLORY, LETTER)["paceline"]["metrics"]
        assert (metrics["cached_tokens"], metrics["cache_miss"]) == (16, None)
        told = ask(url, MALLORY, [*LETTER[:11], *[1] * 10])["paceline"]["metrics"]
        assert told["cache_miss"] == "no cached prefix", "where texts may be others', no position of one is told"


@pytest.mark.parametrize("options", [TWO, OPERATED, {"operator_keys": (ALICE,)}])
def test_keys_are_asked_for_as_soon_as_there_is_one(options: dict[str, Any]) -> None:
    with served(tiny_engine(), **options) as url:
        for key in ("", "wrong"):
            assert get(url, "/v1/models", key).status_code == 401
        assert get(url, "/v1/models", ALICE).status_code == 200


def test_the_page_shows_a_keys_own_requests() -> None:
    with served(tiny_engine(), **OPERATED) as url:
        for key, name in ((ALICE, "hers"), (MALLORY, "his")):
            ask(url, key, [*LETTER, *SECRET], name, max_tokens=4, trace=True)

        def listed(key: str) -> list[str]:
            return sorted(one["id"] for one in get(url, "/paceline/requests", key).json()["requests"])

        assert listed(ALICE) == ["cmpl-hers"] and listed(MALLORY) == ["cmpl-his"]
        assert listed(ROOT) == ["cmpl-hers", "cmpl-his"]
        for path in ("/paceline/request", "/paceline/trace"):
            assert get(url, path, ALICE, id="cmpl-hers").status_code == 200
            assert get(url, path, ROOT, id="cmpl-hers").status_code == 200
            refused, unknown = (get(url, path, MALLORY, id=name) for name in ("cmpl-hers", "cmpl-nobodys"))
            assert refused.status_code == unknown.status_code == 404
            assert refused.text.replace("hers", "nobodys") == unknown.text, "not even that there is one"


def test_who_takes_anothers_request_id_takes_nothing_else() -> None:
    with served(tiny_engine(), **OPERATED) as url:
        ask(url, ALICE, LETTER, "same", max_tokens=3)
        ask(url, MALLORY, LETTER[:5], "same", max_tokens=2)
        for key, tokens in ((ALICE, 3), (MALLORY, 2), (ROOT, 2)):
            told = get(url, "/paceline/request", key, id="cmpl-same").json()
            assert told["metrics"]["output_tokens"] == tokens
        assert len(get(url, "/paceline/requests", ROOT).json()["requests"]) == 2


def test_frames_show_a_keys_own_requests() -> None:
    engine = tiny_engine()
    with served(engine, **OPERATED) as url:
        running = threading.Thread(target=ask, args=(url, ALICE, LETTER, "long"), kwargs={"max_tokens": 400})
        running.start()
        until(lambda: engine.scheduler.running)
        frames = {key: first_frame(url, key) for key in (MALLORY, ALICE, ROOT)}
        running.join(WAIT)
    assert [one["id"] for one in frames[ROOT]["running"]] == ["cmpl-long"]
    assert [one["id"] for one in frames[ALICE]["running"]] == ["cmpl-long"] and frames[ALICE]["running_count"] == 1
    assert not frames[MALLORY]["running"] and frames[MALLORY]["running_count"] == 0
    whole = {"totals", "seconds", "latency", "speculation", "cache"}
    assert whole <= set(frames[ROOT]), "what the engine does for all is the operator's to see"
    assert not whole & set(frames[MALLORY]) and not whole & set(frames[ALICE])
    assert "blocks" in frames[ROOT]["running"][0] and not frames[ALICE]["running"][0]["blocks"]


@pytest.mark.parametrize(("options", "allowed", "refused"), [
    ({}, ("",), ()), ({"api_keys": (ALICE,)}, (ALICE,), ()), (TWO, (), (ALICE, MALLORY)),
    (OPERATED, (ROOT,), (ALICE, MALLORY)), ({"api_keys": (ALICE,), "operator_keys": (ROOT,)}, (ROOT,), (ALICE,)),
    ({"api_keys": (ALICE, ALICE)}, (ALICE,), ())])
def test_who_sees_the_whole_engine(options: dict[str, Any], allowed: tuple[str, ...], refused: tuple[str, ...]) -> None:
    with served(tiny_engine(), **options) as url:
        for key in allowed:
            answer = get(url, "/metrics", key)
            assert answer.status_code == 200 and parse_metrics(answer.text)
            assert "totals" in first_frame(url, key)
        for key in refused:
            answer = get(url, "/metrics", key)
            told = answer.json()["error"]
            assert answer.status_code == 403 and told["code"] == "operator_key_needed"
            assert "--operator-key" in told["message"]


@pytest.mark.parametrize("name", ["library_tokens", "cache_tokens"])
@pytest.mark.parametrize("wish", [lambda option: {"method": "suffix"} | option,
                                  lambda option: {"method": "auto", "drafters": [{"method": "suffix"} | option]},
                                  lambda option: {"method": "cascade", "by": "skip",
                                                  "drafter": {"method": "suffix"} | option}])
def test_what_acts_on_all_is_the_operators_to_set(two_keys: str, name: str, wish: Callable[..., Any]) -> None:
    for value in (0, 1, 10_000_000):
        answer = httpx.post(f"{two_keys}/v1/completions", headers=bearer(ALICE), timeout=WAIT,
                            json={"prompt": LETTER, "max_tokens": 1, "speculation": wish({name: value})})
        told = answer.json()["error"]
        assert answer.status_code == 400 and told["param"] == "speculation"
        assert name in told["message"] and "--speculation" in told["message"]


def test_a_client_leaves_the_library_as_the_operator_set_it() -> None:
    engine = tiny_engine(speculation={"method": "suffix", "library_tokens": 5000})
    with served(engine, **TWO) as url:
        assert httpx.post(f"{url}/v1/completions", json={"prompt": LETTER, "max_tokens": 1}, headers=bearer(ALICE),
                          timeout=WAIT).status_code == 200
        ask(url, ALICE, LETTER, speculation={"method": "suffix"})
        ask(url, ALICE, LETTER, speculation={"method": "merge", "drafters": ["ngram", "suffix"]})
        assert engine._draft_context.shared["suffix library"].capacity == 5000
