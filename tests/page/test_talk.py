"""Chats and completions in a real browser: Markdown that is never markup, and what one can do with a turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from serving import ServerThread, until

from page.asking import answer_with, posts, revisit, say, settle

OpenPage = Callable[..., Any]
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True}

MARKDOWN = '''# A *small* title

Some **bold**, ***both***, a snake_case_name, 2 * 3 * 4 and `x < **1**`, see [this page](https://example.org/a) or
https://example.org/b, not [that](javascript:alert(1)) nor [this](data:text/html,x).

<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>

- one
  - two, _inside_
- three

2. second

> said

```python
def f():
    return "<b>**not bold**</b>"
```
The **end'''


def test_markdown_is_drawn_and_never_markup(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page, formatted=True)
    answer_with(page, MARKDOWN)
    answer = say(page)
    text = answer.locator(".tokens")

    def all_of(selector: str) -> list[str]:
        return [str(one) for one in text.locator(selector).all_text_contents()]

    assert all_of("h3") == ["A small title"] and all_of("h3 em") == ["small"]
    assert all_of("strong") == ["bold", "both"] and all_of("strong em") == ["both"]
    assert all_of("em") == ["small", "both", "inside"]
    assert all_of("p code") == ["x < **1**"]
    links = text.locator("a").evaluate_all("nodes => nodes.map(node => [node.textContent, node.href, node.rel])")
    assert links == [["this page", "https://example.org/a", "noopener noreferrer"],
                     ["https://example.org/b", "https://example.org/b", "noopener noreferrer"]]
    assert "[that](javascript:alert(1))" in text.text_content() and "<img src=x onerror=" in text.text_content()
    assert text.locator("img, script, b").count() == 0 and page.evaluate("window.hit") is None
    assert all_of("ul > li > ul > li") == ["two, inside"] and text.locator("ol").get_attribute("start") == "2"
    assert all_of("blockquote") == ["said"]
    assert all_of("pre") == ['def f():\n    return "<b>**not bold**</b>"']
    assert "mono" in text.locator("pre code").evaluate("node => getComputedStyle(node).fontFamily")
    assert text.locator("p").last.text_content() == "The **end", "what is not closed is text"
    assert set(text.locator("pre .tok").evaluate_all("nodes => nodes.map(node => node.dataset.origin)")) == {"accepted"}
    page.uncheck("[name=formatted]")
    assert text.text_content() == MARKDOWN
    page.check("[name=formatted]")
    assert all_of("h3") == ["A small title"]


def test_a_text_that_grows_is_drawn_as_if_it_had_come_at_once(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    grown, whole = page.evaluate("""async source => {
        const { TokenText } = await import(new URL('page/tokens.js', document.baseURI));
        const drawn = size => {
            const text = new TokenText('x', true);
            for (let at = 0; at < source.length; at += size) {
                text.push([{ id: 1, text: source.slice(at, at + size), origin: 'plain', top: [] }]);
                text.flush();
            }
            return text;
        };
        const grown = drawn(1), before = grown.element.cloneNode(true);
        grown.format(true);
        return [before.innerHTML, grown.element.innerHTML];
    }""", MARKDOWN)
    assert grown == whole and "<strong>" in whole


def test_no_text_takes_long_to_draw(open_page: OpenPage, server: ServerThread) -> None:
    """Characters read, not seconds: no search is repeated that has failed once."""
    page = open_page(server.url)
    texts = ["*a " * 4000, "[" * 8000, "**_" * 4000, "`" * 7999 + " `", "- " * 5000, "> " * 5000, "](" * 4000,
             "_a_ " * 3000, "[" * 4000 + "](x)", "\n".join(" " * n + "- x" for n in range(120))]
    reads = page.evaluate("""async sources => {
        const { parse, draw } = await import(new URL('page/markdown.js', document.baseURI));
        let reads = 0;
        const { indexOf } = String.prototype;
        String.prototype.indexOf = function (what, from) {
            const found = indexOf.call(this, what, from);
            reads += (found < 0 ? this.length : found) - (from ?? 0);
            return found;
        };
        const spent = sources.map((source) => {
            reads = 0;
            for (const block of parse(source)) draw(block, source, (start, end) => [source.slice(start, end)]);
            return reads;
        });
        String.prototype.indexOf = indexOf;
        return spent;
    }""", texts)
    assert [spent < 40 * len(text) for spent, text in zip(reads, texts)] == [True] * len(texts)


def test_turns_can_be_copied_edited_and_made_again(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page, formatted=True)
    answer_with(page, "an **answer**\n```\ncode\n```")
    page.evaluate("""Object.defineProperty(navigator, 'clipboard', {
        configurable: true, value: { writeText: async text => { window.copied = text; } } })""")
    say(page, "first")
    say(page, "second")
    page.click("[aria-label='Copy the answer'] >> nth=0")
    assert page.evaluate("copied") == "an **answer**\n```\ncode\n```"
    page.click("[aria-label='Copy code'] >> nth=0")
    assert page.evaluate("copied") == "code"
    sent = posts(page)
    page.click("text=Regenerate >> nth=1")
    page.wait_for_selector(".answer[data-done] >> nth=1")
    assert [one["content"] for one in sent[-1][1]["messages"]][::2] == ["first", "second"]
    page.click(".turn-said button:has-text('Edit') >> nth=0")
    assert page.input_value("#prompt") == "first"
    page.keyboard.press("Escape")
    assert page.input_value("#prompt") == "" and page.locator(".answer").count() == 2, "nothing is lost"
    page.click(".turn-said button:has-text('Edit') >> nth=0")
    page.fill("#prompt", "changed")
    page.press("#prompt", "Enter")
    until(lambda: page.locator(".answer[data-done]").count() == 1)
    assert [one["content"] for one in sent[-1][1]["messages"]] == ["changed"]
    assert page.locator(".said").all_text_contents() == ["changed"]


@pytest.mark.usefixtures("slow")
def test_escape_stops_an_answer(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page, max_tokens="400", method="off")
    page.fill("#prompt", "the quick")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".answer .tok")
    page.keyboard.press("Escape")
    page.wait_for_selector(".answer[data-done]")
    assert "stopped" in page.locator(".facts").last.text_content()


def test_chats_outlive_a_reload_until_they_are_cleared(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page)
    answer = say(page, "what was said first")

    def shown() -> Any:
        return page.locator(".answer .tok").evaluate_all(
            "nodes => nodes.map(one => [one.textContent, one.dataset.origin])")

    before, text = shown(), answer.locator(".tokens").text_content()
    revisit(page)
    assert shown() == before and page.locator(".answer .tokens").text_content() == text
    sent = posts(page)
    say(page, "and again")
    assert [one["role"] for one in sent[0][1]["messages"]] == ["user", "assistant", "user"]
    assert sent[0][1]["messages"][1]["content"] == text
    page.click("button:text-is('New')")
    say(page, "another chat")
    assert len(sent[1][1]["messages"]) == 1
    page.select_option(".past", label="what was said first")
    assert page.locator(".said").all_text_contents() == ["what was said first", "and again"]
    page.click("text=Clear")
    revisit(page)
    assert page.locator(".welcome").is_visible() and page.locator(".past").is_hidden()
    assert page.evaluate("localStorage.getItem('paceline-chats')") is None


def test_what_a_browser_kept_badly_does_no_harm(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    for store in ("paceline-chats", "paceline-look", "paceline-controls"):
        page.evaluate("store => localStorage.setItem(store, '{broken')", store)
    revisit(page)
    assert page.locator(".welcome").is_visible()


def test_a_text_is_continued_without_a_chat_template(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page)
    page.click("[data-mode=complete]")
    sent = posts(page)
    answer = say(page, "the quick brown ")
    url, body = sent[0]
    assert url.endswith("/v1/completions") and body["prompt"] == "the quick brown " and "messages" not in body
    text = answer.locator(".tokens").text_content()
    page.click("text=Continue")
    assert page.input_value("#prompt").split() == f"the quick brown {text}".split()


def test_a_base_model_is_offered_completions_alone(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    page.route("**/paceline/about", lambda route: route.fulfill(json=route.fetch().json() | {"chat": False}))
    settle(page)
    assert page.locator("[data-mode]").all_text_contents() == ["Complete", "Race"]
    sent = posts(page)
    say(page)
    assert sent[0][0].endswith("/v1/completions")


def test_colours_can_be_switched_off_and_their_legend_stays_in_sight(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page, formatted=True)
    answer_with(page, "a line\n\n" * 60)
    answer = say(page)
    ground = "node => getComputedStyle(node).backgroundColor"
    corrected, accepted = (answer.locator(f".tok[data-origin={origin}]").first for origin in ("corrected", "accepted"))
    red, green, blue = corrected.evaluate(f"node => ({ground})(node).match(/[0-9.]+/g).slice(0, 3).map(Number)")
    assert max(red, green, blue) - min(red, green, blue) < 24, "a correction is no error: its colour is neutral"
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    box = page.locator(".talk-head .legend").bounding_box()
    assert 0 <= box["y"] < 200
    page.uncheck("[name=colours]")
    assert accepted.evaluate(ground) == "rgba(0, 0, 0, 0)"
    revisit(page)
    assert page.locator(".answer .tok").nth(1).evaluate(ground) == "rgba(0, 0, 0, 0)", "the choice must stay"


@pytest.mark.parametrize("options", [{}, PHONE], ids=["desk", "phone"])
def test_the_card_of_a_token_does_not_cover_its_text(open_page: OpenPage, server: ServerThread, options: Any) -> None:
    page = open_page(server.url, **options)
    settle(page, formatted=True)
    answer_with(page, "some words\n\n```\n" + "a long line " * 40 + "\n```")
    token = say(page).locator(".tok").first
    token.hover()
    page.wait_for_selector("#peek", state="visible")
    card, text = page.locator("#peek").bounding_box(), page.locator(".answer .tokens").bounding_box()
    if options:
        below = token.bounding_box()
        assert card["x"] >= 0 and card["x"] + card["width"] <= 360 and card["y"] + card["height"] <= 740
        assert card["y"] > below["y"] + below["height"]
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, "long lines of code scroll by themselves"
    else:
        assert card["x"] >= text["x"] + text["width"]


def test_what_suffix_remembers_is_said_where_it_is_chosen(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    settle(page, method="ngram")
    assert page.locator(".remembers").is_hidden()
    page.select_option("[name=method]", "suffix")
    assert "answers of earlier requests" in page.locator(".remembers").text_content()
    assert page.locator(".remembers").is_visible()
