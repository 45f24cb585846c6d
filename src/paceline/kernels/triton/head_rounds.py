"""TritonHeadRounds: HeadRounds on Triton's kernels, a launch for each operation."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.device.head_rounds import DraftSlot, HeadRound, PassRows, RoundScope, Sureness
from paceline.kernels.device.repeats import Drafts, RepeatInputs
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.triton.head_rounds_device import (
    KNOWN,
    PROBABILITY,
    SURENESS,
    close_kernel,
    draw_kernel,
    lay_out_kernel,
    open_kernel,
)
from paceline.kernels.triton.launch import overlapped
from paceline.kernels.triton.sampling.rows import LOWEST

_TILE = 16
"""Groups that a program draws for: rows of the smallest product that tensor cores make."""
_BLOCK = 128
"""Tokens of the draft vocabulary that a program looks at: few groups keep the whole device busy."""
_ROWS = 256
_STRIPE, _SLICE = 128, 64
"""Columns at a time, of hidden states and of what tokens add."""
_ENDLESS = 1 << 62


class TritonHeadRounds:
    """What each op promises is on HeadRounds."""

    draws = True

    def __init__(self, groups: int, device: torch.device) -> None:
        self._best = torch.full((groups,), LOWEST.value, dtype=torch.int64, device=device)
        self._arrived = torch.zeros(-(-groups // _TILE), dtype=torch.int32, device=device)

    def open(self, inputs: RepeatInputs, tables: SeatTables, scope: RoundScope, levels: int) -> HeadRound:
        groups = len(inputs.seats)
        opened = HeadRound.of(groups, levels, inputs.seats.device)
        longest = _ENDLESS if scope.longest is None else scope.longest
        open_kernel[(1,)](inputs.seats, inputs.ends, tables.table, tables.texts, tables.texts.stride(0), tables.lengths,
                          scope.blocks, scope.blocks.stride(0), scope.blocks.shape[1], scope.number, longest,
                          opened.owners, opened.places, opened.ends, opened.previous, opened.before, groups,
                          BLOCK_SIZE=scope.block_size, GROUPS=_power(groups))
        return opened

    def lay_out(self, opened: HeadRound, scope: RoundScope, first: int, rows: int, mutual: bool) -> PassRows:
        count, device = len(opened.places) * rows, opened.places.device
        shape = RowsShape.bucket(count, 1, 0)
        laid = DeviceRows.over(shape, torch.empty(shape.size, dtype=torch.int32, device=device))
        positions, slots = torch.empty((2, count), dtype=torch.int64, device=device)
        lay_out_kernel[(-(-count // _ROWS),)](
            opened.owners, opened.places, opened.ends, scope.blocks, scope.blocks.stride(0), scope.blocks.shape[1],
            first, laid.group, laid.positions, laid.prefix, laid.tiles, positions, slots, count, PER_GROUP=rows,
            MUTUAL=mutual, BLOCK_SIZE=scope.block_size, ROWS=_ROWS)
        return PassRows(positions, slots, laid)

    def draw(self, opened: HeadRound, level: int, slot: DraftSlot, ids: Tensor | None, tables: SeatTables) -> None:
        groups, levels = opened.tokens.shape
        logits, bigrams, chances = slot.logits, slot.bigrams, slot.chances
        width, chunks = logits.shape[1], -(-logits.shape[1] // _BLOCK)
        unused = opened.places  # stands where nothing is read
        first, second = (unused, unused) if bigrams is None else (bigrams.first, bigrams.second)
        rank = 0 if bigrams is None else bigrams.first.shape[1]
        hidden = weight = bias = known = tops = sums = unused
        size, kind = 0, PROBABILITY
        if isinstance(chances, Sureness):
            hidden, weight, bias, kind = chances.hidden, chances.weight, chances.bias, SURENESS
            size = hidden.shape[1]
        elif chances is not None:
            known, kind = chances, KNOWN
        else:
            tops, sums = torch.empty((2, groups, _power(chunks)), dtype=torch.float32, device=logits.device)
        draw_kernel[(chunks, -(-groups // _TILE))](
            logits, logits.stride(0), first, second, unused if ids is None else ids, hidden, hidden.stride(0), weight,
            bias, known, opened.owners, opened.places, opened.previous, tables.table, self._best, tops, sums,
            self._arrived, opened.tokens, opened.chances, levels, level, groups, width, size, RANK=rank,
            SLICE=min(_SLICE, max(16, _power(rank))), IDS=ids is not None, CHANCE=kind.value,
            SEES_TOKEN=size < len(weight) and kind is SURENESS, TILE=_TILE, BLOCK=_BLOCK, CHUNKS=_power(chunks),
            STRIPE=_STRIPE, enable_fp_fusion=False, **overlapped(logits.device, groups, width))

    def close(self, opened: HeadRound, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts) -> None:
        groups, levels = opened.tokens.shape
        close_kernel[(1,)](tables.table, inputs.levels, opened.owners, opened.places, opened.ends,
                           opened.tokens, opened.chances, drafts.tokens, drafts.levels, drafts.found, drafts.matched,
                           groups, LEVELS=levels, MOST=drafts.tokens.shape[1], GROUPS=_power(groups))


def _power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
