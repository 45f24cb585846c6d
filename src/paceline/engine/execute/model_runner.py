"""ModelRunner: a model over a cache, run kernel by kernel: what every device can do."""

from __future__ import annotations

import torch

from paceline.cache.storage import KVStorage
from paceline.engine.execute.target_heads import TargetHeads, no_heads
from paceline.engine.rows.batch import Batch, StepLogits
from paceline.kernels.adapted import adapted
from paceline.kernels.interface import Kernels
from paceline.kernels.low_rank import AdapterSlots
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM


class ModelRunner:
    def __init__(self, model: CausalLM, kernels: Kernels, storage: KVStorage, device: torch.device,
                 adapters: AdapterSlots, heads: TargetHeads | None = None) -> None:
        """`heads`: those that keep something of every row that runs here."""
        self.model = model
        self.kernels = kernels
        self.storage = storage
        self.device = device
        self.adapters = adapters
        self.heads = heads or no_heads(storage, kernels)

    def run_batch(self, batch: Batch, taps: frozenset[int] = frozenset()) -> StepLogits:
        """All of a batch, which has no pending tokens. `taps`: layers whose hidden states are wanted."""
        self.storage.apply(batch.moves, batch.copies)
        return self.forward(batch, taps)

    @torch.inference_mode()
    def forward(self, batch: Batch, taps: frozenset[int] = frozenset()) -> StepLogits:
        """Its rows alone: moves and copies have been carried out."""
        layout, storage, wanted = self.on_device(batch).layout, self.storage, batch.wanted
        slots = None if batch.adapters is None else torch.from_numpy(batch.adapters).to(self.device, non_blocking=True)
        context = Forward(adapted(self.kernels, self.adapters, slots), layout, storage.keys, storage.values,
                          self.model.cache_groups, taps | self.heads.taps, key_scales=storage.key_scales,
                          value_scales=storage.value_scales)
        tokens = torch.from_numpy(batch.tokens).to(self.device, non_blocking=True)
        hidden = self.model.forward(tokens, context)
        self.heads.store(tokens, context)
        if len(wanted) < layout.rows:
            rows = torch.tensor(wanted, dtype=torch.int64, device=self.device)
            hidden = hidden[rows]
            context.keep(rows)
        return StepLogits(self.model.logits(hidden, context.kernels), batch.first,
                          {tap: context.tapped[tap] for tap in taps})

    def on_device(self, batch: Batch) -> Batch:
        """The same batch, its layout's tensors moved to where the model runs."""
        if self.device.type != "cpu":
            layout = batch.layout
            layout.positions = layout.positions.to(self.device, non_blocking=True)
            for view in layout.views:
                view.tables = view.tables.to(self.device, non_blocking=True)
                view.slots = view.slots.to(self.device, non_blocking=True)
        return batch
