"""Runs a model by hand: allocates blocks, lays out steps, returns logits. What the engine does, in one screenful."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from paceline.cache.storage import KVStorage
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM


class DictWeights:
    """A WeightSource over tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: {tuple(tensor.shape)} instead of {shape}")
        return tensor

    def has(self, name: str) -> bool:
        return name in self.tensors


@dataclass
class Sequence:
    """Committed tokens and one block table for each cache group."""

    tokens: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)


@dataclass
class Rows:
    """A row group of a step: tokens that follow what the sequence has committed."""

    seq: Sequence
    tokens: list[int]
    parents: list[int] | None = None


class Hand:
    """A model, its caches and a shuffled free list. Blocks nobody wrote hold NaN: reading one shows."""

    def __init__(self, model: CausalLM, kernels: Kernels, *, block_size: int = 4, blocks: int = 200,
                 seed: int = 0) -> None:
        self.model, self.kernels, self.block_size = model, kernels, block_size
        self.free = [list(range(1, blocks)) for _ in model.cache_groups]
        for free in self.free:
            random.Random(seed).shuffle(free)
        groups = model.cache_groups
        self.storage = KVStorage(groups, [blocks] * len(groups), block_size, torch.float32, torch.device("cpu"))
        for planes in self.storage.planes:
            for plane in planes:
                plane[block_size:] = torch.nan

    def new(self) -> Sequence:
        return Sequence(tables=[[] for _ in self.model.cache_groups])

    def layout(self, groups: list[Rows]) -> Layout:
        size = self.block_size
        offsets, positions = [0], []
        for rows in groups:
            offsets.append(offsets[-1] + len(rows.tokens))
            depths: list[int] = []
            for row in range(len(rows.tokens)):
                parent = row - 1 if rows.parents is None else rows.parents[row]
                depths.append(0 if parent < 0 else depths[parent] + 1)
            positions += [len(rows.seq.tokens) + depth for depth in depths]
        views = []
        for index, group in enumerate(self.model.cache_groups):
            slots = []
            for rows in groups:
                start, table = len(rows.seq.tokens), rows.seq.tables[index]
                while len(table) * size < start + len(rows.tokens):
                    table.append(self.free[index].pop())
                if group.window is not None:
                    # What every row of this and later steps has passed is gone from the table.
                    for index_passed in range(max(0, start - group.window + 1) // size):
                        if table[index_passed]:
                            self.free[index].insert(0, table[index_passed])
                        table[index_passed] = 0
                slots += [table[p // size] * size + p % size for p in range(start, start + len(rows.tokens))]
            width = max(len(rows.seq.tables[index]) for rows in groups)
            tables = torch.tensor([rows.seq.tables[index] + [0] * (width - len(rows.seq.tables[index]))
                                   for rows in groups])
            views.append(GroupView(tables, torch.tensor(slots), group.window))
        return Layout(torch.tensor(positions), offsets, [len(rows.seq.tokens) for rows in groups],
                      [rows.parents for rows in groups], size, views)

    def forward(self, groups: list[Rows], taps: frozenset[int] = frozenset()) -> Forward:
        storage = self.storage
        return Forward(self.kernels, self.layout(groups), storage.keys, storage.values, storage.groups, taps)

    @torch.inference_mode()
    def step(self, groups: list[Rows]) -> list[torch.Tensor]:
        """Run one step; chains are committed, trees are not. Logits [rows, V] of each group."""
        context = self.forward(groups)
        tokens = torch.tensor([token for rows in groups for token in rows.tokens])
        logits = self.model.logits(self.model.forward(tokens, context), self.kernels)
        for rows in groups:
            if rows.parents is None:
                rows.seq.tokens = rows.seq.tokens + rows.tokens
        return list(logits.split([len(rows.tokens) for rows in groups]))

    def run(self, tokens: list[int], chunk: int | None = None) -> torch.Tensor:
        """Logits [len(tokens), V] of a fresh sequence, fed in chunks."""
        seq = self.new()
        chunk = chunk or len(tokens)
        logits = [self.step([Rows(seq, tokens[i:i + chunk])])[0] for i in range(0, len(tokens), chunk)]
        self.release(seq)
        return torch.cat(logits)

    def release(self, seq: Sequence) -> None:
        """Give the blocks back, poisoned."""
        for index, table in enumerate(seq.tables):
            for block in filter(None, table):
                self.free[index].insert(0, block)
                for plane in self.storage.planes[index]:
                    plane[block * self.block_size:(block + 1) * self.block_size] = torch.nan
        seq.tables = [[] for _ in seq.tables]
