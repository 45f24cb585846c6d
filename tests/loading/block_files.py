"""Random blocks of every GGUF type: any codes and any packed scales, with fp16 numbers of a sensible size."""

from __future__ import annotations

import numpy as np

from paceline.models.load.codes import LAYOUTS

_HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}
"""Where a block's fp16 numbers begin; at 0 in the other types."""
_CODES = {"Q8_0": 74.0, "IQ4_NL": 70.0, "Q5_0": 9.0, "Q5_1": 9.0, "Q2_K": 25.0, "Q3_K": 80.0, "Q4_K": 200.0,
          "Q5_K": 400.0, "Q6_K": 1300.0, "IQ4_XS": 1300.0}
"""About how large weights of random blocks are with an fp16 number of 1."""


def random_blocks(rng: np.random.Generator, kind: str, rows: int, cols: int, size: float = 0.1) -> np.ndarray:
    """uint8 [rows, bytes of `cols` weights], the weights about `size` large."""
    layout = LAYOUTS[kind]
    blocks = rng.integers(0, 256, size=(rows * cols // layout.elements, layout.size), dtype=np.uint8)
    for at in _HALVES.get(kind, (0,)):
        number = (rng.random(len(blocks)) + 0.5) * size / _CODES.get(kind, 5.0)
        if at == 2 and kind.endswith("1"):
            number = rng.standard_normal(len(blocks)) * size  # an offset of its own
        blocks[:, at:at + 2] = number.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)
