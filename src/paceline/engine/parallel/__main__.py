"""A rank besides rank 0, as a process: `python -m paceline.engine.parallel HOST:PORT`, or started by rank 0 itself."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import sys
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import NoReturn

import torch

from paceline.engine.build import follower_share
from paceline.engine.parallel.calls import Call, Described
from paceline.engine.parallel.follower import follow
from paceline.engine.parallel.meeting import TOKEN_VARIABLE, address, token
from paceline.engine.parallel.processes import Failed, Hello, Here, Ready, Work, version
from paceline.errors import PacelineError, ParallelError
from paceline.models.load.resolve import resolve
from paceline.models.shard import Shard
from paceline.parallel.processes import ProcessRank

Calls = queue.SimpleQueue[tuple[Call, Described] | None]


def connect(place: str) -> Connection:
    if place.startswith("fd:"):
        return Connection(int(place.removeprefix("fd:")))
    found: Connection = Client(address(place), authkey=token())
    return found


def own_host(wire: Connection) -> str:
    """The address by which rank 0 sees this one."""
    with socket.socket(fileno=os.dup(wire.fileno())) as end:
        name = end.getsockname()
    return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"


def listen(wire: Connection, calls: Calls) -> None:
    """Take calls in, whatever the rest of the process waits for. Rank 0's end, be it a kill, is this one's."""
    try:
        while (packed := wire.recv_bytes()) and (told := pickle.loads(packed)) is not None:
            calls.put(told)
    except (EOFError, OSError):
        pass
    os._exit(0)


def run(wire: Connection) -> None:
    wire.send(Hello(version()))
    work: Work = wire.recv()
    size, device = work.options.tensor_parallel_size, torch.device(work.device)
    calls: Calls = queue.SimpleQueue()
    threading.Thread(target=listen, args=(wire, calls), name="paceline-calls", daemon=True).start()
    try:
        torch.set_num_threads(work.threads)
        path = resolve(work.options.model) if work.path is None else Path(work.path)
        wire.send(Here())
        ranks = ProcessRank(work.meeting.store(size), work.rank, size, device, own_host(wire))
        share, revision = follower_share(work.options, path, device, work.dtype, Shard(ranks, work.exact))
        wire.send(Ready(revision))
    except Exception as problem:
        leave(wire, problem)
    try:
        follow(share, ranks, calls.get)
    except ParallelError:  # another rank is gone; rank 0 sees that for itself
        os._exit(1)
    except Exception as problem:
        leave(wire, problem)


def leave(wire: Connection, problem: Exception) -> NoReturn:
    """With a reason."""
    said = str(problem) if isinstance(problem, PacelineError) else f"{type(problem).__name__}: {problem}"
    wire.send(Failed(said.rstrip(".")))
    os._exit(1)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # which reach everybody, and are rank 0's to answer
        signal.signal(number, signal.SIG_IGN)
    if len(sys.argv) != 2:
        sys.exit("usage: python -m paceline.engine.parallel HOST:PORT")
    try:
        wire = connect(sys.argv[1])
    except (AuthenticationError, EOFError) as problem:
        sys.exit(f"Rank 0 at {sys.argv[1]} hung up ({problem or type(problem).__name__}): see that {TOKEN_VARIABLE} is "
                 "the same there, and that it still waits for ranks.")
    except (PacelineError, OSError, ValueError) as problem:
        sys.exit(f"Cannot reach rank 0 at {sys.argv[1]}: {problem}")
    run(wire)


if __name__ == "__main__":
    main()
