"""The page of a server with several models: one is chosen, and what is asked goes there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from asking import posts, say
from two_models import SeveralThread


def test_a_model_is_chosen_and_remembered(model_folder: Path, open_page: Callable[..., Any]) -> None:
    server = SeveralThread(model_folder)
    try:
        page = open_page(server.url)
        assert page.locator("#model option").all_text_contents() == ["a", "b"]
        sent = posts(page)
        say(page, "one")
        page.select_option("#model select", "b")
        page.wait_for_selector("#model select:enabled")
        assert server.states()["b"] == "loaded"
        say(page, "two")
        assert [body["model"] for url, body in sent if "/v1/" in url] == ["a", "b"]
        page.reload()
        page.wait_for_selector("html[data-ready]")
        assert page.locator("#model select").input_value() == "b"
    finally:
        page.goto("about:blank")
        server.stop()
