"""Ranks that are threads of one process: to test and to debug, and two shards on one card."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from paceline.errors import ParallelError
from paceline.parallel.communicator import in_order

PATIENCE = 120.0
"""Seconds that a rank waits for the others in one exchange."""


class ThreadRanks:
    """The table at which the ranks of one process meet."""

    def __init__(self, size: int, patience: float = PATIENCE) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=patience)
        self._given: list[torch.Tensor | None] = [None] * size

    def of(self, rank: int) -> ThreadRank:
        return ThreadRank(self, rank)

    def leave(self) -> None:
        """Whoever waits here, now or later, hears that somebody is gone."""
        self._barrier.abort()

    def exchange(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        """What everybody gave. The others may write to theirs as soon as they have it back, so these are copies."""
        self._given[rank] = part
        self._meet()
        found = [given.clone() for given in self._given if given is not None]
        self._meet()
        return found

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as problem:
            raise ParallelError("Another rank of this engine is gone: make the engine anew.") from problem


class ThreadRank:
    """Implements Communicator."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks = ranks
        self.rank = rank
        self.size = ranks.size

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._ranks.exchange(self.rank, part)

    def add(self, part: torch.Tensor) -> torch.Tensor:
        return in_order(self._ranks.exchange(self.rank, part))

    def broadcast(self, tensor: torch.Tensor) -> None:
        given = self._ranks.exchange(self.rank, tensor)
        if self.rank:
            tensor.copy_(given[0])
