"""Plane: what somebody keeps of every token beside the target's keys and values, under the same block tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

WORD = 4


@dataclass(frozen=True, slots=True)
class Plane:
    """A tensor [slots, *shape] of the cache, beside those of a cache group's layers. Whatever becomes of a token there
    (moved, copied, swapped, shared with another text) becomes of its entry here: entry j may depend on the tokens up to
    j and on nothing after them."""

    name: str
    """Under which its owner finds it."""
    shape: tuple[int, ...]
    """Of a token's entry."""
    dtype: torch.dtype
    group: int = 0
    """The cache group whose slots it has. The first holds the longest texts: full attention where there is any."""

    def __post_init__(self) -> None:
        if self.bytes_per_token % WORD:
            raise ValueError(f"what is kept of a token takes whole 32-bit words; {self.name} takes "
                             f"{self.bytes_per_token} bytes")

    @property
    def bytes_per_token(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
