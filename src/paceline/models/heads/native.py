"""NativeLayers: the decoder layers of a head in one native call, where its matrices are packed.

Layer by layer in torch, what is not a product takes as long as the products: a head has few layers, and drafts for a
model that takes no more than some milliseconds a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels import cpu
from paceline.kernels.cpu.backend import CACHES, NativeKernels, StepArrays, attention_runs
from paceline.kernels.layout import Layout
from paceline.kernels.operands import Norm
from paceline.kernels.packed import OutlierWeight, PackedWeight, Weight
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.interface import Planes
from paceline.models.heads.layer import DraftLayer
from paceline.models.layers import Linear
from paceline.models.rope import Rope

NOTHING = np.zeros(0, dtype=np.float32)
NAMES = {torch.float32: "float32", torch.float16: "float16"}


class NativeLayers:
    """The layers of a head that reads its own stream (BlockHead), with the norms before their attention; `mix`, which
    makes one stream of the target's hidden states, `context`, which makes all keys and values of that, normed, and
    `last_norm`, which a head reads what leaves the layers through."""

    def __init__(self, config: HeadConfig, layers: Sequence[DraftLayer], norms: Sequence[Norm], mix: Linear,
                 context: Linear, context_norm: Norm, last_norm: Norm, rope: Rope) -> None:
        self._config = config
        self._layers, self._norms, self._rope = layers, norms, rope
        self._mix, self._context = _packed(mix.weight), _packed(context.weight)
        self._context_norm, self._last_norm = _array(context_norm.weight), _array(last_norm.weight)
        self._models: dict[tuple[int, torch.dtype], Any] = {}
        self._bound: dict[int, Planes] = {}
        """What each is bound to; kept, so that no others can lie where these did."""

    @staticmethod
    def fits(config: HeadConfig, layers: Sequence[DraftLayer], mix: Linear, context: Linear) -> bool:
        """Whether native code knows layers of this shape, packed as they are."""
        weights = [one.weight for one in (mix, context)]
        weights += [one.weight for layer in layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        return (all(isinstance(weight, PackedWeight) and not isinstance(weight, OutlierWeight) for weight in weights)
                and not any(width % 32 for width in widths) and config.num_kv_heads * config.head_dim % 8 == 0
                and attention_runs(config.head_dim, config.num_heads, config.num_kv_heads))

    def takes(self, planes: Planes) -> bool:
        return planes["layers.0.keys"].dtype in CACHES

    def run(self, x: npt.NDArray[np.float32], layout: Layout, planes: Planes, kernels: NativeKernels) -> None:
        """All layers on the rows [N, h] of a pass, in place."""
        step, view = StepArrays.of(layout), layout.views[0]
        self._model(planes, kernels).run(
            x, step.positions, step.offsets, step.starts, step.parents, layout.block_size,
            [np.ascontiguousarray(view.tables.numpy())], [view.slots.numpy()], [view.window or 0], 0,
            len(self._layers), mutual=layout.mutual)

    def logits(self, x: npt.NDArray[np.float32], lm_head: Linear, planes: Planes,
               kernels: NativeKernels) -> torch.Tensor | None:
        """[N, h], normed, through a head: [N, V] float32; None: not with a head like this one."""
        weight = lm_head.weight
        if not isinstance(weight, PackedWeight) or isinstance(weight, OutlierWeight) or lm_head.bias is not None:
            return None
        return torch.from_numpy(self.product(x, weight, planes, kernels))

    def product(self, x: npt.NDArray[np.float32], weight: PackedWeight, planes: Planes,
                kernels: NativeKernels) -> npt.NDArray[np.float32]:
        """[N, h], normed, times rows of 8 bits: [N, V]."""
        out = np.empty((x.shape[0], weight.matrix.rows), dtype=np.float32)
        self._model(planes, kernels).head(weight.matrix, self._last_norm, x, out)
        return out[:, :weight.shape[0]]

    def keep(self, tapped: Sequence[torch.Tensor], positions: torch.Tensor, slots: torch.Tensor, planes: Planes,
             kernels: NativeKernels) -> None:
        """Store keys and values of rows of which the target's hidden states are `tapped`, [N, h] float32 each."""
        self._model(planes, kernels).keep(self._mix.matrix, self._context.matrix, self._context_norm,
                                          [one.contiguous().numpy() for one in tapped], positions.numpy(),
                                          slots.numpy())

    def _model(self, planes: Planes, kernels: NativeKernels) -> Any:
        """For as many threads as the kernels have, bound to these planes."""
        keys = planes["layers.0.keys"]
        key = (kernels.threads, keys.dtype)
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = self._made(kernels.threads, keys.dtype)
        if self._bound.get(id(model)) is not planes:
            model.bind_cache(*([planes[f"layers.{layer.index}.{part}"] for layer in self._layers]
                               for part in ("keys", "values")), [], [])
            self._bound[id(model)] = planes
        return model

    def _made(self, threads: int, cache: torch.dtype) -> Any:
        config, (cos, sin) = self._config, self._rope.halves()
        model = cpu.require().Model(
            hidden=config.hidden_size, heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            intermediate=config.intermediate_size, eps=config.norm_eps, cache=NAMES[cache], kernels="", threads=threads,
            cos=cos.numpy(), sin=sin.numpy())
        for layer, norm in zip(self._layers, self._norms):
            heads = layer.heads
            model.add_layer(
                _array(norm.weight), _array(layer.mlp_norm.weight),
                *(_packed(one.weight).matrix for one in (layer.qkv, layer.out, layer.gate_up, layer.down)), 0,
                NOTHING if layer.qkv.bias is None else _array(layer.qkv.bias),
                NOTHING if heads.query_norm is None else _array(heads.query_norm.weight),
                NOTHING if heads.key_norm is None else _array(heads.key_norm.weight))
        return model


def _packed(weight: Weight) -> PackedWeight:
    assert isinstance(weight, PackedWeight)
    return weight


def _array(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(tensor.float().numpy())
