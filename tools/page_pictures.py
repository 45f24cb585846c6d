"""Pictures of the server's page: chat, race, live and a request, in light, in dark and on a phone.

    paceline serve --port 8000                                              (in another terminal)
    python tools/page_pictures.py http://127.0.0.1:8000 -o docs/images

Needs playwright and a Chromium; with Pillow the files are a third as large.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LOOKS: dict[str, dict[str, Any]] = {
    "": {"color_scheme": "light", "viewport": {"width": 1200, "height": 760}},
    "-dark": {"color_scheme": "dark", "viewport": {"width": 1200, "height": 760}},
    "-phone": {"color_scheme": "light", "viewport": {"width": 360, "height": 740}, "has_touch": True},
}
CONTROLS = {"temperature": 0, "top_p": 1, "max_tokens": "160", "seed": "7"}
PROMPT = "Write a Python class Stack with push, pop, peek and is_empty methods, each with a docstring."
CROWD = ("Name five birds and say what each of them eats.", "Tell a story about two cyclists who share one map.",
         "Explain how a bicycle stays upright.", "List ten words that rhyme with light, one a line.")
POST = """fetch('v1/completions', { method: 'POST', headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ prompt, max_tokens: 120, ignore_eos: true }) })"""
COLOURS = 256


def take(page: Any, url: str, file: Any) -> None:
    """All four views; `file(view)` names the pictures."""
    page.goto(url)
    page.wait_for_selector("html[data-ready]")
    page.evaluate("values => localStorage.setItem('paceline-controls', values)", json.dumps(CONTROLS))
    page.reload()
    page.wait_for_selector("html[data-ready]")
    # What pays is known after these.
    page.evaluate(f"async prompts => {{ for (const prompt of prompts) await {POST}; }}", CROWD)
    ask(page, PROMPT)
    page.wait_for_selector(".answer[data-done]")
    link = page.locator(".facts a").get_attribute("href")
    see(page, ".turn-said")
    page.locator(".answer .tok[data-origin=accepted]:visible, .answer .tok:visible").first.hover()
    page.screenshot(path=file("chat"))
    page.mouse.move(0, 0)
    page.click("[data-mode=race]")
    ask(page, PROMPT)
    page.wait_for_selector(".verdict[data-verdict]")
    page.wait_for_selector(".playground:not(.busy)")  # which scrolls once more
    see(page, ".verdict")
    page.screenshot(path=file("race"))
    page.goto(f"{url}/{link}")
    page.wait_for_selector(".timeline")
    see(page, ".facts-grid")
    page.screenshot(path=file("request"))
    page.goto(f"{url}/#/live")
    page.wait_for_selector("canvas[data-map]")
    page.evaluate(f"prompts => {{ for (const prompt of prompts) {POST}; }}", CROWD)
    page.wait_for_function("most => document.querySelectorAll('.queue tbody tr').length === most", arg=len(CROWD))
    page.wait_for_timeout(1500)
    page.screenshot(path=file("live"))


def see(page: Any, what: str) -> None:
    """From the top of the page, or where that is a phone's, from what the picture is about."""
    place = page.locator(what).first
    page.evaluate("scrollTo(0, 0)")
    if page.viewport_size["width"] < 600:
        place.evaluate("""node => scrollBy(0, node.getBoundingClientRect().top
            - (document.querySelector('.talk-head')?.getBoundingClientRect().height ?? 0) - 12)""")


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def pictures(url: str, folder: Path, looks: Iterable[str] = LOOKS) -> list[Path]:
    from playwright.sync_api import sync_playwright

    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise SystemExit("There is no Chromium here (on Debian and Ubuntu: apt-get install chromium).")
    made: list[Path] = []

    def file(look: str, view: str) -> Path:
        made.append(folder / f"page-{view}{look}.png")
        return made[-1]

    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found, args=["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])])
        for look in looks:
            context = browser.new_context(**LOOKS[look], reduced_motion="reduce")
            context.set_default_timeout(120_000)
            take(context.new_page(), url.rstrip("/"), lambda view, look=look: file(look, view))
            context.close()
        browser.close()
    for one in made:
        shrink(one)
    return made


def shrink(file: Path) -> None:
    """A page has few colours."""
    if importlib.util.find_spec("PIL") is None:
        return
    from PIL import Image

    picture = Image.open(file).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of a running server")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    for file in pictures(options.url, options.out):
        print(f"{file}  {file.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
