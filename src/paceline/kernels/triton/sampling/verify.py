# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The coupled rule on the device: walk each draft from its root while the target's own token is among the children."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.device.operands import PackedDrafts, Verdicts
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.triton.sampling.edits import count


@triton.jit
def verify_kernel(offsets, parents, tokens, sampled, seats, accepted_out, bonus_out, tokens_out, path_out, room, texts,
                  text_room, lengths, table, counts, width, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """One program per group: rows offsets[g] .. offsets[g + 1] - 1, its root first, at most ROWS of them.

    parents [rows]: the row (of the step) above each, below 0 for roots; tokens [rows]: what each row was fed;
    sampled [rows]: what the target samples after it, negative where it cannot. The walk writes accepted_out [g] (drafts
    that stand), bonus_out [g] (1: nothing had been drafted where the last token came from), tokens_out [g, room] (the
    accepted tokens and one more, then -1) and path_out [g, room] (the row each of them was sampled at, then -1).
    A group without rows, or whose root has no seat, yields nothing: -1 accepted. A path longer than `room` - 1 is cut
    short there, which costs drafts and changes no token.

    What is emitted goes to the end of its seat's text. COUNT: it counts in what the seat samples from now on.
    """
    group = tl.program_id(0)
    first = tl.load(offsets + group)
    end = tl.load(offsets + group + 1)
    slots = tl.arange(0, ROWS)
    seat = tl.load(seats + first, mask=first < end, other=-1)
    rows = first + slots
    inside = rows < end
    parent = tl.load(parents + rows, mask=inside, other=-1)
    fed = tl.load(tokens + rows, mask=inside, other=-1)
    at = first
    accepted = tl.where(seat < 0, -1, 0)
    there = seat >= 0
    length = tl.load(lengths + seat, mask=there, other=0)
    text = texts + seat.to(tl.int64) * text_room
    while there:
        token = tl.load(sampled + at)
        tl.store(tokens_out + group * room + accepted, token)
        tl.store(path_out + group * room + accepted, at)
        tl.store(text + length + accepted, tl.maximum(token, 0), mask=length + accepted < text_room)
        if COUNT:
            count(seat, token, seat >= 0, table, counts, width)
        # Siblings with equal tokens lead to equal continuations; the first one wins.
        child = tl.min(tl.where(inside & (slots > 0) & (parent == at) & (fed == token) & (token >= 0), rows, end), 0)
        there = (child < end) & (accepted + 1 < room)
        at = tl.where(there, child, at)
        accepted += there.to(tl.int32)
    leaf = tl.max((inside & (slots > 0) & (parent == at)).to(tl.int32), 0) == 0
    tl.store(accepted_out + group, accepted)
    tl.store(lengths + seat, length + accepted + 1, mask=seat >= 0)
    tl.store(bonus_out + group, (leaf & (seat >= 0)).to(tl.int32))
    for i in range(accepted + 1, room):
        tl.store(tokens_out + group * room + i, -1)
        tl.store(path_out + group * room + i, -1)


class TritonVerifier:
    """Implements device.interface.Verifier: all groups of a step in one launch."""

    def __init__(self, groups: int, depth: int, device: torch.device) -> None:
        self._room = depth + 1
        self._memory = torch.empty(Verdicts.size(groups, self._room), dtype=torch.int32, device=device)

    def verify(self, drafts: PackedDrafts, sampled: Tensor, tables: SeatTables, *, count: bool = False) -> Verdicts:
        groups, room = drafts.offsets.shape[0] - 1, self._room
        found = Verdicts.over(self._memory, groups, room)
        # One warp: its threads read and write in step.
        verify_kernel[(groups,)](
            drafts.offsets, drafts.parents, drafts.tokens, sampled, drafts.seats, found.accepted, found.bonus,
            found.tokens, found.rows, room, tables.texts, tables.texts.stride(0), tables.lengths, tables.table,
            tables.table if tables.counts is None else tables.counts, tables.vocab_size,
            COUNT=count and tables.counts is not None,
            ROWS=max(2, 1 << (drafts.widest - 1).bit_length()), num_warps=1)
        return found
