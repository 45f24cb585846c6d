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
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import ServerProcess, events, until, write_model

import paceline.cluster as cluster_package
from paceline import LLM, SamplingParams
from paceline.cli.main import main
from paceline.cluster import environment

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc"), pytest.mark.slow]

WAIT = 120.0
PROMPTS = ["Once upon a time there was a small engine that", "The sum of two and three", "A", "To be or not to be " * 9]


class Cluster(ServerProcess):
    def family(self) -> dict[int, str]:
        """Every process below the server's, by id: its title."""
        parents: dict[int, int] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
        found, fresh = set(), {self.process.pid}
        while fresh:
            found |= fresh
            fresh = {child for child, parent in parents.items() if parent in found} - found
        return {pid: title(pid) for pid in found - {self.process.pid}}

    def replicas(self) -> list[int]:
        return sorted(pid for pid, name in self.family().items() if "ServeReplica" in name)


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    """One engine in this process: what everybody should answer."""
    return LLM(str(folder), deterministic=True)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(folder, tmp_path_factory.mktemp("log") / "log", "--deterministic", "--replicas", "2", "--threads",
                   "1", "--drain", "5")
    try:
        until(lambda: httpx.get(f"{made.url}/ready").status_code == 200, WAIT)
        yield made
    finally:
        if made.process.poll() is None:
            made.stop()


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "ignore_eos": True, "temperature": 1.0, **more}


def ask(cluster: Cluster, prompt: str, **more: Any) -> dict[str, Any]:
    response = httpx.post(f"{cluster.url}/v1/completions", json=body(prompt, **more), timeout=WAIT)
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


def stream(cluster: Cluster, prompt: str, begun: Any = None, **more: Any) -> tuple[str, dict[str, Any]]:
    """The text, and the last chunk."""
    text, last = "", {}
    sent = body(prompt, stream=True, stream_options={"include_usage": True}, **more)
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=sent, timeout=WAIT) as response:
        assert response.status_code == 200
        for number, last in enumerate(events(response)):
            assert "error" not in last, last
            text += "".join(choice["text"] for choice in last["choices"])
            if number == 3 and begun is not None:
                begun()
    return text, last


def texts(alone: LLM, prompts: list[str], seeds: list[int], **params: Any) -> list[list[str]]:
    wanted = [SamplingParams(temperature=1.0, ignore_eos=True, seed=seed, **params) for seed in seeds]
    return [[one.text for one in output.outputs] for output in alone.generate(prompts, wanted)]


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


def listening(pid: int) -> list[str]:
    """Addresses, as the kernel writes them, at which a process waits for connections."""
    own = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(one))
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{table}").read_text(
        ).splitlines()[1:]]
    return [line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]


def test_ray_is_reached_from_this_machine_alone(cluster: Cluster) -> None:
    """But for a port of each replica, at which Serve itself listens everywhere; it asks for the token."""
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    for pid, name in cluster.family().items():
        open_to_all = [address for address in listening(pid) if address not in loopback]
        assert len(open_to_all) <= ("ServeReplica" in name), (name, open_to_all)


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
    family = cluster.family()
    assert any("raylet" in name for name in family.values())
    assert cluster.stop() == 0
    end = time.monotonic() + WAIT
    while left := [pid for pid in family if title(pid)]:
        assert time.monotonic() < end, [title(pid) for pid in left]
        time.sleep(0.1)
    assert "Traceback" not in cluster.log()


def command(folder: Path, *words: str) -> int:
    return main(["serve", str(folder), "--port", "0", *words])


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
