"""What a reasoning model thinks is on the page: folded, apart from its answer, and there after a reload."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from serving import ServerThread

from page.asking import revisit, say, settle

THOUGHTS = ["<think>", "\n", "Is", " it", " Oslo", "?", "\n", "</think>", "\n\n"]
ANSWER = ["Os", "lo", "."]
# What a stream says, and the tokens that come with it: one by one; and as drafts make it, in one piece for both.
SLOWLY = [({}, THOUGHTS[:2]), *(({"reasoning_content": one}, [one]) for one in THOUGHTS[2:6]), ({}, THOUGHTS[6:]),
          *(({"content": one}, [one]) for one in ANSWER)]
AT_ONCE = [({"reasoning_content": "Is it Oslo?"}, []), ({"content": "Os"}, THOUGHTS + ANSWER[:1]),
           ({"content": "lo."}, ANSWER[1:])]


@pytest.mark.parametrize("said", [SLOWLY, AT_ONCE], ids=["slowly", "at once"])
def test_thoughts_are_folded_beside_the_answer(open_page: Callable[..., Any], server: ServerThread,
                                               said: list[Any]) -> None:
    page = open_page(server.url)
    settle(page)
    chunks = [{"choices": [{"index": 0, "delta": delta, "tokens": [
        {"id": 1, "text": text, "origin": "plain", "drafter": None, "logprob": -0.1, "top": []} for text in tokens]}]}
        for delta, tokens in said]
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    answer = say(page)
    for _ in range(2):
        assert answer.locator("> .tokens").text_content() == "Oslo."
        folded = answer.locator("details.thoughts")
        assert not folded.evaluate("node => node.open") and not folded.locator(".tokens").is_visible()
        assert folded.locator("summary").text_content() == f"Thoughts {len(THOUGHTS)} tokens"
        folded.locator("summary").click()
        assert folded.locator(".tokens").text_content() == "".join(THOUGHTS)
        assert f"{len(THOUGHTS + ANSWER)} tokens" in answer.locator(".facts").text_content()
        revisit(page)
        answer = page.locator(".answer")
