"""Forwards of drafts, chains and trees, captured: of steps with drafts, and of models that draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.engine.execute.graphs.forward import ForwardGraph, ForwardGraphs
from paceline.engine.execute.graphs.logits_buffer import LogitsBuffer
from paceline.engine.execute.graphs.sample import WIDEST
from paceline.engine.execute.graphs.seats import MOST_ROWS
from paceline.engine.rows.batch import Batch
from paceline.engine.schedule.step import RowGroup, Rows
from paceline.kernels.device.rows import RowsShape
from paceline.kernels.trees import ancestry

ROWS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
DEPTHS = (0, 8, 33)
"""Longest path of a tree, its root included; 0: chains only."""
MOST_SCRATCH = 1 << 30
"""Bytes for the pieces of keys of a captured step, which has room for the longest texts there can be: in deterministic
mode rows times context. A step that needs more is launched, with room for the texts it has."""


class VerifyGraphs:
    """Captured steps of one model over one cache. One stream at a time."""

    def __init__(self, forward: ForwardGraphs) -> None:
        self._forward = forward

    def takes(self, groups: Seq[Rows], rows: int) -> bool:
        """Whether a step of these groups, which has so many rows, can be replayed."""
        if rows > ROWS[-1]:
            return False
        depth = _depth([group.parents for group in groups])
        return (sum(len(group.tokens) - group.logits_from for group in groups) <= MOST_ROWS and depth <= DEPTHS[-1]
                and all(len(group.tokens) <= WIDEST for group in groups if group.parents is not None)
                and self._scratch(_bucket(ROWS, rows), _bucket(DEPTHS, depth)) <= MOST_SCRATCH)

    def ready(self, batch: Batch) -> ForwardGraph:
        """The forward that has room for this batch, captured if it is not there yet."""
        rows = _bucket(ROWS, batch.rows)
        shape = self._shape(rows, _bucket(DEPTHS, _depth(batch.layout.parents)))
        return self._forward.ready(shape, min(_bucket((1, *ROWS), len(batch.wanted)), rows),
                                   batch.adapters is not None)

    def launch(self, forward: ForwardGraph, batch: Batch, groups: Seq[RowGroup] = ()) -> LogitsBuffer:
        """Launch what is ready for this batch, whose moves and copies have been carried out. The logits are overwritten
        by the next one. `groups`: those of a step whose drafts are verified on the device next."""
        return self._forward.launch(forward, batch, groups)

    def _shape(self, rows: int, depth: int) -> RowsShape:
        forward = self._forward
        return forward.on_device.verify_shape(rows, forward.most_groups, depth, forward.heads, forward.dtype)

    def _scratch(self, rows: int, depth: int) -> int:
        forward = self._forward
        return forward.on_device.scratch(self._shape(rows, depth), forward.longest, forward.heads, forward.dtype)


def _bucket(sizes: Seq[int], least: int) -> int:
    return next(size for size in sizes if size >= least)


def _depth(trees: Seq[list[int] | None]) -> int:
    return max((max(map(len, ancestry(parents))) for parents in trees if parents is not None), default=0)
