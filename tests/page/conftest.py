"""A browser, and a server around a tiny model whose cache is so small that requests push one another out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from serving import ServerThread, slowed, write_model

from paceline.speculation.control import AdaptiveController
from paceline.speculation.controller import Ahead, Ask, Offer
from paceline.speculation.drafter import Budget
from paceline.speculation.tree import DraftTree

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_MS = 90_000
"""Generous: the machine may be busy."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


class Unconcerned(AdaptiveController):
    """Drafts for everybody who wishes it. What the clock says of a tiny model is the machine's noise: where it says
    that drafts do not pay, there would be none to look at."""

    def budgets(self, asks: Sequence[Ask], ahead: Ahead) -> list[Budget | None]:
        wishes = [self._states[ask.sequence].wish for ask in asks]
        return [Budget(wish.k, wish.nodes) for wish in wishes]

    def choose(self, offers: Sequence[Offer], ahead: Ahead) -> list[DraftTree | None]:
        return [offer.draft for offer in offers]


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[ServerThread]:
    made = ServerThread(model_folder, deterministic=True, kv_blocks=40, max_num_seqs=6, max_batch_tokens=32,
                        max_model_len=512)
    made.engine._drafting.controller = Unconcerned()
    yield made
    made.stop()
    assert "Traceback" not in made.log()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Not for a whole session: while it lives this thread has a running event loop, and asyncio.run refuses."""
    steering = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium here (on Debian and Ubuntu: apt-get install chromium)")
    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with steering.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=found, args=arguments)
        yield made
        made.close()


@pytest.fixture(scope="module")
def pages(browser: Any) -> Iterator[dict[str, Any]]:
    """Pages by the options of their contexts: a browser takes a second of a core for a new one."""
    made: dict[str, Any] = {}
    yield made
    for page in made.values():
        page.context.close()


@pytest.fixture
def open_page(browser: Any, pages: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """open_page(url, **options of the context): a page without a past that has loaded; nothing may go wrong in it."""
    opened: list[tuple[Any, str, Callable[..., None]]] = []
    problems: list[str] = []

    def listen(page: Any, event: str, listener: Callable[..., None]) -> None:
        page.on(event, listener)
        opened.append((page, event, listener))

    def begin(url: str, *, expect_errors: bool = False, **options: Any) -> Any:
        key = repr(sorted(options.items()))
        if key not in pages:
            context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}} | options)
            context.set_default_timeout(WAIT_MS)
            pages[key] = context.new_page()
        page = pages[key]
        page.emulate_media(color_scheme=options.get("color_scheme", "light"))
        listen(page, "pageerror", lambda error: problems.append(str(error)))
        if not expect_errors:
            listen(page, "console",
                   lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(url)
        page.wait_for_selector("html[data-ready]")
        return page

    yield begin
    for page, event, listener in opened:
        page.remove_listener(event, listener)
    for page in {id(page): page for page, *_ in opened}.values():
        page.unroute_all()
        page.evaluate("localStorage.clear(), sessionStorage.clear()")
        page.goto("about:blank")
    assert not problems


@pytest.fixture
def slow(server: ServerThread) -> Iterator[None]:
    """A step takes so long that an answer is seen while it grows."""
    slowed(server.engine)
    yield
    del server.engine.step
