"""TritonSampler: logits to tokens on the device, in a handful of launches that a CUDA graph can hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.kernels.device.operands import MOST_ALTERNATIVES, Controls, SampledRows
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.triton.sampling.edits import edit_kernel
from paceline.kernels.triton.sampling.logprobs import best_of_chunk_kernel, best_of_row_kernel, logprob_kernel
from paceline.kernels.triton.sampling.rows import LOWEST
from paceline.kernels.triton.sampling.sample import sample_kernel
from paceline.kernels.triton.sampling.threshold import threshold_kernel
from paceline.kernels.triton.sampling.windows import LEVELS, TALLY, count_kernel, gather_kernel, top_kernel

_WINDOW_ROOM = 8192
"""Tokens of the window where a cut lies that are looked at one by one; with more of them the whole row is."""
_FEW = 512
"""Up to here a window is not divided further: a pass over a row costs more than looking at so many."""
_ALIKE: dict[str, Any] = {"enable_fp_fusion": False}
"""How every kernel is launched: a fused multiply-add would round once where the host rounds twice."""


class TritonSampler:
    """Implements device.interface.Sampler for up to `rows` rows at a time, from the requests seated in `tables`.

    Every sum and maximum over a row is one of integers, so a row's answer is bitwise the same in any company, whatever
    `block` (tokens a program looks at; a power of two) is. No call waits for the device or allocates, once `prepare`
    has run for its controls. Every kernel leaves what it adds up in as it found it, and the rest is written before it
    is read: a call that breaks between two launches costs no other anything.
    """

    def __init__(self, tables: SeatTables, rows: int, *, block: int | None = None,
                 window_room: int = _WINDOW_ROOM) -> None:
        self.tables, self.rows = tables, rows
        self._block = block
        self._room = min(window_room, tables.vocab_size)
        self._sampled = self._full(rows, -1, torch.int32)
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
        if controls.edits or controls.masks:
            # Also for masks alone: rows of those who have ended meanwhile still say what their seats need.
            self.tables.prepare()
            if self._edited is None:
                size = (self.rows, self.tables.vocab_size)
                self._edited = torch.empty(size, dtype=torch.float32, device=self.tables.device)
        if (controls.truncation or controls.logprobs is not None) and self._tallies is None:
            self._keys = self._full(self.rows * self._room, 0, torch.int64)
            self._tallies = self._full(self.rows * TALLY.value, 0, torch.int64)

    def sample(self, logits: Tensor, rows: SampledRows, controls: Controls) -> Tensor:
        count = self._check(logits, rows, controls)
        self.prepare(controls)
        if controls.edits or controls.masks:
            self._edit(logits, rows)
        if controls.truncation or controls.logprobs is not None:
            self._truncate(logits, rows, controls)
        sampled = self._sampled[:count]
        self._sample(logits, rows, controls, sampled, sampled, 0)
        return sampled

    def several(self, logits: Tensor, rows: SampledRows, controls: Controls) -> tuple[Tensor, Tensor]:
        tokens = torch.empty(1 + controls.further, logits.shape[0], dtype=torch.int32, device=self.tables.device)
        tokens[0] = self.sample(logits, rows, controls)
        for number in range(1, len(tokens)):
            self._sample(logits, rows, controls, tokens[number], tokens, number)
        return tokens, torch.stack([self.logprobs(logits, rows, own, controls) for own in tokens])

    def logprobs(self, logits: Tensor, rows: SampledRows, sampled: Tensor, controls: Controls) -> Tensor:
        count = self._check(logits, rows, controls)
        asked = controls.logprobs or 0
        if asked > MOST_ALTERNATIVES:
            raise ValueError(f"at most {MOST_ALTERNATIVES} alternatives are scored on the device, not {asked}")
        number = min(max(asked, 1), self.tables.vocab_size)  # the best one is needed in any case
        device, width = self.tables.device, self.tables.vocab_size
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
            *self._source(logits), self._masked(rows), rows.seats, self.tables.table, self._thresholds,
            self._best_scores, sampled, chosen, number, self._sums, self._arrived, scores, width,
            EDITS=controls.edits or controls.masks, ROW_MASKS=controls.masks, NUMBER=_power(number), BLOCK=block,
            num_warps=warps, **_ALIKE)
        return scores

    def _sample(self, logits: Tensor, rows: SampledRows, controls: Controls, out: Tensor, taken: Tensor,
                number: int) -> None:
        """`number`: how many of the tokens `taken` [.., R] are not to be sampled again."""
        count = logits.shape[0]
        block, warps = self._shape(count)
        sample_kernel[(count, self._chunks(block))](
            *self._source(logits), self._masked(rows), rows.seats, rows.positions, self.tables.table, self._thresholds,
            self._best, self._arrived, out, taken, number, self.tables.vocab_size,
            EDITS=controls.edits or controls.masks, ROW_MASKS=controls.masks, TRUNCATION=controls.truncation,
            BLOCK=block, num_warps=warps, **_ALIKE)

    def _edit(self, logits: Tensor, rows: SampledRows) -> None:
        tables, count = self.tables, logits.shape[0]
        block, warps = self._shape(count)
        unused = tables.table  # stands where nothing is read
        edit_kernel[(count, self._chunks(block))](
            *self._source(logits), rows.seats, rows.positions, tables.table, tables.counts,
            unused if rows.parents is None else rows.parents, unused if rows.fed is None else rows.fed, tables.ids,
            tables.values, tables.list_room, tables.masks, unused if rows.masks is None else rows.masks,
            self._masked(rows), tables.vocab_size, DRAFTS=rows.parents is not None, ROW_MASKS=rows.masks is not None,
            BLOCK=block, num_warps=warps, **_ALIKE)

    def _truncate(self, logits: Tensor, rows: SampledRows, controls: Controls) -> None:
        """Thresholds of truncated rows; with log-probabilities the best score of every row."""
        table, width, count = self.tables.table, self.tables.vocab_size, logits.shape[0]
        block, warps = self._shape(count)
        chunk, few = block * 2, min(_FEW, self._room)
        source = (*self._source(logits), self._masked(rows), rows.seats, table, self._tops, self._tallies)
        flags = {"EDITS": controls.edits or controls.masks, "ROW_MASKS": controls.masks, **_ALIKE}
        top_kernel[(count, self._chunks(block))](*source, self._best, self._arrived, width,
                                                 EVERY=controls.logprobs is not None, BLOCK=block, num_warps=warps,
                                                 **flags)
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

    def _masked(self, rows: SampledRows) -> Tensor:
        return self.tables.table if rows.masked is None else rows.masked

    def _chunks(self, block: int) -> int:
        return -(-self.tables.vocab_size // block)

    def _shape(self, rows: int) -> tuple[int, int]:
        """Tokens and warps of a program: few rows are split finely to keep the whole device busy."""
        if self._block is not None:
            return self._block, 4
        return (1024, 4) if rows <= 16 else (2048, 8)

    def _check(self, logits: Tensor, rows: SampledRows, controls: Controls) -> int:
        count, width = logits.shape
        if count > self.rows or width != self.tables.vocab_size or logits.stride(1) != 1:
            raise ValueError(f"expected logits [up to {self.rows}, {self.tables.vocab_size}], rows contiguous, "
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
        return torch.full((size,), value, dtype=dtype, device=self.tables.device)


def _power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
