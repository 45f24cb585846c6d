"""SteppedDevice: DeviceKernels in a few lines of torch each, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from paceline.kernels.device import columns
from paceline.kernels.device.interface import Sampler
from paceline.kernels.device.lookup import ALWAYS, HIGHEST, LOOK_BACK
from paceline.kernels.device.operands import PackedDrafts, Verdicts
from paceline.kernels.device.repeats import IDLE, ROUND, Drafts, RepeatInputs, RepeatRows
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.operands import Heads
from paceline.kernels.reference.attention import CHUNK_BYTES
from paceline.kernels.reference.quantised import as_bytes
from paceline.kernels.stepped.head_rounds import SteppedHeadRounds


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

    def repeat_shape(self, rows: int, groups: int, widest: int, heads: Heads, dtype: torch.dtype) -> RowsShape:
        return RowsShape.bucket(rows, 1, 0)

    def begin(self, inputs: RepeatInputs, tables: SeatTables, blocks: Tensor, rows: DeviceRows, out: RepeatRows,
              block_size: int) -> None:
        live, places = _places(inputs, tables)
        self._lay_out(live.long(), places, inputs.seats, tables, blocks, rows, out, block_size)
        rows.tiles.copy_(torch.stack((torch.arange(len(live)), live.long())))

    def propose(self, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts) -> None:
        live, places = _places(inputs, tables)
        most = drafts.tokens.shape[1]
        drafts.found.zero_()
        drafts.matched.zero_()
        for group in live.nonzero().flatten().tolist():
            seat, place = int(inputs.seats[group]), int(places[group])
            words = int(tables.table[seat, columns.LOOKUP])
            found, matched = look_up(tables.texts[seat, :place + 1].tolist(), words & 255, words >> 8 & 255, most)
            levels = torch.full((most,), HIGHEST) if words & ALWAYS else inputs.levels[matched, :most]
            worth = int((levels > 0).sum())
            depth = min(words >> 16 & 255, most, worth, int(inputs.ends[group]) - place - 1)
            found = found[:max(0, depth)]
            drafts.tokens[group, :len(found)] = torch.tensor(found, dtype=torch.int32)
            drafts.levels[group, :len(found)] = levels[:len(found)].int()
            drafts.found[group], drafts.matched[group] = len(found), matched

    def spread(self, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts, blocks: Tensor, rows: DeviceRows,
               out: RepeatRows, block_size: int) -> None:
        live, places = _places(inputs, tables)
        room = len(out.tokens) - int(live.sum())
        most = drafts.tokens.shape[1]
        drafted = torch.arange(most) < drafts.found[:, None]
        wanted = [(drafted & (drafts.levels >= level)).sum(1) for level in range(1, HIGHEST + 1)]
        taken = next((one for one in wanted if int(one.sum()) <= room), wanted[-1])
        cap = max(cap for cap in range(most + 1) if int(taken.clamp(max=cap).sum()) <= room)
        drafts.taken.copy_(taken.clamp(max=cap))
        sizes = (1 + drafts.taken.long()).where(live, 0)
        self._lay_out(sizes, places, inputs.seats, tables, blocks, rows, out, block_size, drafts.tokens)
        rows.tiles.zero_()

    def _lay_out(self, sizes: Tensor, places: Tensor, owners: Tensor, tables: SeatTables, blocks: Tensor,
                 rows: DeviceRows, out: RepeatRows, block_size: int, drafts: Tensor | None = None) -> None:
        """`sizes` [G]: the rows of each group; without drafts one of padding stands for each group that has none."""
        groups = torch.arange(len(sizes))
        offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
        count = int(offsets[-1])
        of_row = groups.repeat_interleave(sizes)
        depth = torch.arange(count) - offsets[of_row]
        at = torch.arange(count) if drafts is not None else of_row
        place, seat = places[of_row] + depth, owners[of_row]
        token = tables.texts[seat, places[of_row]].long()
        if drafts is not None:
            token = token.where(depth == 0, drafts[of_row, (depth - 1).clamp(min=0)].long())
            out.offsets.copy_(offsets)
            out.parents.fill_(-1)
            out.parents[:count] = (at - 1).where(depth > 0, -1).int()
        for part, padding in ((out.tokens, 0), (out.rope_positions, 0), (out.slots, -1), (out.positions, 0),
                              (out.seats, -1), (rows.group, -1), (rows.positions, -1), (rows.prefix, 0)):
            part.fill_(padding)
        out.tokens[at], out.rope_positions[at], out.positions[at], out.seats[at] = token, place, place + 1, seat.int()
        out.slots[at] = (blocks[of_row, place // block_size] * block_size + place % block_size).long()
        rows.group[at], rows.positions[at], rows.prefix[at] = of_row.int(), place.int(), (place + 1).int()

    def end(self, inputs: RepeatInputs, sampled: Tensor, out: Tensor, tables: SeatTables, *, count: bool) -> None:
        live, _ = _places(inputs, tables)
        out[int(inputs.time), :len(live)] = sampled.where(live, IDLE)
        inputs.time.add_(1)
        self.note(sampled, inputs.seats.where(live, -1), tables, count=count)

    def record(self, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts, verdicts: Verdicts, out: Tensor) -> None:
        groups, most = drafts.tokens.shape
        rounds = out[int(inputs.time), :groups]
        accepted = verdicts.accepted[:groups]
        rounds[:, 0] = accepted.where(accepted >= 0, IDLE)
        rounds[:, 1], rounds[:, 2] = drafts.taken, drafts.matched
        rounds[:, ROUND:ROUND + most + 1] = verdicts.tokens[:groups, :most + 1]
        inputs.time.add_(1)

    def fill(self, tokens: Tensor, seats: Tensor, tables: SeatTables) -> None:
        pending = tokens < 0
        own = seats[pending]
        tokens[pending] = tables.texts[own, tables.lengths[own].long() - 1].long()

    def note(self, sampled: Tensor, seats: Tensor, tables: SeatTables, *, count: bool) -> None:
        live = seats >= 0
        own, tokens = seats[live].tolist(), sampled[live].tolist()
        for seat, token in zip(own, tokens):
            _append(seat, token, tables)
        if count:
            _count(own, tokens, tables)

    def seat(self, packed: Tensor, tables: SeatTables) -> None:
        seats = packed[:, 0]
        tables.lengths[seats] = packed[:, 1].int()
        tables.table[seats] = packed[:, 2:]

    def sampler(self, tables: SeatTables, rows: int) -> Sampler | None:
        return None

    def verifier(self, groups: int, depth: int, device: torch.device) -> SteppedVerifier:
        return SteppedVerifier(groups, depth)

    def head_rounds(self, groups: int, device: torch.device) -> SteppedHeadRounds:
        return SteppedHeadRounds()

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
            for token in tokens:
                _append(seats[first], token, tables)
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


def look_up(text: Sequence[int], min_n: int, max_n: int, most: int) -> tuple[list[int], int]:
    """What followed the most recent occurrence of the longest n-gram that the text ends with, up to `most` tokens, and
    how many tokens before it matched. speculation/drafters/ngram.py says the same from an index."""
    length = len(text)
    for n in range(max_n, min_n - 1, -1) if max_n else ():
        for at in range(length - 1, n - 1, -1):
            if text[at - n:at] != text[length - n:]:
                continue
            found, matched = list(text[at:at + most]), n
            period = len(found)
            while n == max_n and len(found) < most:
                found.append(found[-period])
            while matched < min(at, LOOK_BACK) and text[at - matched - 1] == text[length - matched - 1]:
                matched += 1
            return found, matched
    return [], 0


def _places(inputs: RepeatInputs, tables: SeatTables) -> tuple[Tensor, Tensor]:
    """Which groups run this time, and the position of each one's newest token."""
    places = tables.lengths[inputs.seats.clamp(min=0)].long() - 1
    return (inputs.seats >= 0) & (places < inputs.ends), places


def _append(seat: int, token: int, tables: SeatTables) -> None:
    length = int(tables.lengths[seat])
    if length < tables.texts.shape[1]:
        tables.texts[seat, length] = max(token, 0)
    tables.lengths[seat] += 1


def _count(seats: Sequence[int], tokens: Sequence[int], tables: SeatTables) -> None:
    """Sampled tokens of penalised seats count as output from now on."""
    if tables.counts is None:
        return
    for seat, token in zip(seats, tokens):
        if token >= 0 and int(tables.table[seat, columns.FLAGS]) & columns.PENALISED:
            tables.counts[seat, token] += 2
