"""Steps made by hand for attention kernels, and what attention over them should give."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.trees import ancestry, depths

TREE = [-1, 0, 0, 1, 1, 2, 4, 4, 0]


@dataclass
class Group:
    """Rows of one sequence with their own random queries, keys and values, whoever else is in the step."""

    start: int
    rows: int
    parents: list[int] | None = None
    seed: int = 0


@dataclass
class Step:
    layout: Layout
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    prefixes: list[tuple[torch.Tensor, torch.Tensor]]
    own: list[tuple[torch.Tensor, torch.Tensor]]


def make(groups: list[Group], *, heads: int = 6, kv_heads: int = 2, dim: int = 16, block_size: int = 4,
         window: int | None = None, place: int = 0, mutual: bool = False, first: int = 0) -> Step:
    """Caches full of NaN but for what the groups own, from position `first` on; tables shuffled by `place`."""
    rng = random.Random(place)
    needed = [-(-(group.start + group.rows) // block_size) for group in groups]
    free = list(range(1, sum(needed) + 9))
    rng.shuffle(free)
    total = (sum(needed) + 9) * block_size
    keys, values = (torch.full((total, kv_heads, dim), torch.nan) for _ in range(2))
    keys[:block_size] = values[:block_size] = 0
    tables = torch.zeros(len(groups), max(needed) + 1, dtype=torch.int64)
    offsets, positions, slots, queries, prefixes, own = [0], [], [], [], [], []
    for index, group in enumerate(groups):
        tables[index, :needed[index]] = torch.tensor([free.pop() for _ in range(needed[index])])
        source = torch.Generator().manual_seed(group.seed * 7919 + group.start)
        k, v = (torch.randn(group.start + group.rows, kv_heads, dim, generator=source) for _ in range(2))
        queries.append(torch.randn(group.start + group.rows, heads, dim, generator=source)[group.start:])
        physical = torch.arange(group.start + group.rows)
        where = tables[index, physical // block_size] * block_size + physical % block_size
        keys[where[first:]], values[where[first:]] = k[first:], v[first:]
        if window is not None:  # blocks every row has passed were given away
            for block in range(max(0, group.start - window + 1) // block_size):
                gone = int(tables[index, block])
                keys[gone * block_size:(gone + 1) * block_size] = torch.nan
                tables[index, block] = 0
        slots.append(where[group.start:])
        offsets.append(offsets[-1] + group.rows)
        depth = range(group.rows) if group.parents is None else depths(group.parents)
        positions += [group.start + d for d in depth]
        prefixes.append((k[:group.start], v[:group.start]))
        own.append((k[group.start:], v[group.start:]))
    view = GroupView(tables, torch.cat(slots), window, first=first)
    layout = Layout(torch.tensor(positions), offsets, [group.start for group in groups],
                    [group.parents for group in groups], block_size, [view], mutual=mutual)
    return Step(layout, torch.cat(queries), keys, values, prefixes, own)


LATENT = 24
"""Features of a latent value, the first of a key's 32."""


def latent_step(groups: list[Group], **how: Any) -> Step:
    """Keys that all heads share, whose beginnings are the values."""
    step = make(groups, kv_heads=1, dim=32, **how)
    step.values = step.keys[..., :LATENT]
    step.prefixes = [(k, k[..., :LATENT]) for k, _ in step.prefixes]
    step.own = [(k, k[..., :LATENT]) for k, _ in step.own]
    return step


def attend(kernels: Kernels, step: Step, softcap: float = 0.0) -> torch.Tensor:
    return kernels.attend(step.q, step.keys, step.values, step.layout, step.layout.views[0], 0.25, softcap=softcap)


def oracle(groups: list[Group], step: Step, softcap: float = 0.0) -> torch.Tensor:
    view, out = step.layout.views[0], []
    for group, (pk, pv), (ok, ov), begin in zip(groups, step.prefixes, step.own, step.layout.offsets):
        paths = ancestry(group.parents if group.parents is not None else list(range(-1, group.rows - 1)))
        if step.layout.mutual:
            paths = [list(range(group.rows))] * group.rows
        for row, path in enumerate(paths):
            k, v = (torch.cat((prefix, mine[path])).double() for prefix, mine in ((pk, ok), (pv, ov)))
            low = max(view.first, 0 if view.window is None else len(k) - view.window)
            k, v = k[low:], v[low:]
            shared = step.q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
            scores = torch.einsum("hd,shd->hs", step.q[begin + row].double(), k) * 0.25
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out.append(torch.einsum("hs,shd->hd", torch.softmax(scores, -1), v))
    return torch.stack(out)


CASES = {
    "one token": [Group(0, 1)],
    "one decode": [Group(37, 1)],
    "a prompt": [Group(0, 70)],
    "a later chunk": [Group(45, 30)],
    "decodes": [Group(start, 1, seed=start) for start in (0, 3, 64, 65, 127, 128, 9)],
    "decodes of very different lengths": [Group(start, 1, seed=start) for start in (3000, 4, 5, 1, 40, 2900, 700)],
    "a tree": [Group(13, len(TREE), TREE)],
    "a tree at the start": [Group(0, len(TREE), TREE)],
    "trees of one size": [Group(13, len(TREE), TREE), Group(62, len(TREE), [-1, 0, 1, 1, 1, 1, 5, 6, 7], 1)],
    "verify passes": [Group(start, 5, seed=start) for start in (20, 7, 61)],
    "everything": [Group(13, 9, TREE), Group(0, 20), Group(50, 1), Group(7, 9), Group(70, 1), Group(33, 20, None, 4),
                   Group(126, 9, TREE, 3), Group(0, 1)],
    "a long prompt in pieces": [Group(10, 270), Group(5, 1)],
}
