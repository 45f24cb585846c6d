"""Types of GGUF blocks on the native path: time to pack a matrix and to multiply with it, rounded to int8 rows as by
default and with its blocks kept. One thread; random blocks.

`python tools/packing_speed.py`
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.errors import PacelineError
from paceline.kernels.cpu.backend import NativeKernels
from paceline.models.load.codes import LAYOUTS
from paceline.models.packing import BLOCKS, PackingWeights

NAME = "model.layers.0.matrix"


class OneMatrix:
    """WeightSource of a single matrix of blocks."""

    def __init__(self, kind: str, blocks: npt.NDArray[np.uint8]) -> None:
        self._kind = kind
        self._blocks = blocks

    @staticmethod
    def random(kind: str, rows: int, cols: int) -> OneMatrix:
        layout = LAYOUTS[kind]
        # Bytes below 60: whichever of them make up a half-precision scale, it is positive and below 1.
        made = np.random.default_rng(0).integers(0, 60, (rows, cols // layout.elements * layout.size), dtype=np.uint8)
        return OneMatrix(kind, made)

    def has(self, name: str) -> bool:
        return name == NAME

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        raise PacelineError(f"{self._kind} is not packed from its blocks.")

    def blocks(self, name: str, shape: tuple[int, int]) -> tuple[str, npt.NDArray[np.uint8]]:
        return self._kind, self._blocks


def best(repeats: int, call: Callable[[], object]) -> float:
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return min(found)


def measure(kinds: list[str], rows: int, cols: int, repeats: int) -> list[Row]:
    found: list[Row] = []
    kernels = NativeKernels(1)
    inputs = {count: torch.randn(count, cols, generator=torch.Generator().manual_seed(0)) for count in (1, 4, 64)}
    for kind in kinds:
        source = OneMatrix.random(kind, rows, cols)
        for keep in (False, True):
            pack = partial(PackingWeights(source, keep).matrix, [(NAME, rows)], cols)
            what = f"{kind}, {'blocks' if keep else 'int8'}"
            found.append(Row(f"{what}: pack", "ms", best(3, pack) * 1e3, higher_is_better=False))
            weight = pack()
            for count, x in inputs.items():
                multiply = partial(kernels.linear, x, weight)
                multiply()
                found.append(Row(f"{what}: {count} rows", "us", best(repeats, multiply) * 1e6, higher_is_better=False))
        say(f"packing: {kind}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/packing_speed.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(sorted(BLOCKS)), help="separated by commas")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=1536)
    parser.add_argument("--repeats", type=int, default=60)
    json_argument(parser)
    given = parser.parse_args()
    kinds = given.types.split(",")
    unknown = [kind for kind in kinds if kind not in BLOCKS]
    if unknown:
        raise SystemExit(f"error: no block type {unknown[0]!r}: use some of {', '.join(sorted(BLOCKS))}.")
    emit(document(measure(kinds, given.rows, given.cols, given.repeats),
                  matrix=[given.rows, given.cols]), given.json)


if __name__ == "__main__":
    main()
