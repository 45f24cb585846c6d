"""Rows for both samplers: the host's pipeline and the device's, from the same states."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from paceline.kernels.device import columns
from paceline.kernels.device.operands import Controls, SampledRows
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.triton import load as load_triton
from paceline.kernels.triton.sampling.sampler import TritonSampler
from paceline.request import SamplingParams
from paceline.sampling import Pipeline, SampleRow, SampleState
from paceline.sampling.device.state import DeviceState, Seated
from paceline.sampling.masks import row_mask
from paceline.sampling.native import load
from paceline.sampling.processed import NO_TOKEN


@dataclass
class Case:
    """One row: a request, what it has produced, the draft tokens above the row, a grammar's mask, the row's logits."""

    params: SamplingParams
    logits: Any
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    output: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    mask: list[bool] | None = None
    seed: int = 0
    eos: tuple[int, ...] = ()
    bad: tuple[tuple[int, ...], ...] = ()

    def row(self, width: int) -> SampleRow:
        state = SampleState(self.params, self.prompt, self.seed, width, self.eos, self.bad)
        state.append(self.output)
        mask = None if self.mask is None else np.array(self.mask)
        return SampleRow(state, len(self.prompt) + len(self.output) + len(self.path), self.path, mask)


class Both:
    """A batch of cases for the host and for the device; row i has seat i + 1, and padding lies between."""

    def __init__(self, cases: list[Case], width: int, device: torch.device, *, block: int = 64,
                 window_room: int = 8192, dtype: torch.dtype = torch.float32) -> None:
        self.rows = [case.row(width) for case in cases]
        self.logits = torch.tensor(np.array([case.logits for case in cases]), dtype=torch.float32).to(dtype)
        self.pipeline = Pipeline(width, load())
        self.tables = SeatTables(len(cases) + 1, width, device, list_room=16)
        self.state = DeviceState(self.tables, load_triton(True, device).device)
        self.state.assign([Seated(i + 1, row.state, row.position - len(row.path))
                           for i, row in enumerate(self.rows)])
        self.at = [2 * i + 1 for i in range(len(cases))]
        """Where case i stands among the device's rows; the others are padding with NaN logits."""
        above = 2 * len(cases) + 1
        total = above + sum(len(case.path) for case in cases)
        self.sampler = TritonSampler(self.tables, total, block=block, window_room=window_room)
        logits = torch.full((total, width), torch.nan, dtype=dtype)
        logits[self.at] = self.logits
        self.device_logits = logits.to(device)
        seats = torch.full((total,), -1, dtype=torch.int32)
        positions = torch.zeros(total, dtype=torch.int64)
        parents = torch.full((total,), -1, dtype=torch.int32)
        fed = torch.zeros(total, dtype=torch.int64)
        masks = torch.zeros(total, -(-width // 32), dtype=torch.int32)
        masked = torch.zeros(total, dtype=torch.int32)
        for i, row in enumerate(self.rows):
            at = self.at[i]
            seats[at], positions[at] = i + 1, row.position
            below = at
            for token in reversed(row.path):  # rows without a seat stand above: the rest of the path, and a root
                fed[below], parents[below] = token, above
                below, above = above, above + 1
            packed = row_mask(row)
            if packed is not None:
                masks[at], masked[at] = torch.from_numpy(packed), 1
        self.masks = bool(masked.any())
        drafted = any(case.path for case in cases)
        self.device_rows = SampledRows(
            seats.to(device), positions.to(device), parents.to(device) if drafted else None,
            fed.to(device) if drafted else None, masks.to(device) if self.masks else None,
            masked.to(device) if self.masks else None)

    def host(self) -> list[int]:
        self.processed = self.pipeline.process(self.logits, self.rows)
        return self.pipeline.choose(self.processed)

    def draw(self, logprobs: int | None = None) -> torch.Tensor:
        self.controls: Controls = replace(self.state.controls(logprobs=logprobs), masks=self.masks)
        self.drawn = self.sampler.sample(self.device_logits, self.device_rows, self.controls)
        return self.drawn

    def device(self) -> list[int]:
        """The tokens of the cases; that padding got none is checked on the way."""
        tokens = self.draw().cpu()
        padding = [i for i in range(len(tokens)) if i not in self.at]
        assert (tokens[padding] == columns.EMPTY).all()
        return [max(token, NO_TOKEN) for token in tokens[self.at].tolist()]

    def drawn_or_why_not(self) -> list[int]:
        return self.drawn.cpu()[self.at].tolist()
