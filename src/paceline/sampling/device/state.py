"""DeviceState: seats running requests in the tables that a device samples from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels.device import columns
from paceline.kernels.device.interface import DeviceKernels
from paceline.kernels.device.operands import MOST_ALTERNATIVES, Controls
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.low_rank import NOBODY
from paceline.sampling.masks import packed_mask
from paceline.sampling.state import SampleState

_EDITED = columns.PENALISED | columns.BIASED | columns.MASKED
_TRUNCATED = columns.RANKED | columns.NUCLEUS | columns.FLOORED


@dataclass(frozen=True, slots=True)
class Seated:
    """A request to seat: its state as it is now, and the absolute position of the token it samples next."""

    seat: int
    state: SampleState
    position: int
    text: Sequence[int] = ()
    """Its newest tokens: the device knows those before them already. None: it looks at no text."""
    lookup: int = 0
    """How drafts are looked up in it (columns.LOOKUP)."""
    adapter: int = NOBODY
    """The slot of its adapter."""


class DeviceState:
    """The running requests as a device's tables hold them: host calls change seats, `kernels` carry that out."""

    def __init__(self, tables: SeatTables, kernels: DeviceKernels) -> None:
        self.tables = tables
        self._kernels = kernels
        self._flags = np.zeros(tables.seats, dtype=np.int64)

    def why_not(self, state: SampleState) -> str | None:
        """Why this request cannot be sampled on the device, as a sentence; None: it can."""
        listed = len(state.bias_ids) + (len(state.early_stops) if state.min_tokens else 0)
        if listed > self.tables.list_room:
            return f"it biases {listed} tokens and there is room for {self.tables.list_room}"
        if (state.params.logprobs or 0) > MOST_ALTERNATIVES:
            return f"it asks for {state.params.logprobs} alternatives and there is room for {MOST_ALTERNATIVES}"
        return None

    def assign(self, seated: Sequence[Seated]) -> None:
        """Seat requests, new or after a preemption: whatever the seats held before is forgotten."""
        if not seated:
            return
        for one in seated:
            if (reason := self.why_not(one.state)) is not None:
                raise ValueError(f"the request of seat {one.seat} must be sampled on the host: {reason}")
        packed = np.empty((len(seated), 2 + columns.COLUMNS), dtype=np.int64)
        packed[:, :2] = [(one.seat, one.position) for one in seated]
        table = packed[:, 2:]
        table[:] = [_words(one) for one in seated]
        self._flags[packed[:, 0]] = table[:, columns.FLAGS]
        self._kernels.seat(self._on(packed), self.tables)
        self._send_texts([one for one in seated if one.text])
        for one, words in zip(seated, table):
            if words[columns.FLAGS] & _EDITED:
                self._assign_edits(one.seat, one.state, int(words[columns.LISTED_EARLY]))

    def controls(self, seats: Sequence[int] | None = None, logprobs: int | None = None) -> Controls:
        """What rows of these seats (all that are taken, by default) need. Masks of rows are the caller's."""
        flags = int(np.bitwise_or.reduce(self._flags if seats is None else self._flags[list(seats)], initial=0))
        return Controls(bool(flags & _EDITED), bool(flags & _TRUNCATED), logprobs)

    def _send_texts(self, seated: Sequence[Seated]) -> None:
        if not seated:
            return
        room = self.tables.texts.shape[1]
        places = np.concatenate([np.arange(one.position - len(one.text), one.position) + one.seat * room
                                 for one in seated])
        tokens = np.concatenate([np.array(one.text, dtype=np.int32) for one in seated])
        self.tables.texts.view(-1).index_copy_(0, self._on(places), self._on(tokens))

    def _assign_edits(self, seat: int, state: SampleState, listed: int) -> None:
        tables = self.tables
        tables.prepare()
        assert tables.counts is not None and tables.masks is not None
        if listed:
            ids, values = _listed(state)
            tables.ids[seat, :listed] = self._on(ids)
            tables.values[seat, :listed] = self._on(values)
        if state.counts is not None:
            tokens, counts = state.counts.plus(())
            tables.counts[seat].zero_()
            tables.counts[seat].index_copy_(0, self._on(tokens.copy()), self._on(counts.astype(np.int32) * 2 + 1))
        if state.allowed is not None:
            allowed = np.zeros(tables.vocab_size, dtype=np.bool_)
            allowed[state.allowed] = True
            tables.masks[seat] = self._on(packed_mask(allowed))

    def _on(self, values: NDArray[np.generic]) -> Tensor:
        # From pinned memory, which torch keeps until the copy has run: the device may be busy, and nobody waits for it.
        tensor = torch.from_numpy(values)
        device = self.tables.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _listed(state: SampleState) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Biased tokens and values, then the tokens that min_tokens keeps out."""
    stops = [token for token in state.early_stops if token < state.vocab_size] if state.min_tokens else []
    ids = np.concatenate((state.bias_ids, np.array(stops, dtype=np.int64))).astype(np.int32)
    values = np.concatenate((state.bias_values, np.full(len(stops), -np.inf, dtype=np.float32)))
    return ids, values


def _words(seated: Seated) -> NDArray[np.int64]:
    """A seat's row of the table."""
    state = seated.state
    params = state.params
    flags = columns.GREEDY if state.is_greedy else 0
    if state.truncates:
        flags |= columns.RANKED if state.top_k < state.vocab_size else 0
        flags |= columns.NUCLEUS if params.top_p < 1.0 else 0
        flags |= columns.FLOORED if params.min_p > 0.0 else 0
    ids, _ = _listed(state)
    flags |= columns.PENALISED if state.counts is not None else 0
    flags |= columns.BIASED if len(ids) else 0
    flags |= columns.MASKED if state.allowed is not None else 0

    words = np.zeros(columns.COLUMNS, dtype=np.int64)
    words[columns.SEED] = np.uint64(state.seed).astype(np.int64)
    words[columns.FLAGS] = flags
    words[columns.TOP_K] = state.top_k
    words[columns.LOOKUP] = seated.lookup
    words[columns.ADAPTER] = seated.adapter
    words[columns.LISTED] = len(state.bias_ids)
    words[columns.LISTED_EARLY] = len(ids)
    words[columns.EARLY_UNTIL] = seated.position - state.output_len + state.min_tokens
    reals = words.view(np.float64)
    reals[columns.TOP_P] = params.top_p
    reals[columns.LOG_MIN_P] = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    for column, value in ((columns.TEMPERATURE, state.temperature), (columns.REPETITION, state.repetition),
                          (columns.PRESENCE, state.presence), (columns.FREQUENCY, state.frequency)):
        # Rounded to float32 as the host does; a float64 holds that exactly.
        reals[column] = np.float32(value)
    return words
