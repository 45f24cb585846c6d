"""Shard: which share of a model a rank holds, and how shares become whole again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.part import Part
from paceline.models.weight_source import WeightSource
from paceline.parallel.communicator import Alone, Communicator

log = logging.getLogger("paceline.models")
UNIT = 32
"""What is split is split between so many outputs or inputs where there are enough: packed rows and the blocks of files
stay whole."""


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of one rank: `query` of them from number `first` on, which share `keys` key heads from number
    `first_keys` on."""

    first: int
    query: int
    first_keys: int
    keys: int
    split: bool
    """Whether other ranks hold other heads."""
    holders: int = 1
    """Ranks one after the other that hold the same key heads, where there are more ranks than those."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Of a model that `ranks.size` ranks hold together. Layers ask it what to take of their tensors.

    exact: every matrix is split by its outputs, and what the ranks computed is gathered: each sum is the one that a
    single rank computes. Otherwise those matrices that lead back into the stream are split by their inputs, and the
    ranks' results are added, which is one exchange in the place of two, and another order of additions.
    """

    ranks: Communicator = field(default_factory=Alone)
    exact: bool = True

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    def spans(self, total: int, unit: int = UNIT) -> list[tuple[int, int]]:
        """Each rank's [begin, end) of `total` things, as even as can be between whole `unit`s of them."""
        unit = unit if total % unit == 0 and total // unit >= self.size else 1
        ends = [(rank * (total // unit) // self.size) * unit for rank in range(self.size + 1)]
        return list(pairwise(ends))

    def span(self, total: int, unit: int = UNIT) -> tuple[int, int]:
        return self.spans(total, unit)[self.rank]

    def widths(self, total: int) -> list[int]:
        return [end - begin for begin, end in self.spans(total)]

    def rows(self, total: int, times: int = 1) -> Part | None:
        """This rank's outputs of a matrix that holds `times` like ones of `total` each; None: all of them."""
        if self.size == 1:
            return None
        begin, end = self.span(total)
        return Part(0, tuple((one * total + begin, one * total + end) for one in range(times)))

    def heads(self, config: ModelConfig) -> HeadShare:
        """Heads are split where all ranks can have as many with whole groups of them, or parts of one group each; a
        key head that more than one rank's queries need is held by each of those. Where that cannot be, every rank
        holds all heads."""
        query, keys, size = config.num_heads, config.num_kv_heads, self.size
        own = query // size
        if size == 1 or query % size:
            return HeadShare(0, query, 0, keys, split=False)
        if config.latent is not None:  # one latent of a token serves all heads
            return HeadShare(self.rank * own, own, 0, keys, split=True)
        if keys % size == 0:
            return HeadShare(self.rank * own, own, self.rank * (keys // size), keys // size, split=True)
        if size % keys == 0:
            holders = size // keys
            return HeadShare(self.rank * own, own, self.rank // holders, 1, split=True, holders=holders)
        return HeadShare(0, query, 0, keys, split=False)

    def joined(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """[N, own width] of each rank side by side."""
        if self.size == 1:
            return part
        most = max(widths)
        padded = part if part.shape[-1] == most else F.pad(part, (0, most - part.shape[-1]))
        found = self.ranks.gather(padded.contiguous())
        return torch.cat([one[..., :width] for one, width in zip(found, widths, strict=True)], dim=-1)

    def added(self, part: torch.Tensor) -> torch.Tensor:
        return part if self.size == 1 else self.ranks.add(part.contiguous())

    def merged(self, part: torch.Tensor) -> torch.Tensor:
        """Where of each element one rank has the value and all others have zeros: the values, to the bit. Added as
        bytes, which no order and no sign of zero can change."""
        if self.size == 1:
            return part
        whole = part.contiguous()
        return self.ranks.add(whole.view(torch.uint8)).view(whole.dtype)


WHOLE = Shard()
"""Of a model that one rank holds by itself."""


def check_shares(config: ModelConfig, size: int) -> None:
    """Refuse more ranks than there are shares; say where every rank holds everything."""
    if size > config.num_heads:
        raise ConfigError(f"tensor_parallel_size={size} is more than this model's {config.num_heads} attention heads: "
                          f"lower it to {config.num_heads} at most.")
    if not Shard(_Rank(size)).heads(config).split:
        log.warning("%d attention heads over %d key heads cannot be shared by %d ranks evenly: every rank holds and "
                    "computes all of them, and a share of the rest", config.num_heads, config.num_kv_heads, size)


class _Rank(Alone):
    """One of so many, to ask what it would hold."""

    def __init__(self, size: int) -> None:
        self.size = size


def shard_of(weights: WeightSource) -> Shard:
    """For which rank a source hands out its tensors."""
    found: Shard = getattr(weights, "shard", WHOLE)
    return found
