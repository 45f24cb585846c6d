"""Communicator: how ranks that each hold a share of a model exchange tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Communicator(Protocol):
    """One rank's end. Every rank makes the same calls in the same order, with tensors of the same shapes and types; a
    rank that is gone is a ParallelError for the others, never a wait without end."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """What each rank gave, in the order of ranks."""
        ...

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on each. On CPUs it is added up in the order of ranks; on cards the
        library chooses, so deterministic mode adds nothing but what is exact in any order."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's, written into everybody else's."""
        ...


class Alone:
    """The Communicator of a model that nobody shares."""

    rank: int = 0
    size: int = 1

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        return [part]

    def add(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def broadcast(self, tensor: torch.Tensor) -> None:
        return None


def in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum, from the first to the last."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
