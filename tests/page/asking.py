"""Steps that tests of the playground share: settings, a question, an answer that is made up."""

from __future__ import annotations

import json
from typing import Any

PROMPT = "the quick brown fox jumps over the lazy dog"
SETTINGS = {"method": "ngram", "temperature": 0, "top_p": 1, "max_tokens": "56", "seed": "7"}


def settle(page: Any, *, formatted: bool = False, **changes: Any) -> None:
    """Set the controls as if somebody had done so on an earlier visit."""
    page.evaluate("values => localStorage.setItem('paceline-controls', JSON.stringify(values))", SETTINGS | changes)
    page.evaluate("values => localStorage.setItem('paceline-look', JSON.stringify(values))", {"formatted": formatted})
    revisit(page)


def revisit(page: Any) -> None:
    page.reload()
    page.wait_for_selector("html[data-ready]")


def say(page: Any, text: str = PROMPT) -> Any:
    """Ask and wait for the end of the answer, which is returned."""
    before = page.locator(".answer[data-done]").count()
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector(f".answer[data-done] >> nth={before}")
    return page.locator(".answer").nth(before)


def start_race(page: Any, text: str = PROMPT) -> Any:
    """Race and wait for the verdict, which is returned."""
    page.click("[data-mode=race]")
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    verdict = page.locator(".verdict[data-verdict]")
    verdict.wait_for()
    return verdict


def answer_with(page: Any, text: str) -> None:
    """What the model says from now on, three characters a token, all accepted but the first."""
    def chunk(piece: str, origin: str) -> dict[str, Any]:
        token = {"id": 1, "text": piece, "origin": origin, "drafter": "ngram", "logprob": -0.1, "top": []}
        return {"choices": [{"index": 0, "delta": {"content": piece}, "tokens": [token]}]}

    chunks = [chunk(text[at:at + 3], "accepted" if at else "corrected") for at in range(0, len(text), 3)]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def posts(page: Any) -> list[tuple[str, Any]]:
    """Where the page posts from now on, and what."""
    sent: list[tuple[str, Any]] = []
    page.on("request", lambda one: sent.append((one.url, one.post_data_json)) if one.method == "POST" else None)
    return sent
