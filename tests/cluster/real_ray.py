"""A server with replicas on a Ray of its own, in processes of its own, and what is asked of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from serving import ServerProcess, events, until

from paceline import LLM, SamplingParams
from paceline.cli.main import main

WAIT = 120.0


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


def listening(pid: int) -> list[str]:
    """Addresses, as the kernel writes them, at which a process waits for connections."""
    own = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(one))
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{table}").read_text(
        ).splitlines()[1:]]
    return [line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]


def command(folder: Path, *words: str) -> int:
    return main(["serve", str(folder), "--port", "0", *words])


@contextmanager
def running(folder: Path, log: Path, *words: str) -> Iterator[Cluster]:
    made = Cluster(folder, log, "--deterministic", "--threads", "1", "--drain", "5", *words)
    try:
        until(lambda: httpx.get(f"{made.url}/ready").status_code == 200, WAIT)
        yield made
    finally:
        if made.process.poll() is None:
            made.stop()


def check_nothing_stays(cluster: Cluster) -> None:
    """It ends in good order, and so does everybody it has started."""
    family = cluster.family()
    assert any("raylet" in name for name in family.values())
    assert cluster.stop() == 0
    end = time.monotonic() + WAIT
    while left := [pid for pid in family if title(pid)]:
        assert time.monotonic() < end, [title(pid) for pid in left]
        time.sleep(0.1)
    assert "Traceback" not in cluster.log()
