"""Steps with drafts, chains and trees, captured: forward, draws, verification and the move of accepted paths are one
replay, and what comes back is a few integers. The same forwards without the draws serve models that draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.cache.compaction import PathCompaction
from paceline.cache.storage import KVStorage
from paceline.engine.captured import Captured, CapturedForward
from paceline.engine.cuda_graphs import Graphs
from paceline.engine.launched import Drawn
from paceline.engine.runner import Batch
from paceline.engine.seats import MOST_ROWS, DeviceSeats, drawing, send
from paceline.engine.step import RowGroup
from paceline.engine.who_draws import decided_on_device
from paceline.kernels.paths import ancestry
from paceline.kernels.triton import attention
from paceline.kernels.triton.backend import TritonKernels
from paceline.kernels.triton.rows import CHUNK_FROM, TREE_ROWS, DeviceRows, RowsShape
from paceline.models.interface import CausalLM
from paceline.sampling.device.sampler import Rows
from paceline.sampling.device.state import Controls
from paceline.sampling.masks import Mask
from paceline.speculation.device import DeviceVerifier, PackedDrafts
from paceline.speculation.verify import Verdict

ROWS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
DEPTHS = (0, 8, 33)
"""Longest path of a tree, its root included; 0: chains only."""
MOST_SCRATCH = 1 << 30
"""Bytes for the pieces of keys of a captured step, which has room for the longest texts there can be: in deterministic
mode rows times context. A step that needs more is launched, with room for the texts it has."""
WIDEST = 128
"""Rows of a draft, its root included."""


@dataclass(slots=True)
class _Inputs:
    """What a captured step reads besides its DeviceRows, in one flat int64 tensor that is filled before each replay."""

    data: torch.Tensor
    rows: int
    draws: int
    views: int

    @staticmethod
    def size(rows: int, draws: int, views: int) -> int:
        return (2 + views) * rows + 5 * draws + 1

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[2 + views, rows]: tokens, positions for the rotary tables, slots of each cache group (-1: padding).
        [4, draws]: rows that need logits, the seat that draws there (-1: none), the position of what it draws, the
        draw above it in its draft (-1: none). [draws + 1]: the first draw of each group."""
        rows, draws = (2 + self.views) * self.rows, 4 * self.draws
        return (self.data[:rows].view(2 + self.views, self.rows), self.data[rows:rows + draws].view(4, self.draws),
                self.data[rows + draws:])


@dataclass(frozen=True, slots=True)
class Verified:
    """What a group's draft came to on the device. chosen: what the target draws after each of its rows."""

    verdict: Verdict
    chosen: list[int]
    scores: Seq[NDArray[np.int32]] | None = None
    """Of the verdict's tokens, as Drawn has them."""


class DraftGraphs:
    """Captured steps of one model over one cache. One stream at a time."""

    def __init__(self, model: CausalLM, kernels: TritonKernels, storage: KVStorage, tables: Seq[np.ndarray],
                 graphs: Graphs, seats: DeviceSeats | None = None) -> None:
        """`tables`: the cache's block tables by seat. Without `seats` nothing is drawn here."""
        self._forward = CapturedForward(model, kernels, storage, tables, graphs.device)
        self._graphs = graphs
        self._seats = seats
        self._captured: dict[tuple[int, int, int, Controls | None], Captured[_Inputs]] = {}
        self._verifier: DeviceVerifier | None = None
        self._compactions: list[PathCompaction] = []

    def takes(self, groups: Seq[RowGroup], rows: int) -> bool:
        """Whether a step of these groups, which has so many rows, can be replayed."""
        if self._seats is not None and all(group.draft is None for group in groups):
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
        return self._seats is not None and all(
            decided_on_device(group) and (group.draft is None or len(group.tokens) <= WIDEST) for group in groups)

    @staticmethod
    def plain(drawn: Drawn) -> Verified | None:
        """What a group without a draft drew, in the same form."""
        return Verified(Verdict(drawn.tokens, [0], []), drawn.tokens, drawn.scores) if drawn.tokens else None

    @torch.inference_mode()
    def run(self, batch: Batch, wanted: Seq[int]) -> torch.Tensor:
        """Logits [len(wanted), V] float32 of these rows, overwritten by the next call."""
        captured = self._fill(batch, wanted, None)
        captured.replay()
        return captured.out[0][:len(wanted)]

    @torch.inference_mode()
    def verify(self, batch: Batch, wanted: Seq[int], masks: Seq[Mask | None]) -> list[Verified | None]:
        """Per group what it draws, its accepted path moved into place; None: it draws nothing. `masks`: what the host
        bars at each row that is drawn from. Waits for the device."""
        assert self._seats is not None
        groups = batch.step.groups
        controls = self._seats.take(drawing(groups), masks)
        captured = self._fill(batch, wanted, controls)
        captured.replay()
        drawn, packed, *scores = (part.cpu().numpy() for part in captured.out)
        count = captured.inputs.draws
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

    def _fill(self, batch: Batch, wanted: Seq[int], controls: Controls | None) -> Captured[_Inputs]:
        """The captured step that takes this one, its inputs on their way."""
        layout, groups = batch.layout, batch.step.groups
        count, views = layout.rows, len(layout.views)
        rows = _bucket(ROWS, count)
        draws = min(_bucket((1, *ROWS), len(wanted)), rows)
        depth = _bucket(DEPTHS, _depth(groups))
        captured = self._captured.get((rows, draws, depth, controls))
        if captured is None:
            captured = self._captured[rows, draws, depth, controls] = self._capture(rows, draws, depth, controls)
        inputs = _Inputs(torch.zeros(_Inputs.size(rows, draws, views), dtype=torch.int64), rows, draws, views)
        by_row, by_draw, offsets = (part.numpy() for part in inputs.parts())
        by_row[0, :count] = batch.tokens
        by_row[1, :count] = layout.positions.numpy()
        by_row[2:, count:] = -1
        for slots, view in zip(by_row[2:], layout.views):
            slots[:count] = view.slots.numpy()
        by_draw[0, :len(wanted)] = wanted
        by_draw[1] = by_draw[3] = -1
        if controls is not None:
            by_draw[1, :len(wanted)] = batch.row_seats[list(wanted)]
            by_draw[2, :len(wanted)] = by_row[1, list(wanted)] + 1
            _place_drafts(groups, by_draw[3], offsets)
        send(inputs.data.numpy(), captured.inputs.data)
        self._forward.fill(captured.rows, layout)
        return captured

    def _capture(self, rows: int, draws: int, depth: int, controls: Controls | None) -> Captured[_Inputs]:
        place, views = self._forward.room(self._shape(rows, depth)), self._forward.views
        data = torch.zeros(_Inputs.size(rows, draws, views), dtype=torch.int64, device=self._graphs.device)
        inputs = _Inputs(data, rows, draws, views)
        by_row, by_draw, _ = inputs.parts()
        by_row[2:].fill_(-1)
        by_draw[1].fill_(-1)
        by_draw[3].fill_(-1)
        if controls is not None:
            self._prepare(controls)
        out: list[torch.Tensor] = []

        def launch() -> None:
            out[:] = self._step(inputs, place, controls)

        return Captured(place, inputs, out, self._graphs.capture(launch))

    def _shape(self, rows: int, depth: int) -> RowsShape:
        forward, heads = self._forward, self._forward.heads
        tile_rows, chunk_rows = attention.tile_rows(forward.kernels.tuning(forward.dtype, heads.dim),
                                                    heads.query // heads.keys, rows)
        tile_rows = min(tile_rows, rows)
        lowest = min(tile_rows, TREE_ROWS) if depth else tile_rows
        # Every group may end with a tile or a chunk that is not full; a chunk's group has at least CHUNK_FROM rows.
        return RowsShape(rows, min(rows, min(rows, forward.most_groups) + rows // lowest), tile_rows, depth,
                         chunks=rows // CHUNK_FROM + rows // chunk_rows if rows >= CHUNK_FROM else 0,
                         chunk_rows=chunk_rows)

    def _scratch(self, rows: int, depth: int) -> int:
        forward = self._forward
        return forward.kernels.scratch(self._shape(rows, depth), forward.longest, forward.heads, forward.dtype)

    def _prepare(self, controls: Controls) -> None:
        """Everything that must lie where it lies before a step is captured."""
        assert self._seats is not None
        if self._verifier is None:
            self._verifier = DeviceVerifier(MOST_ROWS, WIDEST - 1, self._graphs.device)
            storage = self._forward.storage
            self._compactions = [PathCompaction(planes) for planes in storage.planes]
        self._seats.prepare(controls)

    def _step(self, inputs: _Inputs, place: DeviceRows, controls: Controls | None) -> list[torch.Tensor]:
        forward = self._forward
        (tokens, positions, *slots), (wanted, seats, draws, parents), offsets = inputs.parts()
        hidden = forward.hidden(tokens, positions, slots, place)
        logits = forward.model.logits(hidden.index_select(0, wanted), forward.kernels)
        if controls is None:
            return [logits]
        assert self._seats is not None and self._verifier is not None
        owners, starts = seats.to(torch.int32), offsets.to(torch.int32)
        above, fed = parents.to(torch.int32), tokens.index_select(0, wanted)
        drawn, scores = self._seats.draw(logits, Rows(owners, draws, above, fed), controls)
        drafts = PackedDrafts(starts, above, fed, owners, min(inputs.draws, WIDEST))
        verdicts = self._verifier.verify(drafts, drawn, self._seats.state, count=controls.edits)
        if place.shape.depth:
            for compaction, own in zip(self._compactions, slots):
                compaction.move(starts, verdicts.accepted, verdicts.rows, own.index_select(0, wanted))
        return [drawn, verdicts.packed] if scores is None else [drawn, verdicts.packed, scores]


def _place_drafts(groups: Seq[RowGroup], parents: np.ndarray, offsets: np.ndarray) -> None:
    """Where each group's draws begin, and which draw each hangs below."""
    place = first = 0
    for group in groups:
        size = len(group.tokens) - group.logits_from
        if not size:
            continue
        if size > 1:
            above = group.parents if group.parents is not None else range(-1, size - 1)
            parents[first:first + size] = [parent if parent < 0 else first + parent for parent in above]
        place += 1
        first += size
        offsets[place] = first
    offsets[place + 1:] = first


def _bucket(sizes: Seq[int], least: int) -> int:
    return next(size for size in sizes if size >= least)


def _depth(groups: Seq[RowGroup]) -> int:
    return max((max(map(len, ancestry(group.parents))) for group in groups if group.parents is not None), default=0)
