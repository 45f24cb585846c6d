# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Seating requests: what the host knows of them, sent in one piece, goes to its places on the device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def seat_kernel(packed, table, lengths, COLUMNS: tl.constexpr):
    """A program per request. packed [n, 2 + COLUMNS] int64: seat, length of its text, the seat's row of the table."""
    own = packed + tl.program_id(0) * (2 + COLUMNS)
    seat = tl.load(own)
    tl.store(lengths + seat, tl.load(own + 1).to(tl.int32))
    column = tl.arange(0, COLUMNS)
    tl.store(table + seat * COLUMNS + column, tl.load(own + 2 + column))
