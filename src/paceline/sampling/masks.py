"""Which tokens may come, a bit each, as a device reads it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.processors import SampleRow

Mask = NDArray[np.int32]
"""[ceil(V / 32)] words, bit i of word w for token 32 w + i."""


def packed_mask(allowed: NDArray[np.bool_]) -> Mask:
    """From [V] booleans."""
    bits = np.packbits(allowed, bitorder="little")
    words = np.zeros(-(-len(allowed) // 32) * 4, dtype=np.uint8)
    words[:len(bits)] = bits
    return words.view("<i4").astype(np.int32)


def row_mask(row: SampleRow) -> Mask | None:
    """What only the host knows about a row (bad words, repeated n-grams, grammar); None: it masks nothing."""
    banned = row.state.banned(row.path)
    if row.mask is None and not banned:
        return None
    width = row.state.vocab_size
    allowed = np.ones(width, dtype=np.bool_) if row.mask is None else np.array(row.mask, dtype=np.bool_)
    allowed[[token for token in banned if token < width]] = False
    return packed_mask(allowed)
