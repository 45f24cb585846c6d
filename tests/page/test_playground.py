"""The playground in a real browser: tokens stream in, coloured by origin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import ServerThread, served

from paceline.llm import LLM
from page.asking import PROMPT, say, settle

OpenPage = Callable[..., Any]

@pytest.mark.usefixtures("slow")
def test_an_answer_streams_in(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page, max_tokens="40", method="off")
    page.evaluate("""() => {
        window.lengths = new Set();
        new MutationObserver(() => lengths.add(document.querySelectorAll('.answer .tok').length))
            .observe(document.querySelector('.log'), { childList: true, subtree: true });
    }""")
    say(page)
    assert page.evaluate("lengths.size") > 2, "the answer came at once: it does not stream"


def test_an_answer_is_what_the_api_says(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page)
    answer = say(page)
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 56, "seed": 7,
            "speculation": None}
    told = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=90).json()
    assert answer.locator(".tokens").text_content() == told["choices"][0]["message"]["content"]
    facts = answer.locator(".facts").text_content()
    assert "tok/s" in facts and "seed 7" in facts and "tokens a step" in facts


def test_tokens_have_the_colour_of_their_origin(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page)
    answer = say(page)
    shown: dict[str, str] = {}
    for origin in ("accepted", "corrected", "bonus", "plain"):
        swatch = page.locator(f".legend .tok[data-origin={origin}]")
        shown[origin] = swatch.evaluate("node => getComputedStyle(node).backgroundColor")
    assert len(set(shown.values())) == 4
    origins = answer.locator(".tok").evaluate_all("nodes => nodes.map(node => node.dataset.origin)")
    assert {"accepted", "plain"} <= set(origins) <= set(shown)
    accepted = answer.locator(".tok[data-origin=accepted]").first
    assert accepted.evaluate("node => getComputedStyle(node).backgroundColor") == shown["accepted"]


def test_a_token_tells_its_probability_drafter_and_alternatives(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page)
    answer = say(page)
    accepted = answer.locator(".tok[data-origin=accepted]").first
    accepted.hover()
    card = page.locator("#peek")
    card.wait_for(state="visible")
    assert "Accepted draft by ngram" in card.text_content()
    assert card.locator("li").count() >= 5
    assert card.locator("li.chosen").text_content().endswith("%")
    page.mouse.move(0, 0)
    card.wait_for(state="hidden")


def test_the_keyboard_reaches_every_token(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page)
    answer = say(page)
    answer.locator(".tok").first.focus()
    card = page.locator("#peek")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.answer .tok')[3]")
    card.wait_for(state="visible")
    page.keyboard.press("End")
    last = answer.locator(".tok").count() - 1
    assert page.evaluate("n => document.activeElement === document.querySelectorAll('.answer .tok')[n]", last)
    page.keyboard.press("Escape")
    card.wait_for(state="hidden")
    assert answer.locator(".tok[tabindex='0']").count() == 1, "the text must be one stop of the Tab key"


@pytest.mark.usefixtures("slow")
def test_an_answer_can_be_stopped(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page, max_tokens="400", method="off")
    page.evaluate("""() => new MutationObserver((_, observer) => {
        const stop = [...document.querySelectorAll('button')].find((one) => one.textContent.trim() === 'Stop');
        if (!stop || !document.querySelector('.answer .tok')) return;
        observer.disconnect();
        stop.click();
    }).observe(document.querySelector('.log'), { childList: true, subtree: true })""")
    say(page)
    assert "stopped" in page.locator(".facts").last.text_content()


def test_a_conversation_goes_on_and_can_be_cleared(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page)
    say(page)
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    say(page, "and again")
    assert [message["role"] for message in asked[0]["messages"]] == ["user", "assistant", "user"]
    page.click("text=Clear")
    assert page.locator(".welcome").is_visible()


def test_a_refused_request_says_why(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url, expect_errors=True)
    settle(page, max_tokens="0")
    answer = say(page)
    assert "max_tokens" in answer.locator("[role=alert]").text_content()


def test_a_server_that_wants_a_key_is_given_one(browser: Any, model_folder: Path) -> None:
    llm = LLM(str(model_folder), deterministic=True, kv_blocks=40)
    with served(llm.engine, api_keys=("first", "second"), operator_keys=("third",)) as url:
        for keys, sees_all in ((("wrong", "second"), False), (("third",), True)):
            context = browser.new_context()
            page = context.new_page()
            page.goto(f"{url}/#/live")
            for key in keys:
                page.wait_for_selector("#key-dialog[open]")
                page.fill("#key", key)
                page.keyboard.press("Enter")
            page.wait_for_selector("html[data-ready]")
            assert page.locator("#model").text_content() == "tiny"
            page.wait_for_selector(".live[data-frames]")
            for part in (".tiles", ".cache", ".luck"):
                assert page.locator(part).is_visible() is sees_all, "the engine as a whole is shown to operators"
            assert page.get_by_text("Your own requests").is_visible() is not sees_all
            assert page.locator(".queue").is_visible()
            context.close()
