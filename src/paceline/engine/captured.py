"""What captured steps of rows that the host lays out have in common: room for their rows, their block tables on the
device, and the forward over both."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from paceline.cache.storage import KVStorage
from paceline.engine.seats import send
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.operands import Heads
from paceline.kernels.triton.backend import TritonKernels
from paceline.kernels.triton.rows import DeviceRows, RowsShape
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM, activations

Inputs = TypeVar("Inputs")


@dataclass(slots=True)
class Captured(Generic[Inputs]):
    """A step with room for so many rows."""

    rows: DeviceRows
    inputs: Inputs
    """What it reads besides its rows, filled before each replay."""
    out: list[torch.Tensor]
    """Logits, or what was drawn from them."""
    replay: Callable[[], None]


class CapturedForward:
    """One model over one cache. One stream at a time: its tables are those of the step that was filled in last."""

    def __init__(self, model: CausalLM, kernels: TritonKernels, storage: KVStorage, tables: Seq[np.ndarray],
                 device: torch.device) -> None:
        """`tables`: the cache's block tables by seat."""
        self.model = model
        self.kernels = kernels
        self.storage = storage
        config = model.config
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.dtype = activations(model, device)
        self.device = device
        self.most_groups, width = tables[0].shape
        self.longest = width * storage.block_size
        """Tokens of a text that the block tables have room for."""
        self._tables = [torch.zeros((self.most_groups, width), dtype=torch.int32, device=device) for _ in tables]

    @property
    def views(self) -> int:
        """Cache groups, each with slots of its own."""
        return len(self._tables)

    def room(self, shape: RowsShape) -> DeviceRows:
        """Rows that are all padding."""
        rows = DeviceRows.over(shape, torch.zeros(shape.size, dtype=torch.int32, device=self.device))
        rows.group.fill_(-1)
        rows.positions.fill_(-1)
        return rows

    def fill(self, rows: DeviceRows, layout: Layout) -> None:
        """Send what attention reads of a step."""
        send(rows.shape.pack(layout), rows.data)
        for table, view in zip(self._tables, layout.views):
            groups, pages = view.tables.shape
            send(view.tables.numpy().astype(np.int32), table[:groups, :pages])

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, slots: Seq[torch.Tensor], rows: DeviceRows,
               leaving: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of all rows, or of those in `leaving`."""
        model, storage = self.model, self.storage
        layout = Layout(positions, [0, len(tokens)], [0], [None], storage.block_size,
                        [GroupView(table, own, group.window)
                         for own, table, group in zip(slots, self._tables, model.cache_groups)], rows)
        return model.forward(tokens, Forward(
            self.kernels, layout, storage.keys, storage.values, model.cache_groups, leaving=leaving,
            key_scales=storage.key_scales, value_scales=storage.value_scales))
