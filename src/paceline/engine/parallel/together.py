"""All ranks in one process, each a thread: to test, to debug, and to check two shards on one card."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from paceline.engine.parallel.calls import Call, Described, Share
from paceline.engine.parallel.follower import follow
from paceline.engine.parallel.leader import Leader
from paceline.errors import ParallelError
from paceline.kernels.interface import Kernels
from paceline.models.interface import CausalLM
from paceline.models.shard import Shard
from paceline.parallel.communicator import Communicator
from paceline.parallel.threads import PATIENCE, ThreadRanks

LEAVE = 10.0
"""Seconds in which a thread ends that was told to."""


class ThreadFollowers:
    """Implements Followers. They build their shares beside whoever makes this, who builds rank 0's."""

    def __init__(self, size: int, share: Callable[[Communicator], Share], patience: float = PATIENCE) -> None:
        self._meeting = ThreadRanks(size, patience)
        self.ranks: Communicator = self._meeting.of(0)
        self._share = share
        self._calls: list[queue.SimpleQueue[tuple[Call, Described] | None]] = [
            queue.SimpleQueue() for _ in range(size - 1)]
        self._why: str | None = None
        self.threads = [threading.Thread(target=self._run, args=(rank,), name=f"paceline-rank-{rank}", daemon=True)
                        for rank in range(1, size)]
        for thread in self.threads:
            thread.start()

    def tell(self, call: Call, tensors: Described) -> None:
        if self._why is not None:
            raise ParallelError(self._why)
        for calls in self._calls:
            calls.put((call, tensors))

    @property
    def gone(self) -> str | None:
        return self._why

    def why(self) -> str | None:
        return self._why

    def close(self) -> None:
        self._meeting.leave()
        for calls in self._calls:
            calls.put(None)
        for thread in self.threads:
            if thread is not threading.current_thread():  # the garbage collector may run in any of them
                thread.join(LEAVE)  # a thread that is inside of torch when the process ends takes it down

    def _run(self, rank: int) -> None:
        try:
            ranks = self._meeting.of(rank)
            follow(self._share(ranks), ranks, self._calls[rank - 1].get)
        except ParallelError:  # somebody else is gone
            pass
        except Exception as problem:
            self._why = f"Rank {rank} of {self._meeting.size} failed ({type(problem).__name__}: {problem}): make the " \
                        "engine anew."
        finally:
            self._meeting.leave()


def together(size: int, build: Callable[[Shard], CausalLM], kernels: Callable[[], Kernels], device: torch.device,
             patience: float = PATIENCE) -> Leader:
    """A model that so many threads hold together. `build`: a rank's share of it."""
    exact = kernels().deterministic

    def share(ranks: Communicator) -> Share:
        return Share(build(Shard(ranks, exact)), kernels(), device)

    followers = ThreadFollowers(size, share, patience)
    return Leader(build(Shard(followers.ranks, exact)), followers)
