"""Who sits where, as a device knows it: what its sampler needs of each running sequence, and its newest token."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch

from paceline.engine.execute.graphs.memory import GraphMemory, Use
from paceline.engine.rows.batch import slot_of
from paceline.engine.rows.sample_rows import masked_by_host
from paceline.engine.schedule.sequence import Sequence
from paceline.engine.schedule.step import RowGroup
from paceline.kernels.device.interface import DeviceKernels, Sampler
from paceline.kernels.device.operands import MOST_ALTERNATIVES, Controls, SampledRows
from paceline.kernels.device.seats import SeatTables
from paceline.sampling.device.sampler import PipelineSampler
from paceline.sampling.device.state import DeviceState, Seated
from paceline.sampling.masks import Mask

MOST_ROWS = 512
"""Rows that are sampled from in one step on the device, at most."""
ALTERNATIVES = (1, 5, MOST_ALTERNATIVES)
"""How many are scored, so that few different steps are captured."""


class DeviceSeats:
    """Shared by all captured steps of an engine. Steps run in the order in which they are launched, so one may read
    what the one before it samples."""

    def __init__(self, seats: int, longest: int, vocab_size: int, device: torch.device,
                 kernels: DeviceKernels) -> None:
        """`longest`: tokens of a text."""
        self.most_rows = min(seats, MOST_ROWS)
        """Sequences that are sampled for in one step, at most."""
        self.kernels = kernels
        tables = SeatTables(seats, vocab_size, device, longest=longest)
        self.state = DeviceState(tables, kernels)
        self.sampler: Sampler = kernels.sampler(tables, MOST_ROWS) or PipelineSampler(tables)
        self._masks: torch.Tensor | None = None
        self._masked: torch.Tensor | None = None
        self._seated: list[tuple[Sequence, int] | None] = [None] * seats
        """Who sits there for the device, since which epoch."""
        self._noted: dict[int, int] = {}
        """Seats whose texts have grown on the host alone, and how many of their tokens the device knows."""

    def make_room(self, seq: Sequence, memory: GraphMemory) -> bool:
        """Allocate what sampling for a sequence takes. False: there is no memory for it, or no room in the tables."""
        controls = Controls(edits=seq.state.needs_processors, masks=masked_by_host(seq))
        if self.state.why_not(seq.state) is not None:
            return False
        # Not final: the next one may find memory.
        if not memory.allows(Use.CONTROLS, lambda: self.prepare(controls), final=False):
            memory.warn(Use.CONTROLS)
            return False
        return True

    def prepare(self, controls: Controls) -> None:
        """Everything that must lie where it lies before a step with these controls is captured."""
        self.sampler.prepare(controls)
        if controls.masks and self._masks is None:
            device, words = self.state.tables.device, -(-self.state.tables.vocab_size // 32)
            self._masked = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)
            self._masks = torch.zeros(MOST_ROWS, words, dtype=torch.int32, device=device)

    def _send(self, masks: Seq[Mask | None]) -> None:
        assert self._masks is not None and self._masked is not None
        masked = np.zeros(MOST_ROWS, dtype=np.int32)
        for row, mask in enumerate(masks):
            if mask is not None:
                masked[row] = 1
                send(mask, self._masks[row])
        send(masked, self._masked)

    def sample(self, logits: torch.Tensor, rows: SampledRows,
               controls: Controls) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens [R], and their scores where the controls ask for them."""
        if controls.masks and self._masks is not None and self._masked is not None:
            count = logits.shape[0]
            rows = replace(rows, masks=self._masks[:count], masked=self._masked[:count])
        sampled = self.sampler.sample(logits, rows, controls)
        return sampled, None if controls.logprobs is None else self.sampler.logprobs(logits, rows, sampled, controls)

    def forget(self, groups: Seq[RowGroup]) -> None:
        """The host decides about these sequences: what the device knows of their tokens will not be true any more."""
        for group in groups:
            if group.seq.seated:
                self._noted.setdefault(group.seq.allocation.seat, len(group.seq.tokens))

    def seat_all(self, sequences: Seq[Sequence], masks: Seq[Mask | None] = ()) -> Controls:
        """Seat those that the device does not know in their seats, and send the host's masks of the rows they are
        sampled from; what sampling for all of them takes."""
        fresh: list[Seated] = []
        for seq in sequences:
            seat = seq.allocation.seat
            known = 0 if self._seated[seat] != (seq, seq.epoch) else self._noted.get(seat)
            if known is not None:
                fresh.append(Seated(seat, seq.state, len(seq.tokens), seq.tokens[known:], seq.lookup,
                                    slot_of(seq.adapter)))
        self.state.assign(fresh)
        if fresh:  # not before: without memory for it they are seated another time
            for seq in sequences:
                self._seated[seq.allocation.seat] = (seq, seq.epoch)
                self._noted.pop(seq.allocation.seat, None)
        asked = [seq.request.params.logprobs or 0 for seq in sequences if seq.emitter.scored]
        scored = next(size for size in ALTERNATIVES if size >= max(asked)) if asked else None
        controls = self.state.controls([seq.allocation.seat for seq in sequences], scored)
        if all(mask is None for mask in masks):
            return controls
        controls = replace(controls, masks=True)
        self.prepare(controls)
        self._send(masks)
        return controls


def sampling(groups: Seq[RowGroup]) -> list[Sequence]:
    """Whose tokens a step samples: not those in the middle of their prompts, nor those who have ended since it was
    planned. Their rows run all the same and what they yield is dropped."""
    return [group.seq for group in groups
            if group.sampled_rows and group.seq.seated]


def send(values: np.ndarray, target: torch.Tensor) -> None:
    """Copy to the device in its own time: from pinned memory, which torch keeps until the copy has run."""
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
