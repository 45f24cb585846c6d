"""SteppedDevice: DeviceKernels in a few lines of torch each, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from paceline.kernels.device import columns
from paceline.kernels.device.interface import Sampler
from paceline.kernels.device.operands import PackedDrafts, Verdicts
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.operands import Heads
from paceline.kernels.reference.attention import CHUNK_BYTES
from paceline.kernels.reference.quantised import as_bytes


class SteppedDevice:
    """What each op promises is on DeviceKernels. Tiles are filled in and not looked at."""

    def decode_shape(self, rows: int) -> RowsShape:
        return RowsShape.bucket(rows, 1, 0)

    def prefill_shape(self, rows: int, groups: int, heads: Heads, dtype: torch.dtype) -> RowsShape:
        return RowsShape.bucket(rows, 1, 0)

    def verify_shape(self, rows: int, groups: int, depth: int, heads: Heads, dtype: torch.dtype) -> RowsShape:
        return RowsShape.bucket(rows, 1, depth)

    def scratch(self, shape: RowsShape, longest: int, heads: Heads, dtype: torch.dtype) -> int:
        return 2 * CHUNK_BYTES  # keys and values that are gathered at once, at most

    def begin(self, inputs: Tensor, table: Tensor, last_tokens: Tensor, rows: DeviceRows, slots: Tensor,
              rope_positions: Tensor, positions: Tensor, seats: Tensor, block_size: int) -> None:
        count = slots.shape[0]
        tokens, places, owners = inputs[:3 * count].view(3, count)
        row, live, known = torch.arange(count), places >= 0, places.clamp(min=0)
        pending = live & (tokens < 0)
        tokens[pending] = last_tokens[owners[pending]].long()
        rows.group.copy_(row.where(live, -1))
        rows.positions.copy_(places)
        rows.prefix.copy_(places + 1)
        rows.tiles.copy_(torch.stack((row, live.long())))
        slots.copy_((table[row, known // block_size] * block_size + known % block_size).where(live, -1))
        rope_positions.copy_(known)
        positions.copy_(places + 1)
        seats.copy_(owners.where(live, -1))

    def end(self, inputs: Tensor, sampled: Tensor, out: Tensor, tables: SeatTables, *, count: bool) -> None:
        rows = sampled.shape[0]
        tokens, places, owners = inputs[:3 * rows].view(3, rows)
        out[int(inputs[3 * rows]), :rows] = sampled
        live = places >= 0
        tokens[live] = sampled[live].clamp(min=0).long()
        places[live] += 1
        inputs[3 * rows] += 1
        self.note(sampled, owners.where(live, -1), tables, count=count)

    def fill(self, tokens: Tensor, seats: Tensor, last_tokens: Tensor) -> None:
        pending = tokens < 0
        tokens[pending] = last_tokens[seats[pending]].long()

    def note(self, sampled: Tensor, seats: Tensor, tables: SeatTables, *, count: bool) -> None:
        live = seats >= 0
        own, tokens = seats[live].long(), sampled[live]
        tables.last_tokens[own] = tokens.clamp(min=0)
        if count:
            _count(own.tolist(), tokens.tolist(), tables)

    def seat(self, packed: Tensor, tables: SeatTables) -> None:
        seats = packed[:, 0]
        tables.last_tokens[seats] = packed[:, 1].int()
        tables.table[seats] = packed[:, 2:]

    def sampler(self, tables: SeatTables, rows: int) -> Sampler | None:
        return None

    def verifier(self, groups: int, depth: int, device: torch.device) -> SteppedVerifier:
        return SteppedVerifier(groups, depth)

    def compaction(self, planes: Sequence[Tensor]) -> SteppedCompaction:
        return SteppedCompaction(planes)


class SteppedVerifier:
    """Implements device.interface.Verifier."""

    def __init__(self, groups: int, depth: int) -> None:
        self._room = depth + 1
        self._memory = torch.empty(Verdicts.size(groups, self._room), dtype=torch.int32)

    def verify(self, drafts: PackedDrafts, sampled: Tensor, tables: SeatTables, *, count: bool = False) -> Verdicts:
        offsets, parents, fed, own, seats = (
            part.tolist() for part in (drafts.offsets, drafts.parents, drafts.tokens, sampled, drafts.seats))
        found = Verdicts.over(self._memory, len(offsets) - 1, self._room)
        found.packed.fill_(-1)
        found.bonus.zero_()
        for group, (first, end) in enumerate(pairwise(offsets)):
            if first == end or seats[first] < 0:
                continue
            path = [first]
            while True:
                below = [row for row in range(first + 1, end) if parents[row] == path[-1]]
                token = own[path[-1]]
                # Siblings with equal tokens lead to equal continuations; the first one wins.
                child = next((row for row in below if fed[row] == token >= 0), None)
                if child is None or len(path) == self._room:
                    break
                path.append(child)
            tokens = [own[row] for row in path]
            found.accepted[group], found.bonus[group] = len(path) - 1, not below
            found.rows[group, :len(path)] = torch.tensor(path)
            found.tokens[group, :len(path)] = torch.tensor(tokens)
            if count:
                _count([seats[first]] * len(tokens), tokens, tables)
        return found


class SteppedCompaction:
    """Implements device.interface.Compaction."""

    def __init__(self, planes: Sequence[Tensor]) -> None:
        self._planes = [as_bytes(plane) for plane in planes]

    def move(self, offsets: Tensor, accepted: Tensor, rows: Tensor, slots: Tensor) -> None:
        for group, (first, count) in enumerate(zip(offsets.tolist(), accepted.tolist())):
            if count < 1:
                continue
            source = slots[rows[group, 1:count + 1].long()].long()
            target = slots[first + 1:first + 1 + count].long()
            for plane in self._planes:
                plane[target] = plane[source]  # gathered before anything is written


def _count(seats: Sequence[int], tokens: Sequence[int], tables: SeatTables) -> None:
    """Sampled tokens of penalised seats count as output from now on."""
    if tables.counts is None:
        return
    for seat, token in zip(seats, tokens):
        if token >= 0 and int(tables.table[seat, columns.FLAGS]) & columns.PENALISED:
            tables.counts[seat, token] += 2
