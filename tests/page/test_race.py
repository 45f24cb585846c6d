"""A race in a real browser: the lanes one after the other, each by itself, and the proof that their texts are equal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
from serving import ServerThread

from page.asking import answer_with, posts, settle, start_race

OpenPage = Callable[..., Any]


def test_a_race_ends_in_equality(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page, temperature=0.8, method="suffix", seed="")
    verdict = start_race(page)
    assert verdict.get_attribute("data-verdict") == "equal", verdict.text_content()
    off, on = (page.locator(f"[data-lane={lane}]") for lane in ("off", "on"))
    assert off.locator(".tokens").text_content() == on.locator(".tokens").text_content() != ""
    assert set(off.locator(".tok").evaluate_all("nodes => nodes.map(node => node.dataset.origin)")) == {"plain"}
    assert float(on.locator(".speed").text_content().replace(",", "")) > 0


def test_lanes_run_one_after_the_other_and_find_nothing_of_each_other(open_page: OpenPage,
                                                                      server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page, method="lookahead", max_tokens="12")
    sent = posts(page)
    start_race(page)
    start_race(page)
    assert len({body["cache_salt"] for _, body in sent}) == 4, "each lane has a salt of its own, in every race"
    assert [body["speculation"] for _, body in sent] == ["none", "lookahead"] * 2
    latest = httpx.get(f"{server.url}/paceline/requests", timeout=90).json()["requests"][:4]
    for newer, older in pairwise(latest):
        assert older["age_s"] - older["duration_s"] >= newer["age_s"], "a lane ends before the next begins"
    for one in latest:
        told = httpx.get(f"{server.url}/paceline/request", params={"id": one["id"]}, timeout=90).json()
        assert {event["company"] for event in told["events"]} == {1}
        assert one["metrics"]["cached_tokens"] == 0, "the lane before has computed the same prompt"
    assert page.locator(".company").count() == 0


def test_speeds_are_the_engines_and_there_is_one_ratio(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page)
    figures = iter([{"queue_time_s": 5.0, "ttft_s": 5.5, "tpot_s": 0.1},
                    {"queue_time_s": 0.0, "ttft_s": 0.5, "tpot_s": 0.6}])

    def timed(route: Any) -> None:
        """11 tokens: plain in 1.5 s after 5 s of waiting, drafted in 6.5 s."""
        token = {"id": 5, "text": "x", "origin": "plain", "drafter": None, "logprob": None, "top": []}
        chunk = {"choices": [{"index": 0, "delta": {"content": "x" * 11}, "tokens": [token] * 11}],
                 "paceline": {"seed": 7, "metrics": next(figures), "speculation": None}}
        route.fulfill(body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    page.route("**/v1/chat/completions", timed)
    verdict = start_race(page)
    off, on = (page.locator(f"[data-lane={lane}]") for lane in ("off", "on"))
    assert off.locator(".speed").text_content() == "7.3", "waiting for a seat is no part of it"
    assert on.locator(".speed").text_content() == "1.7"
    assert on.locator(".gain").text_content() == "0.23× plain"
    assert set(re.findall(r"[\d.]+×", page.locator(".race").text_content())) == {"0.23×"}
    assert "first" in off.get_attribute("class").split()
    assert "(1.7 against 7.3 tok/s)" in verdict.text_content()
    page.locator(".race button", has_text="Replay").click()
    assert page.locator("[data-lane=on] .tok:visible").count() < 11, "a replay begins with no token"


def test_code_is_drawn_as_code(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page, formatted=True)
    text = "Like this:\n\n```python\nx = 1\n```\nand `y` too.\n"

    def say(route: Any) -> None:
        """The engine's own answer, with other words in it."""
        answer, lines, left = route.fetch(timeout=90_000), [], text
        for line in answer.text().split("\n\n"):
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                for choice in chunk["choices"]:
                    for token in choice.get("tokens", ()):
                        token["text"], left = left[:3], left[3:]
                    if "content" in choice["delta"]:
                        choice["delta"]["content"] = "".join(token["text"] for token in choice.get("tokens", ()))
                line = f"data: {json.dumps(chunk)}"
            lines.append(line)
        route.fulfill(response=answer, body="\n\n".join(lines))

    page.route("**/v1/chat/completions", say)
    page.click("[data-mode=race]")
    page.fill("#prompt", "code, please")
    page.press("#prompt", "Enter")
    for lane in ("off", "on"):
        page.wait_for_selector(f"[data-lane={lane}] pre:has-text('x = 1')")
        font = page.locator(f"[data-lane={lane}] pre").evaluate("node => getComputedStyle(node).fontFamily")
        assert "mono" in font
    page.locator("input[name=formatted]").uncheck()
    page.wait_for_selector("[data-lane=on] .tokens:not(.formatted):has-text('```')")


def test_company_is_mentioned(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page, max_tokens="8")
    page.route("**/paceline/request?*", lambda route: route.fulfill(json={"events": [{"company": 1}, {"company": 2}]}))
    start_race(page)
    note = page.locator(".company")
    note.wait_for()
    assert "no solo speeds" in note.text_content()


def test_a_race_whose_texts_differ_says_where(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page)

    def bend(route: Any) -> None:
        if route.request.post_data_json.get("speculation") != "none":
            route.continue_()
            return
        answer, count = route.fetch(timeout=90_000), 0
        lines = []
        for line in answer.text().split("\n\n"):
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                for token in (token for choice in chunk["choices"] for token in choice.get("tokens", ())):
                    count += 1
                    token["id"] += count == 6
                line = f"data: {json.dumps(chunk)}"
            lines.append(line)
        route.fulfill(response=answer, body="\n\n".join(lines))

    page.route("**/v1/chat/completions", bend)
    verdict = start_race(page)
    assert verdict.get_attribute("data-verdict") == "differs"
    assert "Different from token 6 on" in verdict.text_content()
    assert page.locator(".tok.differs").count() == 2


def test_a_race_fits_a_phone(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url, viewport={"width": 360, "height": 740}, has_touch=True)
    settle(page)
    answer_with(page, "a text " * 30)
    start_race(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
