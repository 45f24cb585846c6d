"""`paceline serve --replicas 2` on a Ray of its own: texts as of one engine, whatever happens to replicas; nothing
stays behind. One server for all of it, and the tests that do it harm come last."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from serving import events, until

import paceline.cluster as cluster_package
from cluster.real_ray import (
    WAIT,
    Cluster,
    ask,
    body,
    check_nothing_stays,
    command,
    listening,
    running,
    stream,
    texts,
)
from paceline import LLM
from paceline.cluster import environment

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc"), pytest.mark.slow]

PROMPTS = ["Once upon a time there was a small engine that", "The sum of two and three", "A", "To be or not to be " * 9]


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(folder, tmp_path_factory.mktemp("log") / "log", "--replicas", "2") as made:
        yield made


def test_texts_are_those_of_one_engine(cluster: Cluster, alone: LLM) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streamed = [pool.submit(stream, cluster, prompt, max_tokens=24, seed=5) for prompt in PROMPTS]
        whole = [pool.submit(ask, cluster, prompt, max_tokens=24, seed=6, n=2, stop=["e"], logprobs=2)
                 for prompt in PROMPTS]
    assert [[one.result()[0]] for one in streamed] == texts(alone, PROMPTS, [5] * 4, max_tokens=24)
    assert [one.result()[1]["usage"]["completion_tokens"] for one in streamed] == [24] * 4
    assert [[choice["text"] for choice in one.result()["choices"]] for one in whole] == texts(
        alone, PROMPTS, [6] * 4, max_tokens=24, n=2, stop=("e",))


def test_bad_input_is_the_clients_own(cluster: Cluster) -> None:
    for wrong, status in (({"temperature": -1}, 400), ({"model": "nobody"}, 404), ({"max_tokens": 0}, 400),
                          ({"prompt": "x" * 200_000}, 400), ({"guided_regex": "("}, 400)):
        response = httpx.post(f"{cluster.url}/v1/completions", json=body("a", max_tokens=4) | wrong, timeout=WAIT)
        assert response.status_code == status, (wrong, response.text)


def test_a_conversation_stays_where_its_beginning_is(cluster: Cluster) -> None:
    beginning = "It was a bright cold day in April, and the clocks were striking thirteen. " * 6
    cached = [ask(cluster, beginning + "x" * turn, max_tokens=2, seed=1)["usage"]["prompt_tokens_details"]
              ["cached_tokens"] for turn in range(5)]
    assert cached[0] == 0
    assert all(tokens > 300 for tokens in cached[1:]), cached


def test_metrics_and_the_page_tell_replicas_apart(cluster: Cluster) -> None:
    asked = ask(cluster, "Who is there?", max_tokens=3, seed=2)
    found = cluster.metrics()
    names = {name.partition('replica="')[2][:8] for name in found if name.startswith("paceline_steps_total{")}
    assert len(names) == 2
    assert sum(found[f'paceline_requests_total{{replica="{name}"}}'] for name in names) >= 1
    assert found['vllm:request_success_total{finished_reason="length"}'] >= 1
    told = httpx.get(f"{cluster.url}/paceline/requests", timeout=WAIT).json()["requests"]
    assert asked["id"] in [one["id"] for one in told]
    story = httpx.get(f"{cluster.url}/paceline/request", params={"id": asked["id"]}, timeout=WAIT).json()
    assert sum(len(event["tokens"]) for event in story["events"]) == 3
    with httpx.stream("GET", f"{cluster.url}/paceline/live", timeout=WAIT) as response:
        frame = next(events(response))
    assert len(frame["cache"]["groups"]) == 2
    assert frame["totals"]["requests"] >= 1


def test_who_hangs_up_is_not_computed_for(cluster: Cluster) -> None:
    with httpx.stream("POST", f"{cluster.url}/v1/completions", timeout=WAIT,
                      json=body("Endless", stream=True, max_tokens=3000)) as response:
        next(events(response))
    until(lambda: sum(count for name, count in cluster.metrics().items() if "num_requests_running" in name) == 0, WAIT)


def test_ray_is_reached_from_this_machine_alone(cluster: Cluster) -> None:
    """But for a port of each replica, at which Serve itself listens everywhere; it asks for the token."""
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    for pid, name in cluster.family().items():
        open_to_all = [address for address in listening(pid) if address not in loopback]
        assert len(open_to_all) <= ("ServeReplica" in name), (name, open_to_all)


@pytest.mark.full
def test_a_frozen_replica_holds_nobody_up(cluster: Cluster, alone: LLM) -> None:
    """Neither those whose streams it has nor those that are on their way to it; and it goes on when it wakes up."""
    victim = cluster.replicas()[0]
    prompts = [f"{number} frozen {PROMPTS[number % 4]}" for number in range(16)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        begun: list[bool] = []
        early = [pool.submit(stream, cluster, prompt, lambda: begun.append(True), max_tokens=150, seed=number)
                 for number, prompt in enumerate(prompts[:8])]
        until(lambda: len(begun) == len(early), WAIT)
        os.kill(victim, signal.SIGSTOP)
        try:
            frozen = time.monotonic()
            late = [pool.submit(ask, cluster, prompt, max_tokens=20, seed=number)
                    for number, prompt in enumerate(prompts[8:])]
            told = [one.result(WAIT)[0] for one in early]
            answers = [one.result(WAIT)["choices"][0]["text"] for one in late]
            assert time.monotonic() - frozen < 60.0
            for number in range(4):
                ask(cluster, f"{number} later", max_tokens=2)
        finally:
            os.kill(victim, signal.SIGCONT)
    assert [[text] for text in told] == texts(alone, prompts[:8], list(range(8)), max_tokens=150)
    assert [[text] for text in answers] == texts(alone, prompts[8:], list(range(8)), max_tokens=20)

    def rests() -> bool:
        found = cluster.metrics()
        names = {name.partition('replica="')[2] for name in found if name.startswith("paceline_steps_total{")}
        return len(names) == 2 and not sum(count for name, count in found.items() if (
            "num_requests_running" in name or ("paceline_cache_blocks{" in name and 'state="used"' in name)))

    until(rests, WAIT)


def test_a_killed_replica_is_not_noticed_by_clients(cluster: Cluster, alone: LLM) -> None:
    begun: list[bool] = []
    prompts = [f"{number} {PROMPTS[number % 4]}" for number in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(stream, cluster, prompt, lambda: begun.append(True), max_tokens=150, seed=number)
                   for number, prompt in enumerate(prompts)]
        until(lambda: len(begun) == len(futures), WAIT)
        victim = cluster.replicas()[0]
        os.kill(victim, signal.SIGKILL)
        told = [future.result(WAIT) for future in futures]
    assert [[text] for text, _ in told] == texts(alone, prompts, list(range(8)), max_tokens=150)
    assert [last["usage"]["completion_tokens"] for _, last in told] == [150] * 8
    moved = [last["paceline"]["moved"] for _, last in told if last["paceline"].get("moved")]
    assert moved, "the one that was killed had nothing to do"
    assert all(one["exact"] for one in moved)
    until(lambda: len(cluster.replicas()) == 2 and victim not in cluster.replicas(), WAIT)  # Serve starts another
    assert httpx.get(f"{cluster.url}/ready", timeout=WAIT).status_code == 200


def test_nothing_stays_behind(cluster: Cluster) -> None:
    check_nothing_stays(cluster)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What was told, in one line. No Ray of this process's own is to begin with a token."""
    monkeypatch.setattr(environment, "set_for_own_ray", lambda: None)
    return lambda: " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("words", "sentence"), [
    (["--ray", "127.0.0.1:1"], "There is no Ray cluster at 127.0.0.1:1"),
    (["--ray", "somewhere"], "an address such as"),
    (["--replicas", "0"], "replicas must be at least 1"),
    (["--replicas", "2", "--threads", "0"], "threads must be at least 1"),
    (["--autoscale", "3"], "MIN:MAX"),
    (["--autoscale", "3:2"], "MIN:MAX"),
    (["--replicas", "2", "--routing", "best"], "prefix, round-robin, random"),
])
def test_mistakes_are_told_at_once(folder: Path, said: Callable[[], str], words: list[str], sentence: str) -> None:
    assert command(folder, *words) == 2
    assert sentence in said()


def test_a_model_that_is_not_there_costs_no_ray(said: Callable[[], str], tmp_path: Path) -> None:
    assert command(tmp_path / "nobody", "--replicas", "2") == 2
    assert "nobody" in said()
    assert not ray.is_initialized()


def test_an_old_ray_is_told_before_it_opens_a_port(folder: Path, said: Callable[[], str],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deploy", "serving"):
        monkeypatch.delitem(sys.modules, f"paceline.cluster.{name}", raising=False)
        monkeypatch.delattr(cluster_package, name, raising=False)
    monkeypatch.setattr(ray, "__version__", "2.59.1")
    assert command(folder, "--replicas", "2") == 2
    assert "Replicas need Ray 2.60 or later, and 2.59.1 is installed" in said()
    assert not ray.is_initialized()


def test_without_ray_it_says_what_to_install(folder: Path, said: Callable[[], str],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deploy", "serving"):
        monkeypatch.delitem(sys.modules, f"paceline.cluster.{name}", raising=False)
        monkeypatch.delattr(cluster_package, name, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert command(folder, "--replicas", "2") == 2
    assert "pip install 'paceline[cluster]'" in said()


@pytest.mark.full
@pytest.mark.slow
def test_a_replica_that_does_not_start_ends_the_server(folder: Path) -> None:
    words = ["serve", str(folder), "--port", "0", "--replicas", "1", "--kv-blocks", "4", "--max-model-len", "4096"]
    done = subprocess.run([sys.executable, "-m", "paceline", *words], capture_output=True, text=True, timeout=WAIT,
                          check=False)
    told = " ".join(done.stderr.split())
    assert done.returncode == 2, told
    assert "max_model_len=4096 needs" in told
    assert "Traceback" not in told
