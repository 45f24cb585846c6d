"""Forward: everything one pass needs besides the model, handed down as an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline.kernels.adapted import of_rows
from paceline.kernels.groups import CacheGroup
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.operands import KVCache


@dataclass(slots=True)
class Forward:
    """One pass over the rows of `layout`. keys and values hold each layer's cache [slots, kv_heads, head_dim], as
    KVStorage shows it; layout.views[i] belongs to groups[i]. key_scales and value_scales [slots, kv_heads] are there
    for 8-bit caches only.

    Taps: `tapped[i]` becomes the residual stream [N, h] that enters layer i, for i = number of layers the one that
    leaves the last layer, before the final norm.

    Skips: the sublayers in `skip`, (layer, "attn") or (layer, "mlp"), are passed by; a skipped attention stores
    neither keys nor values.

    `leaving` [R] int64: only these rows leave the last layer, in this order. The others' keys and values are stored; of
    a prompt nothing else of them is needed. Not together with skips.
    """

    kernels: Kernels
    layout: Layout
    keys: Mapping[int, torch.Tensor]
    values: Mapping[int, torch.Tensor]
    groups: Sequence[CacheGroup]
    taps: frozenset[int] = frozenset()
    tapped: dict[int, torch.Tensor] = field(default_factory=dict)
    skip: frozenset[tuple[int, str]] = frozenset()
    leaving: torch.Tensor | None = None
    key_scales: Mapping[int, torch.Tensor] = field(default_factory=dict)
    value_scales: Mapping[int, torch.Tensor] = field(default_factory=dict)
    _views: dict[int, GroupView] = field(init=False)

    def __post_init__(self) -> None:
        self._views = {layer: view for group, view in zip(self.groups, self.layout.views, strict=True)
                       for layer in (*group.layers, *(reader for reader, _ in group.readers))}

    def keep(self, rows: torch.Tensor) -> Kernels:
        """Only these rows [n] int64 go on from here: the kernels that know them."""
        self.kernels = of_rows(self.kernels, rows)
        return self.kernels

    def view(self, layer: int) -> GroupView:
        """The cache group of a layer as this step sees it."""
        return self._views[layer]

    def cache(self, layer: int) -> KVCache:
        return KVCache(self.keys[layer], self.values[layer], self.key_scales.get(layer), self.value_scales.get(layer))
