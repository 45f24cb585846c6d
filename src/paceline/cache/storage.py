"""The tensors behind the block tables, and the copies and moves the bookkeeping asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from paceline.cache.transfers import BlockCopy, SlotMove
from paceline.kernels.groups import CacheGroup
from paceline.kernels.reference.quantised import LARGEST, as_bytes

SCALE = torch.float32


def bytes_per_token(groups: Sequence[CacheGroup], dtype: torch.dtype) -> int:
    """What a token takes in a KVStorage of these groups, scales included."""
    return sum(group.bytes_per_token(dtype.itemsize, SCALE.itemsize if dtype in LARGEST else 0) for group in groups)


class KVStorage:
    """Keys and values of every layer: [slots, kv_heads, head_dim], slot = block * block_size + offset.

    8-bit caches hold a float32 scale a token and head beside them, [slots, kv_heads], in key_scales and value_scales;
    for other dtypes those are empty. Zeroed at start and never holding anything but finite values of finished
    forwards; block 0 stays zero.
    """

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int,
                 dtype: torch.dtype, device: torch.device) -> None:
        """`num_blocks` counts the null block."""
        self.groups = tuple(groups)
        self.block_size = block_size
        self.dtype = dtype
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.key_scales: dict[int, torch.Tensor] = {}
        self.value_scales: dict[int, torch.Tensor] = {}
        for group, blocks in zip(self.groups, num_blocks, strict=True):
            shape = (blocks * block_size, group.kv_heads, group.head_dim)
            for layer in group.layers:
                self.keys[layer] = _zeros(shape, dtype, device)
                self.values[layer] = _zeros(shape, dtype, device)
                if dtype in LARGEST:
                    self.key_scales[layer] = _zeros(shape[:2], SCALE, device)
                    self.value_scales[layer] = _zeros(shape[:2], SCALE, device)
        self.planes = [plane for plane in (self.keys, self.values, self.key_scales, self.value_scales) if plane]
        self.device = device

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for plane in self.planes for t in plane.values())

    def apply(self, moves: Sequence[SlotMove], copies: Sequence[BlockCopy]) -> None:
        """Moves first, then copies: a block may be shared right after a path was compacted into it."""
        for index, group in enumerate(self.groups):
            slots = [(move.source, move.target) for move in moves if move.group == index]
            self._transfer(group, slots)
            blocks = [(copy.source, copy.target) for copy in copies if copy.group == index]
            size = self.block_size
            self._transfer(group, [(s * size + i, t * size + i) for s, t in blocks for i in range(size)])

    def _transfer(self, group: CacheGroup, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        source, target = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        for plane in self.planes:
            for layer in group.layers:
                # Gather into a fresh tensor, then scatter: sources and targets overlap.
                values = as_bytes(plane[layer])
                values[target] = values[source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every byte; calloc's pages are zero and cost nothing until a block is used.
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
