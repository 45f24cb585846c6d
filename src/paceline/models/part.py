"""Part: which rows or columns of a tensor a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds of a matrix [outputs, inputs]."""

    shape: tuple[int, int]
    """Of the whole."""
    rows: Part | None = None
    """None: all."""
    columns: Part | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Ranges [begin, end) along one axis, one after the other."""

    axis: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    @property
    def places(self) -> list[int]:
        """All that is kept, one by one."""
        return [place for begin, end in self.ranges for place in range(begin, end)]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (*whole[:self.axis], self.count, *whole[self.axis + 1:])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        pieces = [tensor.narrow(self.axis, begin, end - begin) for begin, end in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.axis)

    def turned(self) -> Part:
        """Of the same matrix, stored the other way round."""
        return Part(1 - self.axis, self.ranges)

    def reordered(self, order: Sequence[int]) -> Part:
        """Where those lie in a file that has, in the place of number i, the one of number order[i]."""
        ranges: list[tuple[int, int]] = []
        for place in self.places:
            stored = int(order[place])
            if ranges and ranges[-1][1] == stored:
                ranges[-1] = (ranges[-1][0], stored + 1)
            else:
                ranges.append((stored, stored + 1))
        return Part(self.axis, tuple(ranges))
