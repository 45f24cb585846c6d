"""The live view and an opened request in a real browser, and what holds for every view."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import ServerThread, until

from engine.tiny import tiny_engine
from paceline.engine.replay import replay_on
from paceline.llm import LLM
from paceline.sampling.trace import Trace
from paceline.serve.drift import shown
from paceline.watch.alarm import AcceptanceChange, Alarm
from paceline.watch.watch import DriftWatch

OpenPage = Callable[..., Any]
VIEWS = ("", "#/live", "#/requests", "#/requests/{id}")
DRAFTED = {"method": "suffix", "adaptive": False, "k": 4}
"""Whatever drafts cost here: control asks the clock, and what that says of a tiny model is the machine's noise."""


def ask(url: str, name: str, *, number: int = 0, length: int = 150, **more: Any) -> str:
    """A whole request under an id of its own; the id the engine knows it by."""
    body = {"prompt": f"the quick brown fox jumps over {number} lazy dogs and over {number} quick foxes; " * 2,
            "max_tokens": length, "temperature": 0, "seed": number, "ignore_eos": True} | more
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": name}, timeout=90)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["paceline"]["request_id"])


@contextmanager
def crowd(url: str, name: str, count: int = 6, length: int = 70) -> Iterator[list[str]]:
    """More requests at once than the cache holds."""
    ids: list[str] = []
    threads = [threading.Thread(target=lambda i=i: ids.append(
        ask(url, f"{name}-{i}", number=i, length=length, speculation=("ngram", None)[i % 2]))) for i in range(count)]
    for thread in threads:
        thread.start()
    yield ids
    for thread in threads:
        thread.join(90)
    assert len(ids) == count


def test_the_block_map_moves_under_load_and_comes_to_rest(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(f"{server.url}/#/live")
    page.wait_for_selector("canvas[data-map]")
    page.evaluate("""() => {
        window.maps = new Set(); window.used = new Set();
        const canvas = document.querySelector('canvas');
        new MutationObserver(() => {
            maps.add(canvas.dataset.map);
            used.add(document.querySelector('[data-state=used] b').textContent);
        }).observe(canvas, { attributes: true, attributeFilter: ['data-map'] });
    }""")

    def painted() -> bytes:
        return bytes(page.locator("canvas").screenshot())

    def moved() -> bool:
        with crowd(server.url, "map", length=50):
            pass
        return bool(page.evaluate("maps.size > 2"))

    before = painted()
    until(moved)
    assert page.evaluate("[...used].some(count => Number(count) > 0)")
    until(lambda: page.evaluate("document.querySelector('[data-state=used] b').textContent === '0'"))
    assert painted() != before, "what the requests left in the cache must show"
    assert page.locator("canvas").get_attribute("aria-label").startswith("40 blocks of 16 tokens: ")


def test_the_live_view_lists_requests_rates_latencies_acceptance(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(f"{server.url}/#/live")
    page.wait_for_selector(".pulse[data-on]")
    page.evaluate("""() => {
        window.listed = new Set();
        new MutationObserver(() => document.querySelectorAll('tbody tr').forEach(row => listed.add(row.dataset.id)))
            .observe(document.querySelector('tbody'), { childList: true });
    }""")
    with crowd(server.url, "list") as ids:
        until(lambda: page.evaluate("listed.size > 1"))
    assert set(page.evaluate("[...listed]")) <= {*ids}
    page.wait_for_selector("[data-method=ngram] .depths li")
    tiles = page.locator(".tile").all_text_contents()
    assert len(tiles) == 6
    assert any("Time to first token" in tile and "p99" in tile for tile in tiles)
    assert any("Time per token" in tile and "p99" in tile for tile in tiles)
    assert page.locator(".spark-line").first.get_attribute("d").count("L") > 50


def test_the_drift_card_tells_alarms_from_changes(open_page: OpenPage, server: ServerThread) -> None:
    """An alarm is one to a screen reader too; that other traffic is accepted otherwise is none."""
    with httpx.stream("GET", f"{server.url}/paceline/live", timeout=90) as lines:
        frame = next(json.loads(line[6:]) for line in lines.iter_lines() if line.startswith("data: "))
    watch = DriftWatch(tiny_engine(), 0.25, seed=1)
    watch.watched, watch.tokens["ngram"] = 1234, 777

    def shows() -> str:
        seen = frame | {"watch": shown(watch.report(), 60.0)}
        page.route("**/paceline/live", lambda route: route.fulfill(
            content_type="text/event-stream", body=f"data: {json.dumps(seen)}\n\n"))
        page.reload()
        page.wait_for_selector(".drift .num")
        return " ".join(page.locator(".drift").inner_text().split())

    page = open_page(f"{server.url}/#/live", expect_errors=True)  # a stream of one frame ends
    told = shows()
    assert "1,234 requests watched (25 %)" in told and "777 tokens judged" in told
    assert "Speculation gives what plain decoding would." in told and page.locator(".drift [role=alert]").count() == 0
    watch.changes.append(AcceptanceChange("ngram", "coupled", False, 0.6, 0.2, 12, at=30.0))
    told = shows()
    assert "ngram: acceptance changed. It fell from 60 % to 20 % in the last 12 requests" in told
    assert "Speculation gives what plain decoding would." in told and page.locator(".drift [role=alert]").count() == 0
    assert page.locator(".drift .change").get_attribute("data-direction") == "fell"
    watch.alarms.append(Alarm("text", "suffix", "coupled", 40, "<b>token</b> 3 is another", "r-1", 7, 50.0, True))
    told = shows()
    assert "suffix: text <b>token</b> 3 is another" in told and "Switched off." in told
    assert page.locator(".drift [role=alert][data-kind=text]").count() == 1
    assert "Speculation gives what plain decoding would." not in told


def test_running_requests_are_known_by_their_prompts(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(f"{server.url}/#/live")
    page.wait_for_selector(".pulse[data-on]")
    page.evaluate("""() => {
        window.pieces = new Set();
        new MutationObserver(() => document.querySelectorAll('td.piece').forEach(cell => pieces.add(cell.textContent)))
            .observe(document.querySelector('tbody'), { childList: true, subtree: true });
    }""")
    with crowd(server.url, "about"):
        until(lambda: page.evaluate("[...pieces].some(text => text)"))


def test_the_block_map_shows_what_is_in_use(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(f"{server.url}/#/live")
    page.wait_for_selector("canvas[data-shown='40']")
    assert page.locator(".rest").is_hidden(), "all of a small cache is shown"
    drawn = page.evaluate("""async () => {
        const { extent, BlockMap } = await import(new URL('page/blockmap.js', document.baseURI));
        const upTo = last => extent(new Uint8Array(1000).fill(3, Math.max(0, last - 1), last));
        const picture = new BlockMap('x');
        document.querySelector('.maps').append(picture.element);
        const map = btoa('\\x55'.repeat(10) + '\\0'.repeat(240));
        picture.show({ blocks: 1000, map, free: 960, used: 40, shared: 0, cached: 0 }, 16);
        picture.paint();
        const shown = [picture.canvas.dataset.shown];
        picture.whole.click();
        picture.paint();
        return [...[0, 1, 64, 65, 600].map(upTo), ...shown, picture.canvas.dataset.shown];
    }""")
    assert drawn == [64, 64, 64, 128, 1000, "64", "1000"]


def test_requests_are_known_by_their_prompts_and_can_be_filtered(open_page: OpenPage, server: ServerThread) -> None:
    first, second = (ask(server.url, name, length=2, prompt=f"about {name} and more") for name in ("zebras", "llamas"))
    page = open_page(f"{server.url}/#/requests")
    page.wait_for_selector(f"tr:has(a[data-id='{first}']) .piece:text-is('about zebras and more')")
    page.fill(".filter", "ZEBRAS more")
    until(lambda: page.locator("tbody tr").count() == 1)
    assert page.locator("tbody a").get_attribute("data-id") == first
    page.fill(".filter", "no such words")
    page.wait_for_selector("text=No request has that.")
    page.fill(".filter", "")
    page.wait_for_selector(f"a[data-id='{second}']")


def test_a_request_shows_its_life_and_its_drafts(open_page: OpenPage, server: ServerThread) -> None:
    name = ask(server.url, "opened", length=64, cache_salt="opened", speculation=DRAFTED)
    page = open_page(f"{server.url}/#/requests/{name}")
    page.wait_for_selector(".timeline")
    assert page.locator(".t-wait").count() >= 1
    assert page.locator(".t-prefill").count() >= 2, "the prompt is longer than a step"
    assert page.locator(".t-step").count() > 10
    assert page.locator(".t-token.of-accepted").count() > 0
    tree = page.locator("svg.tree")
    assert tree.locator(".node.root").count() == 1
    assert tree.locator(".node.accepted").count() >= 1
    status = page.locator(".story [role=status]").first
    told = status.text_content()
    page.click("[aria-label='The draft before'], [aria-label='The draft after']:enabled")
    assert status.text_content() != told
    assert page.locator(".t-step.chosen").count() == 1
    drafted = page.locator(".t-step.drafted").first
    drafted.dispatch_event("click")
    assert status.text_content().startswith("Draft 1 of")
    offline = httpx.get(f"{server.url}/paceline/request", params={"id": name}, timeout=90).json()
    pieces = "".join(piece for event in offline["events"] for piece in event["pieces"])
    assert page.locator(".story .tokens").text_content() == pieces


def test_every_sample_of_a_request_can_be_looked_at(open_page: OpenPage, server: ServerThread) -> None:
    name = ask(server.url, "samples", n=3, length=24, temperature=1.0, speculation="ngram", prompt="the quick brown")
    told = httpx.get(f"{server.url}/paceline/request", params={"id": name}, timeout=90).json()
    texts = ["".join(piece for event in told["events"] if event["sample"] == sample for piece in event["pieces"])
             for sample in range(3)]
    assert len(set(texts)) == 3 and all(texts)
    page = open_page(f"{server.url}/#/requests/{name}")
    page.wait_for_selector(".timeline")
    shown = page.locator(".story .tokens")
    radios = page.locator(".samples input")
    assert radios.count() == 3 and "max tokens" in page.locator(".samples").text_content()
    assert shown.text_content() == texts[0]
    for sample in (1, 2, 0):
        radios.nth(sample).click()
        assert shown.text_content() == texts[sample] and radios.nth(sample).is_checked()
        assert page.locator(".t-prefill").count() >= 1, "they share the prompt"
        assert page.locator(".t-step").count() >= 1
    radios.first.focus()
    for sample in (1, 2):
        page.keyboard.press("ArrowRight")
        assert shown.text_content() == texts[sample]
        assert page.evaluate("document.activeElement.value") == f"{sample}", "the focus stays where it was"
    alone = ask(server.url, "alone", length=8)
    page.goto(f"{server.url}/#/requests/{alone}")
    page.wait_for_selector(".timeline")
    assert page.locator(".samples").count() == 0


@pytest.mark.parametrize("place", ["toString", "constructor", "__proto__", "nothing", "%E0%A4%A", "requests/%E0%A4%A"])
def test_an_address_that_names_nothing_shows_a_view(open_page: OpenPage, server: ServerThread, place: str) -> None:
    page = open_page(f"{server.url}/#/{place}")
    page.wait_for_selector("main[data-view]")
    assert page.locator("main").get_attribute("data-view") == ("requests" if "/" in place else "playground")
    assert page.locator("nav a[aria-current=page]").count() == 1


def test_a_preemption_is_drawn(open_page: OpenPage, server: ServerThread) -> None:
    def preempted() -> list[str]:
        with crowd(server.url, "crowd", 6, 120):
            pass
        listed = httpx.get(f"{server.url}/paceline/requests", timeout=90).json()["requests"]
        return [one["id"] for one in listed if one["metrics"]["preemptions"]]

    name = until(preempted)[0]
    page = open_page(f"{server.url}/#/requests/{name}")
    page.wait_for_selector(".t-preempted", state="attached")
    assert page.locator(".t-wait").count() >= 2, "it waited again after it had lost its seat"


def test_a_trace_is_downloaded_and_replays(open_page: OpenPage, server: ServerThread, model_folder: Path,
                                           tmp_path: Path) -> None:
    name = ask(server.url, "traced", speculation="ngram", temperature=0.9, length=40, trace=True)
    page = open_page(f"{server.url}/#/requests/{name}")
    with page.expect_download() as waiting:
        page.click("text=Download the trace")
    file = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(file)
    assert page.locator(".command").text_content() == f"paceline replay {file.name}"
    report = replay_on(LLM(str(model_folder), deterministic=True).engine, Trace.from_json(file.read_text()))
    assert report.equal and report.same_model and len(report.tokens) == 40


def test_the_views_are_reached_by_keyboard_with_visible_focus(open_page: OpenPage, server: ServerThread) -> None:
    ask(server.url, "listed", length=4)
    page = open_page(f"{server.url}/#/live")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    visited = []
    for _ in range(5):
        page.keyboard.press("Tab")
        visited.append(page.evaluate("document.activeElement.textContent.trim() || document.activeElement.id"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", f"{visited[-1]} has the focus and does not show it"
    assert visited == ["Paceline", "Playground", "Live", "Requests", "theme"]
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("tbody a")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "filter"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(".timeline")


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_sticks_out_on_a_phone(open_page: OpenPage, server: ServerThread, view: str) -> None:
    name = ask(server.url, "phone", speculation=DRAFTED, length=60, trace=True)
    page = open_page(f"{server.url}/{view.format(id=name)}", viewport={"width": 360, "height": 740}, has_touch=True)
    page.wait_for_selector({"": ".composer", "#/live": "canvas[data-map]", "#/requests": "tbody"}.get(view, "svg.tree"))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    if not view:
        page.evaluate("""localStorage.setItem('paceline-controls', '{"max_tokens": "40"}')""")
        page.reload()
        page.fill("#prompt", "the quick brown fox " * 8)
        page.press("#prompt", "Enter")
        page.wait_for_selector(".answer[data-done]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def brightness(page: Any) -> float:
    red, green, blue = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number)")
    return float(red + green + blue) / 3


def test_colours_follow_the_system_until_somebody_chooses(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url, color_scheme="dark")
    assert brightness(page) < 60
    page.click("#theme")
    assert brightness(page) > 200, "light was chosen"
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert brightness(page) > 200, "the choice must stay"
    page.click("#theme")
    page.click("#theme")
    page.emulate_media(color_scheme="light")
    assert brightness(page) > 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_ground(open_page: OpenPage, server: ServerThread, scheme: str) -> None:
    """WCAG's contrast of 4.5 for text."""
    page = open_page(server.url, color_scheme=scheme)
    pairs = [("ink", ground) for ground in ("paper", "card", "sunk", "accepted-tint", "corrected-tint", "bonus-tint",
                                           "mark-tint")]
    pairs += [("soft", "paper"), ("soft", "card"), ("soft", "sunk"), ("accent", "paper"), ("on-accent", "accent"),
              ("warn", "card"), ("accepted", "card"), ("corrected", "card"), ("bonus", "card"),
              ("mark", "card"), ("mark", "mark-tint")]
    for text, ground in pairs:
        found = page.evaluate("""async ([text, ground]) => {
            const { colour } = await import(new URL('page/dom.js', document.baseURI));
            const light = name => colour('--' + name).match(/[0-9.]+/g).slice(0, 3)
                .map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
                .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
            const [a, b] = [light(text), light(ground)].sort((x, y) => y - x);
            return (a + 0.05) / (b + 0.05);
        }""", [text, ground])
        assert found >= 4.5, f"{text} on {ground} in {scheme}: {found:.2f}"


def test_the_page_needs_nothing_from_elsewhere(open_page: OpenPage, server: ServerThread) -> None:
    page = open_page(server.url)
    elsewhere: list[str] = []
    page.on("request", lambda sent: None if sent.url.startswith(server.url) else elsewhere.append(sent.url))
    for view in ("#/live", "#/requests", "#/"):
        page.goto(f"{server.url}/{view}")
        page.reload()
        page.wait_for_selector("html[data-ready]")
    assert not elsewhere
    policy = httpx.get(server.url, timeout=90).headers["content-security-policy"]
    assert policy.startswith("default-src 'self'") and "unsafe" not in policy
