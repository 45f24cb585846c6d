# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels that start while the one before them still runs: a launch then costs little more than what it waits for.

Such a kernel (launch.overlapped) begins with `start`, before which it may touch nothing that another kernel writes.
Weights are not written: they can be fetched meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE = tl.constexpr(64)
"""16-bit values of a cache line."""


@triton.jit
def start(OVERLAP: tl.constexpr):
    """Let the next kernel start, then wait until all before this one have ended."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch(weight, row, live, first, K, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    """Bring COLUMNS (a power of two, or none) from column `first` on of the weight's rows `row`, K 16-bit values each,
    into the device's cache."""
    if OVERLAP and COLUMNS > 0:
        column = first + tl.arange(0, COLUMNS // LINE) * LINE
        at = weight + tl.where(live, row, 0).to(tl.int64)[:, None] * K + tl.where(column < K, column, first)[None, :]
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32,
                                  is_pure=False, pack=1)
