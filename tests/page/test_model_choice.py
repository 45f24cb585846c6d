"""The page of a server with several models: one is chosen, and what is asked goes there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from two_models import SeveralThread

from page.asking import posts, revisit, say, settle


@pytest.fixture
def both(model_folder: Path) -> Iterator[SeveralThread]:
    """Made before a page is opened, so it is there until that has been left."""
    made = SeveralThread(model_folder)
    yield made
    made.stop()


@pytest.mark.slow
def test_a_model_is_chosen_and_remembered(both: SeveralThread, open_page: Callable[..., Any]) -> None:
    page = open_page(both.url)
    assert page.locator("#model option").all_text_contents() == ["a", "b"]
    settle(page)
    sent = posts(page)
    say(page, "one")
    page.select_option("#model select", "b")
    page.wait_for_selector("#model select:enabled")
    assert both.states()["b"] == "loaded"
    say(page, "two")
    assert [body["model"] for url, body in sent if "/v1/" in url] == ["a", "b"]
    for name in "ab":
        both.http.post("/api/chat", json={"model": name, "keep_alive": 0})
    revisit(page)
    assert page.locator("#model select").input_value() == "b"
    assert both.loads == ["a", "b", "b"], "the other one stays unloaded"
