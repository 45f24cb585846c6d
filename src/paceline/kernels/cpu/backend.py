"""NativeKernels: linear layers and attention in native code, for models whose forward is written in torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels.cpu.library import require
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.operands import values_in_keys
from paceline.kernels.packed import OutlierWeight, PackedWeight, Weight
from paceline.kernels.reference import ReferenceKernels

Integers = npt.NDArray[np.int64]
CACHES = frozenset({torch.float32, torch.float16})


def attention_runs(head_dim: int, heads: int, kv_heads: int) -> bool:
    """Whether native attention knows heads of this shape."""
    return head_dim % 16 == 0 and 16 <= head_dim <= 256 and heads % kv_heads == 0 and heads // kv_heads <= 16


class NativeKernels(ReferenceKernels):
    """On the CPU, deterministic always. Packed weights and attention over float32 and float16 caches run in native
    code, activations of a packed product in int8 with a scale per 32 values; everything else is the reference's."""

    name = "native"

    def __init__(self, threads: int = 1, instruction_set: str = "") -> None:
        """`threads`: as many as there are cores at most. instruction_set "": the best one here."""
        self._workers = require().Workers(threads, instruction_set)

    @property
    def threads(self) -> int:
        return int(self._workers.threads)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(weight, OutlierWeight):
            aside = super().linear(x.float()[:, weight.columns], weight.values)
            product = aside + self._packed_product(x.index_fill(1, weight.columns, 0.0), weight)
        elif isinstance(weight, PackedWeight):
            product = self._packed_product(x, weight)
        else:
            return super().linear(x, weight, bias)
        return (product if bias is None else product + bias).to(x.dtype)

    def _packed_product(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        out = np.empty((x.shape[0], weight.matrix.rows), dtype=np.float32)
        self._workers.linear(weight.matrix, x.float().contiguous().numpy(), out)
        return torch.from_numpy(out)[:, :weight.shape[0]]

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, view: GroupView,
               scale: float, scales: tuple[torch.Tensor, torch.Tensor] | None = None,
               softcap: float = 0.0) -> torch.Tensor:
        known = not softcap and k_cache.dtype in CACHES and not values_in_keys(k_cache, v_cache)
        if not known or not attention_runs(q.shape[2], q.shape[1], k_cache.shape[1]):
            return super().attend(q, k_cache, v_cache, layout, view, scale, scales, softcap)
        step = view.scratch.get("native.step")
        if step is None:
            step = view.scratch["native.step"] = StepArrays.of(layout)
        queries = q.float().contiguous()
        out = torch.empty_like(queries)
        self._workers.attend(
            queries.numpy(), k_cache.numpy(), v_cache.numpy(), step.positions, step.offsets, step.starts, step.parents,
            layout.block_size, np.ascontiguousarray(view.tables.numpy()), view.slots.numpy(), view.window or 0, scale,
            out.numpy(), layout.mutual, view.first)
        return out.to(q.dtype)


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A layout as native code reads it."""

    positions: Integers
    offsets: Integers
    starts: Integers
    parents: Integers | None
    """None: chains only."""

    @staticmethod
    def of(layout: Layout) -> StepArrays:
        parents = None
        if any(tree is not None for tree in layout.parents):
            parents = np.concatenate([
                np.arange(-1, end - begin - 1) if tree is None else np.array(tree)
                for tree, begin, end in zip(layout.parents, layout.offsets, layout.offsets[1:])]).astype(np.int64)
        return StepArrays(layout.positions.numpy(), np.array(layout.offsets, dtype=np.int64),
                          np.array(layout.starts, dtype=np.int64), parents)
