"""Steps with drafts, chains and trees, captured: a forward, then draws, verification and the move of accepted paths;
what comes back is a few integers. The same forwards without the draws serve models that draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.execute.graphs.forward import ForwardGraphs
from paceline.engine.execute.graphs.in_flight import Sampled
from paceline.engine.execute.graphs.logits_buffer import Follows, LogitsBuffer
from paceline.engine.execute.graphs.sample import WIDEST, SampleGraphs
from paceline.engine.execute.graphs.seats import MOST_ROWS, drawing
from paceline.engine.execute.runner import Batch
from paceline.engine.rows.placement import decided_on_device
from paceline.engine.schedule.step import RowGroup
from paceline.kernels.device.rows import RowsShape
from paceline.kernels.trees import ancestry
from paceline.sampling.masks import Mask
from paceline.speculation.verify import Verdict

ROWS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
DEPTHS = (0, 8, 33)
"""Longest path of a tree, its root included; 0: chains only."""
MOST_SCRATCH = 1 << 30
"""Bytes for the pieces of keys of a captured step, which has room for the longest texts there can be: in deterministic
mode rows times context. A step that needs more is launched, with room for the texts it has."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What a group's draft came to on the device. chosen: what the target draws after each of its rows."""

    verdict: Verdict
    chosen: list[int]
    scores: Seq[NDArray[np.int32]] | None = None
    """Of the verdict's tokens, as Sampled has them."""


class VerifyGraphs:
    """Captured steps of one model over one cache. One stream at a time."""

    def __init__(self, forward: ForwardGraphs, draws: SampleGraphs | None = None) -> None:
        """Without `draws` nothing is drawn here."""
        self._forward = forward
        self._draws = draws

    def takes(self, groups: Seq[RowGroup], rows: int) -> bool:
        """Whether a step of these groups, which has so many rows, can be replayed."""
        if self._draws is not None and all(group.draft is None for group in groups):
            return False
        draws = sum(len(group.tokens) - group.logits_from for group in groups)
        if rows > ROWS[-1]:
            return False
        depth = _depth(groups)
        return (draws <= MOST_ROWS and depth <= DEPTHS[-1]
                and all(len(group.tokens) <= WIDEST for group in groups if group.parents is not None)
                and self._scratch(_bucket(ROWS, rows), _bucket(DEPTHS, depth)) <= MOST_SCRATCH)

    def verifies(self, groups: Seq[RowGroup]) -> bool:
        """Whether everything such a step decides can be decided on the device: nobody's draw needs the host."""
        return self._draws is not None and all(
            decided_on_device(group) and (group.draft is None or len(group.tokens) <= WIDEST) for group in groups)

    @staticmethod
    def plain(drawn: Sampled) -> Verified | None:
        """What a group without a draft drew, in the same form."""
        return Verified(Verdict(drawn.tokens, [0], []), drawn.tokens, drawn.scores) if drawn.tokens else None

    @torch.inference_mode()
    def run(self, batch: Batch, wanted: Seq[int], decided: bool) -> LogitsBuffer:
        """Launch a step's forward. Its logits are overwritten by the next one. `decided`: `verify` comes behind it."""
        rows = _bucket(ROWS, batch.layout.rows)
        shape = self._shape(rows, _bucket(DEPTHS, _depth(batch.step.groups)))
        captured = self._forward.ready(shape, min(_bucket((1, *ROWS), len(wanted)), rows))
        return self._forward.run(captured, batch, wanted, drafts=decided)

    @torch.inference_mode()
    def verify(self, batch: Batch, logits_buffer: LogitsBuffer, masks: Seq[Mask | None]) -> list[Verified | None]:
        """Behind `run`, per group what it draws, its accepted path moved into place; None: it draws nothing. `masks`:
        what the host bars at each row that is drawn from. Waits for the device."""
        assert self._draws is not None
        groups = batch.step.groups
        trees = any(group.parents is not None for group in groups)
        draw = self._draws.ready(logits_buffer, self._draws.seats.take(drawing(groups), masks),
                                 Follows.TREES if trees else Follows.CHAINS)
        draw.replay()
        drawn, packed, *scores = (part.cpu().numpy() for part in draw.out)
        count = logits_buffer.rows
        accepted, bonus = packed[:2 * count].reshape(2, count)
        texts, rows = packed[2 * count:].reshape(2, count, -1)
        found: list[Verified | None] = []
        place = first = 0
        for group in groups:
            size = len(group.tokens) - group.logits_from
            if not size:
                found.append(None)
                continue
            length = int(accepted[place]) + 1
            path = (rows[place, :length] - first).tolist()
            found.append(Verified(Verdict(texts[place, :length].tolist(), path, path[1:], bool(bonus[place])),
                                  drawn[first:first + size].tolist(),
                                  list(scores[0][rows[place, :length]]) if scores else None))
            place += 1
            first += size
        return found

    def _shape(self, rows: int, depth: int) -> RowsShape:
        forward = self._forward
        return forward.on_device.verify_shape(rows, forward.most_groups, depth, forward.heads, forward.dtype)

    def _scratch(self, rows: int, depth: int) -> int:
        forward = self._forward
        return forward.on_device.scratch(self._shape(rows, depth), forward.longest, forward.heads, forward.dtype)


def _bucket(sizes: Seq[int], least: int) -> int:
    return next(size for size in sizes if size >= least)


def _depth(groups: Seq[RowGroup]) -> int:
    return max((max(map(len, ancestry(group.parents))) for group in groups if group.parents is not None), default=0)
