"""Forward: everything one pass needs besides the model, handed down as an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline.kernels.groups import CacheGroup
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout


@dataclass(slots=True)
class Forward:
    """One pass over the rows of `layout`. keys and values hold each layer's cache [slots, kv_heads, head_dim];
    layout.views[i] belongs to groups[i]. key_scales and value_scales [slots, kv_heads] are there for int8 caches only,
    which only the native decoder runs.

    Taps: `tapped[i]` becomes the residual stream [N, h] that enters layer i, for i = number of layers the one that
    leaves the last layer, before the final norm.

    Skips: the sublayers in `skip`, (layer, "attn") or (layer, "mlp"), are passed by; a skipped attention stores
    neither keys nor values.
    """

    kernels: Kernels
    layout: Layout
    keys: Mapping[int, torch.Tensor]
    values: Mapping[int, torch.Tensor]
    groups: Sequence[CacheGroup]
    taps: frozenset[int] = frozenset()
    tapped: dict[int, torch.Tensor] = field(default_factory=dict)
    skip: frozenset[tuple[int, str]] = frozenset()
    key_scales: Mapping[int, torch.Tensor] = field(default_factory=dict)
    value_scales: Mapping[int, torch.Tensor] = field(default_factory=dict)
    _views: dict[int, GroupView] = field(init=False)

    def __post_init__(self) -> None:
        self._views = {layer: view for group, view in zip(self.groups, self.layout.views, strict=True)
                       for layer in group.layers}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Store the rows' keys and values [N, H_kv, d] in the layer's cache, then attend with q [N, H, d]."""
        view = self._views[layer]
        keys, values = self.keys[layer], self.values[layer]
        self.kernels.store(keys, values, view.slots, k, v)
        return self.kernels.attend(q, keys, values, self.layout, view, scale)
