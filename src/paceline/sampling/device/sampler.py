"""DeviceSampler: logits to tokens on the device, in a handful of launches that a CUDA graph can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.triton.sampling.draw import draw_kernel
from paceline.kernels.triton.sampling.edits import edit_kernel
from paceline.kernels.triton.sampling.logprobs import best_of_chunk_kernel, best_of_row_kernel, logprob_kernel
from paceline.kernels.triton.sampling.rows import LOWEST
from paceline.kernels.triton.sampling.threshold import threshold_kernel
from paceline.kernels.triton.sampling.windows import LEVELS, TALLY, count_kernel, gather_kernel, top_kernel
from paceline.sampling.device.state import MOST_ALTERNATIVES, Controls, DeviceState

_WINDOW_ROOM = 8192
"""Tokens of the window where a cut lies that are looked at one by one; with more of them the whole row is."""
_FEW = 512
"""Up to here a window is not divided further: a pass over a row costs more than looking at so many."""
_ALIKE: dict[str, Any] = {"enable_fp_fusion": False}
"""How every kernel is launched: a fused multiply-add would round once where the host rounds twice."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step, [R] each, on the device. R may be padded: seat -1 is skipped."""

    seats: Tensor
    """int32."""
    positions: Tensor
    """int64, absolute position of the token drawn at the row."""
    parents: Tensor | None = None
    """Of a step with drafts: the row above, below 0 for roots and plain rows."""
    fed: Tensor | None = None
    """The draft token that each row was fed; a root's is not looked at. Goes with `parents`."""
    masks: Tensor | None = None
    """[R, words] int32, a bit a token that may come (masks.packed_mask)."""
    masked: Tensor | None = None
    """[R] int32: whether masks[row] counts. Goes with `masks`."""


class DeviceSampler:
    """Draws for up to `rows` rows at a time from the requests seated in `state`. One stream at a time.

    Every sum and maximum over a row is one of integers, so a row's answer is bitwise the same in any company, whatever
    `block` (tokens a program looks at; a power of two) is. No call waits for the device or allocates, once `prepare`
    has run for its controls.
    """

    def __init__(self, state: DeviceState, rows: int, *, block: int | None = None,
                 window_room: int = _WINDOW_ROOM) -> None:
        self.state, self.rows = state, rows
        self._block = block
        self._room = min(window_room, state.vocab_size)
        self._drawn = self._full(rows, -1, torch.int32)
        self._best = self._full(rows, LOWEST.value, torch.int64)
        self._arrived = self._full(rows, 0, torch.int32)
        self._tops = self._full(rows, LOWEST.value, torch.int64)
        self._thresholds = self._full(rows, 0, torch.int64)
        self._best_scores = self._full(rows, 0, torch.float32)
        self._tallies: Tensor | None = None
        self._keys: Tensor | None = None
        self._edited: Tensor | None = None
        self._sums = self._full(rows * 4, 0, torch.int64)

    def prepare(self, controls: Controls) -> None:
        """Allocate what these controls need. To be called before a graph with them is captured."""
        if controls.edits or controls.masks:
            # Also for masks alone: rows of those who have ended meanwhile still say what their seats need.
            self.state.prepare()
            if self._edited is None:
                size = (self.rows, self.state.vocab_size)
                self._edited = torch.empty(size, dtype=torch.float32, device=self.state.device)
        if (controls.truncation or controls.logprobs is not None) and self._tallies is None:
            self._keys = self._full(self.rows * self._room, 0, torch.int64)
            self._tallies = self._full(self.rows * TALLY.value, 0, torch.int64)

    def sample(self, logits: Tensor, rows: Rows, controls: Controls) -> Tensor:
        """[R] int32, a view that the next call overwrites: one token a row of raw logits [R, V] (float32, bfloat16 or
        float16; read, never written); columns.EMPTY where no token is above -inf and for padding, NAN."""
        count = self._check(logits, rows, controls)
        self.prepare(controls)
        if controls.edits or controls.masks:
            self._edit(logits, rows)
        if controls.truncation or controls.logprobs is not None:
            self._truncate(logits, rows, controls)
        drawn = self._drawn[:count]
        self._draw(logits, rows, controls, drawn, drawn, 0)
        return drawn

    def several(self, logits: Tensor, rows: Rows, controls: Controls) -> tuple[Tensor, Tensor]:
        """As `sample`, then `controls.further` times what would have been drawn without those before it: tokens
        [1 + further, R], and the `logprobs` of each [1 + further, R, ...]. Tensors of their own."""
        tokens = torch.empty(1 + controls.further, logits.shape[0], dtype=torch.int32, device=self.state.device)
        tokens[0] = self.sample(logits, rows, controls)
        for number in range(1, len(tokens)):
            self._draw(logits, rows, controls, tokens[number], tokens, number)
        return tokens, torch.stack([self.logprobs(logits, rows, own, controls) for own in tokens])

    def logprobs(self, logits: Tensor, rows: Rows, drawn: Tensor, controls: Controls) -> Tensor:
        """Scores of the tokens just drawn from the same logits with the same controls (logprobs set): a tensor of its
        own, [R, 3 + 2 n] int32, that logprobs.unpacked reads row by row. Those of padding are not written."""
        count = self._check(logits, rows, controls)
        asked = controls.logprobs or 0
        if asked > MOST_ALTERNATIVES:
            raise ValueError(f"at most {MOST_ALTERNATIVES} alternatives are scored on the device, not {asked}")
        number = min(max(asked, 1), self.state.vocab_size)  # the best one is needed in any case
        device, width = self.state.device, self.state.vocab_size
        block, warps = self._shape(count)
        chunks = self._chunks(block)
        candidates = torch.empty(count, chunks * number, dtype=torch.int64, device=device)
        chosen = torch.empty(count, number, dtype=torch.int64, device=device)
        scores = torch.empty(count, 3 + 2 * number, dtype=torch.int32, device=device)
        best_of_chunk_kernel[(count, chunks)](logits, logits.stride(0), rows.seats, candidates, number, width,
                                              BLOCK=block, num_warps=warps, **_ALIKE)
        best_of_row_kernel[(count,)](rows.seats, candidates, number, chunks * number, chosen,
                                     BLOCK=_power(chunks * number), num_warps=warps, **_ALIKE)
        logprob_kernel[(count, chunks)](
            *self._source(logits), self._masked(rows), rows.seats, self.state.table, self._thresholds,
            self._best_scores, drawn, chosen, number, self._sums, self._arrived, scores, width,
            EDITS=controls.edits or controls.masks, ROW_MASKS=controls.masks, NUMBER=_power(number), BLOCK=block,
            num_warps=warps, **_ALIKE)
        return scores

    def _draw(self, logits: Tensor, rows: Rows, controls: Controls, out: Tensor, barred: Tensor, number: int) -> None:
        """`number`: how many of the tokens `barred` [.., R] are not to be drawn."""
        count = logits.shape[0]
        block, warps = self._shape(count)
        draw_kernel[(count, self._chunks(block))](
            *self._source(logits), self._masked(rows), rows.seats, rows.positions, self.state.table, self._tops,
            self._thresholds, self._best, self._arrived, out, barred, number, self.state.vocab_size,
            EDITS=controls.edits or controls.masks, ROW_MASKS=controls.masks, TRUNCATION=controls.truncation,
            BLOCK=block, num_warps=warps, **_ALIKE)

    def _edit(self, logits: Tensor, rows: Rows) -> None:
        state, count = self.state, logits.shape[0]
        block, warps = self._shape(count)
        unused = state.table  # stands where nothing is read
        edit_kernel[(count, self._chunks(block))](
            *self._source(logits), rows.seats, rows.positions, state.table, state.counts,
            unused if rows.parents is None else rows.parents, unused if rows.fed is None else rows.fed, state.ids,
            state.values, state.list_room, state.masks, unused if rows.masks is None else rows.masks,
            self._masked(rows), state.vocab_size, DRAFTS=rows.parents is not None, ROW_MASKS=rows.masks is not None,
            BLOCK=block, num_warps=warps, **_ALIKE)

    def _truncate(self, logits: Tensor, rows: Rows, controls: Controls) -> None:
        """Thresholds of truncated rows; with log-probabilities the best score of every row."""
        table, width, count = self.state.table, self.state.vocab_size, logits.shape[0]
        block, warps = self._shape(count)
        chunk, few = block * 2, min(_FEW, self._room)
        source = (*self._source(logits), self._masked(rows), rows.seats, table, self._tops, self._tallies)
        flags = {"EDITS": controls.edits or controls.masks, "ROW_MASKS": controls.masks, **_ALIKE}
        top_kernel[(count, self._chunks(block))](*source, width, EVERY=controls.logprobs is not None, BLOCK=block,
                                                 num_warps=warps, **flags)
        if controls.truncation:
            for level in range(LEVELS.value):
                count_kernel[(count, self._chunks(chunk))](*source, few, width, LEVEL=level, CHUNK=chunk,
                                                           BLOCK=min(block, 256), num_warps=4, **flags)
            gather_kernel[(count, self._chunks(block))](*source, self._keys, few, self._room, width, BLOCK=block,
                                                        num_warps=warps, **flags)
        threshold_kernel[(count,)](*source, self._keys, few, self._room, self._thresholds, self._best_scores, width,
                                   BLOCK=min(self._block or 512, 512), num_warps=8, **flags)

    def _source(self, logits: Tensor) -> tuple[Tensor, int, Tensor]:
        """Where rows are read: the logits, and the edited copy of those that have one."""
        return logits, logits.stride(0), logits if self._edited is None else self._edited

    def _masked(self, rows: Rows) -> Tensor:
        return self.state.table if rows.masked is None else rows.masked

    def _chunks(self, block: int) -> int:
        return -(-self.state.vocab_size // block)

    def _shape(self, rows: int) -> tuple[int, int]:
        """Tokens and warps of a program: few rows are split finely to keep the whole device busy."""
        if self._block is not None:
            return self._block, 4
        return (1024, 4) if rows <= 16 else (2048, 8)

    def _check(self, logits: Tensor, rows: Rows, controls: Controls) -> int:
        count, width = logits.shape
        if count > self.rows or width != self.state.vocab_size or logits.stride(1) != 1:
            raise ValueError(f"expected logits [up to {self.rows}, {self.state.vocab_size}], rows contiguous, "
                             f"got {list(logits.shape)}")
        for name in ("seats", "positions", "parents", "fed", "masked"):
            tensor = getattr(rows, name)
            if tensor is not None and tensor.shape != (count,):
                raise ValueError(f"{name} must be [{count}], got {list(tensor.shape)}")
        if not (rows.masks is None) == (rows.masked is None) == (not controls.masks):
            raise ValueError("masks, masked and controls that say so go together")
        if (rows.parents is None) != (rows.fed is None):
            raise ValueError("parents and fed go together")
        return count

    def _full(self, size: int, value: int, dtype: torch.dtype) -> Tensor:
        return torch.full((size,), value, dtype=dtype, device=self.state.device)


def _power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
