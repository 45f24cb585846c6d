"""Times of single kernels on a card, as a model would see them: inside a graph, with operands that are not cached; and
the layout of a step to time them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.triton import load

COLD_BYTES = 256 << 20
"""Operands are rotated over this much memory, several times what the card caches."""


def copies(size: int, most: int = 64) -> int:
    """How many copies of an operand of so many bytes keep it out of the cache."""
    return max(1, min(most, COLD_BYTES // max(1, size)))


def microseconds(calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Device time of one call: all calls in one graph, the median of some replays."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        calls[-1]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    count = 0
    with torch.cuda.graph(graph):
        while count < 8:
            for call in calls:
                call()
            count += len(calls)
    times: list[float] = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph.replay()
    for _ in range(replays):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1000 / count)
    del graph
    return sorted(times)[len(times) // 2]


def decode_step(device: torch.device, batch: int, context: int, count: int,
                parents: list[int] | None = None) -> Layout:
    """`batch` groups of `count` rows after `context` tokens, blocks side by side."""
    blocks = -(-(context + count) // 16)
    tables = 1 + torch.arange(batch * blocks, device=device, dtype=torch.int32).view(batch, blocks)
    physical = context + torch.arange(count, device=device)
    slots = (tables[:, physical // 16] * 16 + physical % 16).flatten()
    return Layout(physical.repeat(batch), [count * i for i in range(batch + 1)], [context] * batch, [parents] * batch,
                  16, [GroupView(tables, slots)])


def bandwidth(size: int = 1 << 31) -> float:
    """Bytes a second that the card reads, at so many: a step reads far more than it writes, which is slower."""
    seconds = _reading(size) / 1e6
    torch.cuda.empty_cache()  # the engine to come shares out what is free
    return size / seconds


def _reading(size: int) -> float:
    """Microseconds for a product of one row with a matrix of so many bytes."""
    row = torch.ones(1, 8192, dtype=torch.bfloat16, device="cuda")
    matrix = torch.zeros(size // (2 * row.shape[1]), row.shape[1], dtype=torch.bfloat16, device="cuda")
    kernels = load(False, row.device)
    return microseconds([lambda: kernels.linear(row, matrix)])
