"""Doctor's self-check: on THIS machine, are the deterministic kernels' bits independent of batch and threads?"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.kernels import select
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout

_WIDTHS = (1, 2, 3, 5, 8, 17, 32)
"""Batch sizes a row is computed in: around the tile sizes at which matrix libraries change their kernel."""
_HIDDEN, _FEED, _HEADS, _KV_HEADS, _HEAD = 576, 1536, 9, 3, 64
_BLOCK, _CONTEXT, _SEQUENCES = 16, 117, 8


def check_batch_invariance() -> dict[str, Any]:
    """{"passed", "detail", "differences": names of ops whose bits changed, "comparisons", "seconds"}."""
    began = time.perf_counter()
    kernels = select(True, torch.device("cpu"))
    threads = torch.get_num_threads()
    differences: set[str] = set()
    comparisons = 0
    try:
        with torch.inference_mode():
            torch.set_num_threads(1)
            baseline = {name: op(1) for name, op in _ops(kernels).items()}
            for count in sorted({1, 2, threads}):
                torch.set_num_threads(count)
                for name, op in _ops(kernels).items():
                    for width in _WIDTHS:
                        comparisons += 1
                        if not torch.equal(op(width), baseline[name]):
                            differences.add(name)
    finally:
        torch.set_num_threads(threads)
    passed = not differences
    result = "bitwise the same" if passed else "different bits in " + ", ".join(sorted(differences))
    return {
        "passed": passed,
        "detail": f"deterministic kernels, 1 to {_WIDTHS[-1]} rows and 1 to {max(2, threads)} threads: {result}",
        "differences": sorted(differences),
        "comparisons": comparisons,
        "seconds": round(time.perf_counter() - began, 3),
    }


def _ops(kernels: Kernels) -> dict[str, Callable[[int], torch.Tensor]]:
    """Each op as a function of the batch size that returns row 0's result."""
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise)

    rows = max(_WIDTHS)
    x, wide = random(rows, _HIDDEN), random(rows, 2 * _FEED)
    weight, scale = random(_FEED, _HIDDEN) / 24, random(_HIDDEN)
    heads, angle = random(rows, _HEADS, _HEAD), random(rows, 1, _HEAD)
    return {
        "linear": lambda n: kernels.linear(x[:n], weight)[0],
        "rms_norm": lambda n: kernels.rms_norm(x[:n], scale, 1e-5)[0],
        "silu_mul": lambda n: kernels.silu_mul(wide[:n])[0],
        "rotate": lambda n: kernels.rotate(heads[:n], angle[:n].cos(), angle[:n].sin())[0],
        "attend": _decode_attention(kernels, random),
    }


def _decode_attention(kernels: Kernels, random: Callable[..., torch.Tensor]) -> Callable[[int], torch.Tensor]:
    """Sequence 0's newest position: alone (1), beside strangers (2.. as far as there are any), and as the last row of
    a chunk of its own `width` newest positions."""
    per_sequence = -(-_CONTEXT // _BLOCK)
    slots = (1 + _SEQUENCES * per_sequence) * _BLOCK
    keys, values = random(slots, _KV_HEADS, _HEAD), random(slots, _KV_HEADS, _HEAD)
    queries = random(_SEQUENCES, _HEADS, _HEAD)
    chunk = random(_CONTEXT, _HEADS, _HEAD)
    chunk[-1] = queries[0]
    tables = 1 + torch.arange(_SEQUENCES * per_sequence).view(_SEQUENCES, per_sequence)
    positions = torch.arange(_CONTEXT)
    slot_of = tables[:, positions // _BLOCK] * _BLOCK + positions % _BLOCK

    def attend(q: torch.Tensor, sequences: int, start: int) -> torch.Tensor:
        count = q.shape[0] // sequences
        view = GroupView(tables[:sequences], slot_of[:sequences, start:].reshape(-1))
        layout = Layout(positions[start:].repeat(sequences), [count * i for i in range(sequences + 1)],
                        [start] * sequences, [None] * sequences, _BLOCK, [view])
        return kernels.attend(q, keys, values, layout, view, _HEAD**-0.5)

    def row(width: int) -> torch.Tensor:
        if width <= _SEQUENCES:
            return attend(queries[:width], width, _CONTEXT - 1)[0]
        return attend(chunk[-width:], 1, _CONTEXT - width)[-1]

    return row
