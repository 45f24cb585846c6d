"""`paceline serve --prefill-replicas 1 --decode-replicas 1` on a Ray of its own: texts as of one engine, also when the
prefill replica is killed."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from cluster.real_ray import WAIT, Cluster, ask, check_nothing_stays, command, listening, running, stream, texts, title
from paceline import LLM
from paceline.cluster import environment

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc"), pytest.mark.slow]

LONG = [f"{number}: It was a bright cold day in April, and the clocks were striking thirteen. " * 4
        for number in range(6)]


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(folder, tmp_path_factory.mktemp("log") / "log", "--prefill-replicas", "1", "--decode-replicas", "1",
                 "--prefill-speculation", "none") as made:
        yield made


def counted(cluster: Cluster, name: str) -> float:
    return sum(count for one, count in cluster.metrics().items() if one.startswith(name))


def test_texts_are_those_of_one_engine(cluster: Cluster, alone: LLM) -> None:
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        told = [future.result(WAIT) for future in [
            pool.submit(stream, cluster, prompt, max_tokens=24, seed=5) for prompt in LONG]]
    assert [[text] for text, _ in told] == texts(alone, LONG, [5] * 6, max_tokens=24)
    assert counted(cluster, "paceline_handovers_total{") >= 1
    assert counted(cluster, 'paceline_requests_total{replica="prefill-') >= 1
    assert counted(cluster, 'paceline_requests_total{replica="decode-') == 6


def test_ports_are_reached_from_this_machine_alone(cluster: Cluster) -> None:
    """But for Serve's own port of each replica."""
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    for pid in cluster.replicas():
        assert len([address for address in listening(pid) if address not in loopback]) <= 1, title(pid)


def test_a_killed_prefill_replica_is_not_noticed(cluster: Cluster, alone: LLM) -> None:
    victim = next(pid for pid in cluster.replicas() if "prefill" in title(pid))
    prompts = [f"again {prompt}" for prompt in LONG]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(ask, cluster, prompt, max_tokens=24, seed=7) for prompt in prompts]
        os.kill(victim, signal.SIGKILL)
        told = [future.result(WAIT) for future in futures]
    assert [[one["choices"][0]["text"]] for one in told] == texts(alone, prompts, [7] * 6, max_tokens=24)
    assert all("moved" not in one["paceline"] for one in told), "the decode replica had them all the time"
    assert ask(cluster, "and later " + LONG[0], max_tokens=4, seed=1)["usage"]["completion_tokens"] == 4


def test_nothing_stays_behind(cluster: Cluster) -> None:
    check_nothing_stays(cluster)


@pytest.mark.parametrize(("words", "sentence"), [
    (["--prefill-replicas", "1"], "go together"),
    (["--prefill-replicas", "1", "--decode-replicas", "1", "--replicas", "2"], "give replicas, or"),
    (["--replicas", "2", "--prefill-speculation", "none"], "--prefill-speculation is for --prefill-replicas"),
    (["--replicas", "2", "--tensor-parallel-size", "2", "--tensor-parallel-address", "127.0.0.1:7000"],
     "every replica would wait there"),
])
def test_mistakes_are_told_at_once(folder: Path, words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "set_for_own_ray", lambda: None)
    assert command(folder, *words) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
