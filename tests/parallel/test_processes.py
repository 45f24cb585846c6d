"""Ranks that are processes: gloo between them, wires by which each notices the other's end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import write_model

from paceline import LLM, SamplingParams
from paceline.config import EngineOptions
from paceline.engine import build
from paceline.engine.build import engine_for
from paceline.engine.parallel import meeting, processes
from paceline.engine.parallel.meeting import Meeting
from paceline.engine.parallel.processes import Failed, Work
from paceline.errors import ConfigError, ParallelError
from parallel.ranks import shared_model

PROMPTS = ["hello world, how are you", "abc", "one two three one two three"]
PARAMS = SamplingParams(max_tokens=20, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return tokens(LLM(str(folder), deterministic=True))


def tokens(llm: LLM, **more: Any) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, PARAMS, **more)]


def ended(pid: int, patience: float = 20.0) -> bool:
    until = time.monotonic() + patience
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":  # ended, and nobody has asked how
                return True
        time.sleep(0.02)
    return not os.path.exists(f"/proc/{pid}")


@pytest.mark.slow
def test_two_processes_say_what_one_says_until_one_is_killed(folder: Path, expected: list[list[int]]) -> None:
    llm = LLM(str(folder), deterministic=True, tensor_parallel_size=2)
    assert tokens(llm) == expected
    assert tokens(llm, speculation="auto") == expected
    assert tokens(llm, speculation="exit") == expected
    followers: Any = llm.engine.model._followers  # type: ignore[attr-defined]
    os.kill(followers.pids[0], signal.SIGTERM)  # as to all of a group: that is rank 0's to answer
    assert tokens(llm, speculation="ngram") == expected
    assert llm.engine.model.lost is None
    os.kill(followers.pids[0], signal.SIGKILL)
    for _ in range(2):  # the first notices, the others are told
        for out in llm.generate(PROMPTS, PARAMS):
            assert isinstance(out.error, ParallelError)
            assert "Rank 1 of 2 of this model is gone (its process was ended by signal 9)" in str(out.error)
    assert llm.engine.model.lost is not None


@pytest.mark.slow
def test_four_processes_say_what_one_says(folder: Path, expected: list[list[int]]) -> None:
    llm = LLM(str(folder), deterministic=True, tensor_parallel_size=4)
    assert tokens(llm) == expected
    pids = llm.engine.model._followers.pids  # type: ignore[attr-defined]
    llm.engine.model._followers.close()  # type: ignore[attr-defined]
    assert all(ended(pid) for pid in pids)


@pytest.fixture
def rank_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Any]]:
    """Starts one in a folder."""
    started: list[Any] = []

    def start(folder: Path) -> Any:
        monkeypatch.chdir(folder)
        started.append(processes._start(1))
        return started[-1]

    yield start
    for other in started:
        other.process.kill()
        other.process.wait()


@pytest.fixture
def rank(rank_in: Callable[[Path], Any]) -> Any:
    return rank_in(Path.cwd())


@pytest.mark.full
def test_a_rank_ends_with_rank_0_and_says_why_it_cannot_start(rank: Any, tmp_path: Path) -> None:
    """However rank 0 ends, its end of the wire does; a rank that failed before has said why."""
    rank.wire.send(Work(EngineOptions(tensor_parallel_size=1), str(tmp_path / "nothing"), 0, "cpu", torch.float32,
                        True, 1, Meeting(file=str(tmp_path / "meeting"))))
    while not isinstance(said := rank.wire.recv(), Failed):
        pass
    assert "There is no model at" in said.reason
    rank.wire.close()
    assert rank.process.wait(20) in (0, 1)  # by its failure, or because the wire has ended


@pytest.mark.full
def test_a_rank_without_rank_0_ends(rank: Any) -> None:
    rank.wire.close()
    assert rank.process.wait(60) is not None


@pytest.mark.full
def test_ranks_end_when_rank_0_is_killed(folder: Path) -> None:
    script = ("import sys, time; from paceline import LLM; llm = LLM(sys.argv[1], deterministic=True, "
              "tensor_parallel_size=2); print(llm.engine.model._followers.pids[0], flush=True); time.sleep(100)")
    leader = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
        assert os.path.exists(f"/proc/{pid}")
    finally:
        leader.kill()
        leader.wait()
    assert ended(pid)


def test_a_rank_that_does_not_start_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.sys, "executable", "/bin/false")
    with pytest.raises(ParallelError, match=r"Rank 1 of 2 .* did not start: its process ended with status 1"):
        LLM(str(folder), deterministic=True, tensor_parallel_size=2)


class OtherRank:
    """What a rank says that is not as rank 0 is."""

    def __init__(self, *said: Any) -> None:
        here, there = connection.Pipe()
        for one in said:
            there.send(one)
        self.rank, self.there = processes._Rank(1, here), there


def test_ranks_that_are_not_alike_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version, or another model under the same name on another host."""
    other = OtherRank(processes.Hello("0.0.1"))
    monkeypatch.setattr(processes, "_start", lambda number: other.rank)
    with pytest.raises(ParallelError, match=r"it is Paceline 0\.0\.1, and rank 0 is .*: install the same"):
        LLM(str(folder), deterministic=True, tensor_parallel_size=2)
    followers = object.__new__(processes.ProcessFollowers)
    followers._others, followers._size = [OtherRank(processes.Ready("sha256:other")).rank], 2
    with pytest.raises(ParallelError, match="its files are of another model"):
        followers.wait("sha256:ours")


def test_one_that_cannot_join_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is told, not after five minutes that the others do not answer."""
    other = OtherRank(processes.Hello(processes.version()), processes.Here(), Failed("there is no card 1"))
    monkeypatch.setattr(processes, "_start", lambda number: other.rank)
    with pytest.raises(ParallelError, match=r"Rank 1 of 2 .* did not start: there is no card 1\."):
        LLM(str(folder), deterministic=True, tensor_parallel_size=2)


@pytest.mark.slow
def test_a_rank_imports_what_rank_0_does(rank_in: Callable[[Path], Any], tmp_path: Path) -> None:
    """Not what happens to lie in the folder that the server was started in."""
    (tmp_path / "queue.py").write_text("raise SystemExit(7)")
    assert isinstance(rank_in(tmp_path).hear(60), processes.Hello)


def test_strangers_keep_no_rank_from_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scans, somebody who says nothing and somebody with another token, all before the rank."""
    monkeypatch.setenv(meeting.TOKEN_VARIABLE, "0123456789abcdef")
    with socket.create_server(("127.0.0.1", 0)) as found:
        place = ("127.0.0.1", found.getsockname()[1])
    came: list[Any] = []

    def call() -> None:
        came.append(dialled(place))  # and says nothing
        dialled(place).close()
        for said in (b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\x10" + b"x" * 16):
            came.append(dialled(place))
            came[-1].sendall(said)
        with suppress(connection.AuthenticationError, EOFError, OSError):
            connection.Client(place, authkey=b"another token here")
        came.append(connection.Client(place, authkey=b"0123456789abcdef"))
        came[-1].send("here")

    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    [wire] = meeting.meet(*place, 2, patience=10.0)
    assert wire.recv() == "here"
    calling.join()
    assert came[0].recv(1) != b"" and came[0].recv(1000) != b"", "its challenge"
    assert came[0].recv(1000) == b"", "and then rank 0 has hung up"
    for one in (wire, *came):
        one.close()


def dialled(place: tuple[str, int]) -> socket.socket:
    until = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(place, timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_ranks_that_do_not_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(meeting.TOKEN_VARIABLE, "0123456789abcdef")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with pytest.raises(ParallelError, match=r"Of 2 other ranks 0 came"):
        meeting.meet("127.0.0.1", port, 3, patience=0.2)


@pytest.mark.parametrize("text", ["0.0.0.0:7000", "[::]:7000"])
def test_other_ranks_need_an_address_to_go_to(text: str) -> None:
    """These can be listened at, but a rank that went there would find its own host."""
    with pytest.raises(ConfigError, match="name the address of rank 0's host"):
        meeting.address(text)


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:x", "host:0", "host:70000"])
def test_addresses_of_other_hosts_are_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        meeting.address(text)


def test_other_hosts_need_a_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(meeting.TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match="secret of at least 16"):
        LLM(str(folder), tensor_parallel_size=2, tensor_parallel_address="127.0.0.1:1")


@pytest.mark.full
def test_ranks_of_other_hosts_come_by_themselves(folder: Path, expected: list[list[int]], tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two hosts, both of which are this one."""
    monkeypatch.setenv(meeting.TOKEN_VARIABLE, "0123456789abcdef")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    place = f"127.0.0.1:{port}"
    loop = (f"until {sys.executable} -m paceline.engine.parallel {place}; do sleep 0.5; done")
    other = subprocess.Popen(["sh", "-c", loop], stderr=subprocess.DEVNULL)
    try:
        llm = LLM(str(folder), deterministic=True, tensor_parallel_size=2, tensor_parallel_address=place)
        assert tokens(llm) == expected
        llm.engine.model._followers.close()  # type: ignore[attr-defined]
        assert other.wait(30) == 0
    finally:
        other.kill()
        other.wait()


def test_ranks_share_the_memory_of_their_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each may take for its cache is part of what there is, unless the others are elsewhere."""
    monkeypatch.setattr(build.configs, "available_memory", lambda: 8 << 20)

    def blocks(**more: Any) -> int:
        options = EngineOptions.of(tensor_parallel_size=2, **more)
        engine = engine_for(shared_model(), None, options, device=torch.device("cpu"), dtype=torch.float32)
        return engine.config.kv_blocks

    assert blocks() == blocks(tensor_parallel_address="10.0.0.1:7000") // 2
