"""TritonKernels: the CUDA backend. What each op promises is on Kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.kernels.composed import Composed
from paceline.kernels.eager import EagerKernels
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.low_rank import LowRankSlots, RowSlots
from paceline.kernels.operands import Heads, KVCache, Norm, values_in_keys
from paceline.kernels.packed import Weight, plain, whole_rows
from paceline.kernels.triton import attention, elementwise, latent, linear, low_rank, vendor
from paceline.kernels.triton.attention import Tuning, tuning
from paceline.kernels.triton.choices import LOW_TILES, NORM_INSIDE, SKINNY_ROWS, Product, Way, choose, vendor_above
from paceline.kernels.triton.device import TritonDevice
from paceline.kernels.triton.vendor import ComparedShapes

COUNTERS = 1 << 18
"""Tiles of one launch that several programs may share: tiles of a product, items of attention times KV heads."""


class TritonKernels(Composed):
    """Few launches, all of them fit to be captured in a graph: no op waits for the host or asks it for sizes that
    depend on data. Rows whose slot is -1 and rows outside all tiles are padding: nothing of theirs is written to a
    cache, and what they return means nothing.

    deterministic: every sum of a row is added in the same order, however many rows come with it."""

    device: TritonDevice

    def __init__(self, deterministic: bool, device: torch.device) -> None:
        self.deterministic = deterministic
        self.name = "triton-deterministic" if deterministic else "triton"
        self._eager = EagerKernels()
        """For what has no kernel here."""
        self._processors, self._low = 4, True
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._low = torch.cuda.get_device_capability(device) in LOW_TILES
        self.device = TritonDevice(deterministic, self._processors)
        # Programs that share a tile count themselves here. All zero between launches, hence made before any capture.
        self._arrived = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self._compared = ComparedShapes(self._arrived)

    def _size(self, weight: torch.Tensor, gated: bool) -> int:
        """Outputs by which a product is chosen: exact sums are those of the whole matrix, whoever holds this part."""
        rows = whole_rows(weight) if self.deterministic else weight.shape[0]
        return rows // 2 if gated else rows

    def _how(self, x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> Product:
        size = self._size(weight, gated)
        return choose(x.shape[0], size, x.shape[1], x.dtype, self.deterministic, gated, self._low)

    def _by_vendor(self, x: torch.Tensor, weight: torch.Tensor, how: Product, dtype: torch.dtype | None = None,
                   gated: bool = False) -> bool:
        if how.way is Way.VENDOR:
            return True
        size = self._size(weight, gated)
        many = self.deterministic and x.shape[0] > vendor_above(size, x.shape[1], gated)
        return many and self._compared.same(x, weight, how, dtype or x.dtype)

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: Product, *,
                 norm: Norm | None = None, gated: bool = False, residual: torch.Tensor | None = None,
                 dtype: torch.dtype | None = None) -> torch.Tensor:
        return linear.product(x, weight, bias, how, self._arrived, norm=norm, gated=gated, residual=residual,
                              dtype=dtype, exact=self.deterministic)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        matrix = plain(weight)
        return self._linear(x, matrix, bias, self._how(x, matrix))

    def gate_up(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        matrix = plain(weight)
        return self._linear(x, matrix, bias, self._how(x, matrix, gated=True))

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: Product) -> torch.Tensor:
        if self._by_vendor(x, weight, how):
            return self._vendor(x, weight, bias, how)
        return self._product(x, weight, bias, how)

    def _vendor(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: Product) -> torch.Tensor:
        if not self.deterministic:
            return vendor.linear(x, weight, bias)
        out = vendor.in_pieces(x, weight, how.piece, x.dtype)
        return out if bias is None else out.add_(bias)

    def add_low_rank(self, out: torch.Tensor, x: torch.Tensor, low: LowRankSlots, rows: RowSlots) -> torch.Tensor:
        return low_rank.add(out, x, low, rows.slots)

    def linear_by_head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.deterministic or x.shape[0] <= SKINNY_ROWS:
            return latent.linear_by_head(x, weight, not self.deterministic)
        return self._eager.linear_by_head(x, weight)

    def linear_add(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None,
                   residual: torch.Tensor) -> torch.Tensor:
        matrix = plain(weight)
        how = self._how(x, matrix)
        if not self._by_vendor(x, matrix, how):
            return self._product(x, matrix, bias, how, residual=residual)
        if not self.deterministic:
            return vendor.linear_add(x, matrix, bias, residual)
        if bias is not None:
            return residual.add_(self._vendor(x, matrix, bias, how))
        return vendor.in_pieces(x, matrix, how.piece, x.dtype, residual)

    def gated(self, x: torch.Tensor, norm: Norm | None, weight: Weight, bias: torch.Tensor | None,
              activation: str = "silu") -> torch.Tensor:
        matrix = plain(weight)
        if activation != "silu":  # the one that products have inside
            return super().gated(x, norm, matrix, bias, activation)
        how = self._how(x, matrix, gated=True)
        if self._by_vendor(x, matrix, how, gated=True):
            return super().gated(x, norm, matrix, bias, activation)
        return self._normed(x, norm, matrix, bias, how, gated=True)

    def head(self, x: torch.Tensor, norm: Norm, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        matrix = plain(weight)
        how = self._how(x, matrix)
        if self._by_vendor(x, matrix, how, torch.float32):
            out = vendor.in_pieces(self.norm(x, norm), matrix, how.piece, torch.float32)
            return out if bias is None else out.add_(bias)
        return self._normed(x, norm, matrix, bias, how, dtype=torch.float32)

    def _normed(self, x: torch.Tensor, norm: Norm | None, weight: torch.Tensor, bias: torch.Tensor | None,
                how: Product, *, gated: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A product of ours after a norm, which a single short row gets inside it."""
        if norm is not None and (how.way is not Way.ROW or x.shape[1] > NORM_INSIDE or norm.centred):
            x, norm = self.norm(x, norm), None
        return self._product(x, weight, bias, how, norm=norm, gated=gated, dtype=dtype)

    def project(self, x: torch.Tensor, norm: Norm | None, weight: Weight, bias: torch.Tensor | None, heads: Heads,
                cos: torch.Tensor, sin: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
        matrix = plain(weight)
        how = self._how(x, matrix)
        if how.way is Way.ROW:
            simple = heads.query_norm is None and cache.scales is None and elementwise.turns_whole_heads(heads, cos)
            if not simple:
                return self.rotate_and_store(self._normed(x, norm, matrix, bias, how), heads, cos, sin, cache, slots)
            inside = norm if norm is not None and not norm.centred and x.shape[1] <= NORM_INSIDE else None
            normed = x if inside is not None else self.norm(x, norm)
            return linear.project_row(normed, inside, matrix, bias, heads, cos, sin, cache, slots, how)
        return super().project(x, norm, matrix, bias, heads, cos, sin, cache, slots)

    def rotate_and_store(self, qkv: torch.Tensor, heads: Heads, cos: torch.Tensor, sin: torch.Tensor, cache: KVCache,
                         slots: torch.Tensor) -> torch.Tensor:
        query_norm, key_norm = heads.query_norm, heads.key_norm
        if not heads.normed_apart and query_norm is not None and key_norm is not None and heads.query and heads.keys:
            # Normed first and turned by the kernel of heads without norms: that is what a rank does whose heads were
            # normed with those of other ranks, and its bits have to be these.
            whole = qkv.view(qkv.shape[0], -1, heads.dim)
            q, k, v = torch.split(whole, [heads.query, heads.keys, heads.keys], dim=1)
            qkv = torch.cat((self._norm_heads(q, query_norm), self._norm_heads(k, key_norm), v), dim=1).flatten(1)
            heads = replace(heads, query_norm=None, key_norm=None)
        if not elementwise.turns_whole_heads(heads, cos):
            return super().rotate_and_store(qkv, heads, cos, sin, cache, slots)
        return elementwise.rotate_and_store(qkv, heads, cos, sin, cache, slots, fused=not self.deterministic)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return elementwise.layer_norm(x, weight, bias, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return elementwise.silu_mul(gate_up)

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return elementwise.activate(x, activation)

    rotate = EagerKernels.rotate
    route = EagerKernels.route

    def store(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor,
              v: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        elementwise.store(k_cache, v_cache, slots, k, v, scales)

    def store_keys(self, k_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor) -> None:
        latent.store(k_cache, slots, k)

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, view: GroupView,
               scale: float, scales: tuple[torch.Tensor, torch.Tensor] | None = None,
               softcap: float = 0.0) -> torch.Tensor:
        if values_in_keys(k_cache, v_cache):
            return latent.attend(q, k_cache, v_cache.shape[2], layout, view, scale, softcap, not self.deterministic,
                                 self._processors)
        return attention.attend(q, k_cache, v_cache, layout, view, scale, scales, self.tuning(q.dtype, q.shape[2]),
                                self.deterministic, self._arrived, softcap, self._low)

    def tuning(self, dtype: torch.dtype, dim: int) -> Tuning:
        return tuning(dtype, dim, self.deterministic, self._processors)
