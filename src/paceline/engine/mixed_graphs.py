"""Steps of prompt chunks and decoded tokens, captured for some numbers of rows: one replay instead of hundreds of
launches, each of which takes the host longer than a small model takes the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.cache.storage import KVStorage
from paceline.engine.graphs import Graphs
from paceline.engine.step import RowGroup
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.operands import Heads
from paceline.kernels.triton.backend import TritonKernels
from paceline.kernels.triton.rows import DeviceRows
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM

ROWS = (16, 32, 64, 128, *range(256, 2048, 256), *range(2048, 8193, 512))
"""Close together, because rows of padding are computed like others; captured when first needed."""
LOGIT_ROWS = (1, 8, 32, 128, 256, 512)


@dataclass(slots=True)
class _Captured:
    """A step with room for so many rows. Its inputs are filled before each replay."""

    rows: DeviceRows
    integers: torch.Tensor
    """Flat int64: tokens, positions for the rotary tables, slots of each cache group, rows that need logits."""
    logits: list[torch.Tensor]
    replay: Any


class MixedGraphs:
    """Runs steps without trees, taps or drafts."""

    def __init__(self, model: CausalLM, kernels: TritonKernels, storage: KVStorage, tables: Seq[np.ndarray],
                 graphs: Graphs) -> None:
        self._model = model
        self._kernels = kernels
        self._storage = storage
        self._graphs = graphs
        config = model.config
        self._heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._seats, width = tables[0].shape
        self._tables = [torch.zeros((self._seats, width), dtype=torch.int32, device=graphs.device) for _ in tables]
        self._captured: dict[tuple[int, int], _Captured] = {}

    def takes(self, groups: Seq[RowGroup], rows: int) -> bool:
        """Whether a step of these groups, which has so many rows, can be replayed."""
        if rows > ROWS[-1] or len(groups) > min(self._seats, LOGIT_ROWS[-1]):
            return False
        return all(group.draft is None and group.parents is None and group.logits_from >= len(group.tokens) - 1
                   for group in groups)

    @torch.inference_mode()
    def run(self, tokens: np.ndarray, layout: Layout, logit_rows: list[int]) -> torch.Tensor:
        """Logits [len(logit_rows), V] float32, overwritten by the next call. The layout's tensors lie on the host."""
        count, wanted = layout.rows, len(logit_rows)
        rows = next(size for size in ROWS if size >= count)
        logits = next(size for size in LOGIT_ROWS if size >= wanted)
        captured = self._captured.get((rows, logits))
        if captured is None:
            captured = self._captured[rows, logits] = self._capture(rows, logits)
        views = len(layout.views)
        integers = np.zeros((2 + views) * rows + logits, dtype=np.int64)
        by_row = integers[:(2 + views) * rows].reshape(2 + views, rows)
        by_row[0, :count] = tokens
        by_row[1, :count] = layout.positions.numpy()
        for slots, view in zip(by_row[2:], layout.views):
            slots[:count] = view.slots.numpy()
            slots[count:] = -1
        integers[(2 + views) * rows:][:wanted] = logit_rows
        captured.integers.copy_(torch.from_numpy(integers), non_blocking=True)
        captured.rows.fill(layout)
        for table, view in zip(self._tables, layout.views):
            groups, pages = view.tables.shape
            table[:groups, :pages].copy_(view.tables.to(torch.int32), non_blocking=True)
        captured.replay()
        return captured.logits[0][:wanted]

    def _capture(self, rows: int, logits: int) -> _Captured:
        storage, device = self._storage, self._graphs.device
        dtype = next(iter(storage.keys.values())).dtype
        shape = self._kernels.mixed_shape(rows, min(rows, self._seats), self._heads, dtype)
        place = DeviceRows.over(shape, torch.zeros(shape.size, dtype=torch.int32, device=device))
        place.group.fill_(-1)
        place.positions.fill_(-1)
        views = len(self._tables)
        integers = torch.zeros((2 + views) * rows + logits, dtype=torch.int64, device=device)
        integers[2 * rows:(2 + views) * rows] = -1
        out: list[torch.Tensor] = []

        def launch() -> None:
            out[:] = [self._step(rows, integers, place)]

        return _Captured(place, integers, out, self._graphs.capture(launch))

    def _step(self, rows: int, integers: torch.Tensor, place: DeviceRows) -> torch.Tensor:
        model, kernels, storage = self._model, self._kernels, self._storage
        views = len(self._tables)
        by_row = integers[:(2 + views) * rows].view(2 + views, rows)
        layout = Layout(by_row[1], [0, rows], [0], [None], storage.block_size,
                        [GroupView(table, by_row[2 + index], group.window)
                         for index, (table, group) in enumerate(zip(self._tables, model.cache_groups))], place)
        context = Forward(kernels, layout, storage.keys, storage.values, model.cache_groups,
                          key_scales=storage.key_scales, value_scales=storage.value_scales)
        hidden = model.forward(by_row[0], context)
        return model.logits(hidden.index_select(0, integers[(2 + views) * rows:]), kernels)
