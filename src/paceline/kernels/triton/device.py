"""TritonDevice: DeviceKernels on Triton's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.device import columns
from paceline.kernels.device.operands import Verdicts
from paceline.kernels.device.repeats import Drafts, RepeatInputs, RepeatRows
from paceline.kernels.device.rows import CHUNK_FROM, TREE_ROWS, DeviceRows, RowsShape
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.operands import Heads
from paceline.kernels.triton import latent
from paceline.kernels.triton.attention import Tuning, tile_rows, tuning
from paceline.kernels.triton.drafts_device import propose_kernel, record_kernel, spread_kernel
from paceline.kernels.triton.head_rounds import TritonHeadRounds
from paceline.kernels.triton.plan import room_for
from paceline.kernels.triton.sampling.compaction import TritonCompaction
from paceline.kernels.triton.sampling.sampler import TritonSampler
from paceline.kernels.triton.sampling.seat import seat_kernel
from paceline.kernels.triton.sampling.verify import TritonVerifier
from paceline.kernels.triton.stepping_device import begin_kernel, end_kernel, fill_kernel, note_kernel

_BLOCK = 256
_SEARCHED = 1024
"""Tokens of a text that are compared at once."""


class TritonDevice:
    """What each op promises is on DeviceKernels."""

    def __init__(self, deterministic: bool, processors: int) -> None:
        self._deterministic = deterministic
        self._processors = processors

    def decode_shape(self, rows: int) -> RowsShape:
        return RowsShape.bucket(rows, 1, 0)

    def prefill_shape(self, rows: int, groups: int, heads: Heads, dtype: torch.dtype) -> RowsShape:
        """Tiles are of one row, as where all decode: the chains of several rows, prompts mostly, are cut into chunks
        however short they are."""
        _, chunk_rows = self._tile_rows(rows, heads, dtype)
        # Every chain may end with a chunk that is not full.
        return RowsShape(rows, min(rows, groups), 1, chunks=rows // chunk_rows + min(groups, rows // 2),
                         chunk_rows=chunk_rows, chunk_from=2)

    def verify_shape(self, rows: int, groups: int, depth: int, heads: Heads, dtype: torch.dtype) -> RowsShape:
        tile, chunk = self._tile_rows(rows, heads, dtype)
        tile = min(tile, rows)
        lowest = min(tile, TREE_ROWS) if depth else tile
        # Every group may end with a tile or a chunk that is not full; a chunk's group has at least CHUNK_FROM rows.
        return RowsShape(rows, min(rows, min(rows, groups) + rows // lowest), tile, depth,
                         chunks=rows // CHUNK_FROM + rows // chunk if rows >= CHUNK_FROM else 0, chunk_rows=chunk)

    def scratch(self, shape: RowsShape, longest: int, heads: Heads, dtype: torch.dtype) -> int:
        """The pieces of keys that attention puts together."""
        if heads.latent is not None:
            return latent.scratch(shape.rows, longest, heads.query, heads.latent, dtype, self._processors)
        chosen = self._tuning(dtype, heads)
        target = chosen.processors * chosen.sharing(shape).items
        _, cells = room_for(shape, longest, heads.keys, chosen.split, self._deterministic, target)
        return 4 * cells * heads.query * (heads.dim + 2)

    def _tile_rows(self, rows: int, heads: Heads, dtype: torch.dtype) -> tuple[int, int]:
        """Of tiles and of chunks in a step of so many rows, at most."""
        if heads.latent is not None:
            return latent.tile_rows(rows)
        return tile_rows(self._tuning(dtype, heads), heads.query // heads.keys, rows)

    def _tuning(self, dtype: torch.dtype, heads: Heads) -> Tuning:
        return tuning(dtype, heads.dim, self._deterministic, self._processors)

    def repeat_shape(self, rows: int, groups: int, widest: int, heads: Heads, dtype: torch.dtype) -> RowsShape:
        tile, _ = self._tile_rows(rows, heads, dtype)
        tile = min(tile, widest)
        return RowsShape(rows, groups * -(-widest // tile), tile)

    def begin(self, inputs: RepeatInputs, tables: SeatTables, blocks: Tensor, rows: DeviceRows, out: RepeatRows,
              block_size: int) -> None:
        count = len(inputs.seats)
        begin_kernel[(1,)](inputs.seats, inputs.ends, tables.texts, tables.texts.stride(0), tables.lengths, blocks,
                           blocks.stride(0), rows.group, rows.positions, rows.prefix, rows.tiles, out.tokens,
                           out.rope_positions, out.slots, out.positions, out.seats, count, BLOCK_SIZE=block_size,
                           BLOCK=_power(count))

    def propose(self, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts) -> None:
        groups, most = drafts.tokens.shape
        propose_kernel[(groups,)](inputs.seats, inputs.ends, inputs.levels, tables.table, tables.texts,
                                  tables.texts.stride(0), tables.lengths, drafts.tokens, drafts.levels, drafts.found,
                                  drafts.matched, groups, MOST=most, WIDTH=_power(most), BLOCK=_SEARCHED)

    def spread(self, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts, blocks: Tensor, rows: DeviceRows,
               out: RepeatRows, block_size: int) -> None:
        groups, most = drafts.tokens.shape
        count, shape = len(out.tokens), rows.shape
        spread_kernel[(1,)](inputs.seats, inputs.ends, tables.texts, tables.texts.stride(0), tables.lengths,
                            drafts.tokens, drafts.levels, drafts.found, drafts.taken, blocks, blocks.stride(0),
                            rows.group, rows.positions, rows.prefix, rows.tiles, shape.tiles, out.tokens,
                            out.rope_positions, out.slots, out.positions, out.seats, out.parents, out.offsets, groups,
                            count, MOST=most, WIDTH=_power(most), TILE=shape.tile_rows,
                            PER_GROUP=shape.tiles // groups, BLOCK_SIZE=block_size, GROUPS=_power(groups),
                            ROWS=_power(count))

    def end(self, inputs: RepeatInputs, sampled: Tensor, out: Tensor, tables: SeatTables, *, count: bool) -> None:
        rows = sampled.shape[0]
        end_kernel[(1,)](inputs.seats, inputs.ends, inputs.time, tables.texts, tables.texts.stride(0), tables.lengths,
                         sampled, out, out.stride(0), rows, tables.table, tables.counts, tables.vocab_size,
                         COUNT=count, BLOCK=_power(rows))

    def record(self, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts, verdicts: Verdicts, out: Tensor) -> None:
        groups, most = drafts.tokens.shape
        record_kernel[(1,)](inputs.time, verdicts.accepted, verdicts.tokens, verdicts.tokens.stride(0), drafts.taken,
                            drafts.matched, out, out.stride(0), out.stride(1), groups, MOST=most,
                            GROUPS=_power(groups))

    def fill(self, tokens: Tensor, seats: Tensor, tables: SeatTables) -> None:
        fill_kernel[(-(-len(tokens) // _BLOCK),)](tokens, seats, tables.texts, tables.texts.stride(0), tables.lengths,
                                                  len(tokens), BLOCK=_BLOCK)

    def note(self, sampled: Tensor, seats: Tensor, tables: SeatTables, *, count: bool) -> None:
        rows = sampled.shape[0]
        note_kernel[(1,)](sampled, seats, tables.texts, tables.texts.stride(0), tables.lengths, rows, tables.table,
                          tables.counts, tables.vocab_size, COUNT=count, BLOCK=_power(rows))

    def seat(self, packed: Tensor, tables: SeatTables) -> None:
        seat_kernel[(packed.shape[0],)](packed, tables.table, tables.lengths, COLUMNS=columns.COLUMNS)

    def sampler(self, tables: SeatTables, rows: int) -> TritonSampler:
        return TritonSampler(tables, rows)

    def verifier(self, groups: int, depth: int, device: torch.device) -> TritonVerifier:
        return TritonVerifier(groups, depth, device)

    def head_rounds(self, groups: int, device: torch.device) -> TritonHeadRounds:
        return TritonHeadRounds(groups, device)

    def compaction(self, planes: Sequence[Tensor]) -> TritonCompaction:
        return TritonCompaction(planes)


def _power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
