"""MTP whose layer is one more of the target's own kind: latent attention, experts, whatever the architecture has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from paceline.errors import ModelFormatError
from paceline.kernels.device.head_rounds import DraftSlot
from paceline.kernels.groups import CacheGroup
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.models.decoder import Block, Decoder
from paceline.models.forward import Forward
from paceline.models.heads.base import BaseHead
from paceline.models.heads.chain import FEATURES
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.interface import Best, Draw, Opened, Pass, Plane, Planes, StoredRows
from paceline.models.heads.layer import load_norm
from paceline.models.heads.target import Target
from paceline.models.heads.tensors import MTP
from paceline.models.layers import Attention, load_linear
from paceline.models.mla import LatentAttention
from paceline.models.weight_source import WeightSource

KEYS, VALUES = "layers.0.keys", "layers.0.values"


class LayerNames:
    """WeightSource: the tensors of the MTP layer under the names of layer `layer` of the target."""

    def __init__(self, weights: WeightSource, layer: int) -> None:
        self._weights = weights
        self._prefix = f"model.layers.{layer}."
        self.taken: set[str] = set()

    def _named(self, name: str) -> str:
        return f"{MTP}.{name.removeprefix(self._prefix)}" if name.startswith(self._prefix) else name

    def has(self, name: str) -> bool:
        return self._weights.has(self._named(name))

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        self.taken.add(self._named(name))
        return self._weights.take(self._named(name), shape, dtype)


class TargetLayerHead(BaseHead):
    """As MtpHead, over a Block that the target's architecture builds."""

    def __init__(self, config: HeadConfig, weights: WeightSource, target: Target, target_ids: torch.Tensor | None,
                 max_model_len: int) -> None:
        super().__init__(config, weights, target, target_ids)
        if not isinstance(target, Decoder):
            raise ModelFormatError(f"The MTP layer of {target.config.model_type} runs beside a model in torch alone, "
                                   "held by one rank: use kernels='auto', and no tensor_parallel_size.")
        self.index = target.config.num_layers
        named = LayerNames(weights, self.index)
        self.block: Block = target.block(target.translated(named), self.index)
        self.taken = named.taken
        self.project = load_linear(weights, [f"{MTP}.input_proj"], [config.hidden_size], 2 * config.hidden_size, False)
        self.embed_norm, self.hidden_norm, self.norm = (
            load_norm(config, weights, f"{MTP}.{name}_layernorm") for name in ("token", "hidden", "final"))
        self.rope = target.rope
        latent = target.config.latent
        self.group = CacheGroup("mtp", (self.index,), config.num_kv_heads, config.head_dim,
                                latent=None if latent is None else latent.rank)
        self.capturable = not target.config.num_experts

    def planes(self, cache: torch.dtype, activations: torch.dtype) -> tuple[Plane, ...]:
        if cache.itemsize == 1:
            cache = activations if activations.itemsize == 2 else torch.float16
        names = (KEYS,) if self.group.latent is not None else (KEYS, VALUES)
        return (*(Plane(name, (self.group.kv_heads, self.group.head_dim), cache) for name in names),
                Plane(FEATURES, (1, self.config.hidden_size), activations))

    def passes(self, depth: int) -> tuple[Pass, ...]:
        return tuple(Pass(index, 1) for index in range(depth))

    def enter(self, tokens: torch.Tensor, feature: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        both = (kernels.norm(self.embed(tokens), self.embed_norm), kernels.norm(feature, self.hidden_norm))
        return self.project(torch.cat(both, dim=-1), kernels).contiguous()

    def context(self, layout: Layout, view: GroupView, planes: Planes, kernels: Kernels) -> Forward:
        keys = planes[KEYS]
        values = planes[VALUES] if self.group.latent is None else keys[..., :self.group.latent]
        return Forward(kernels, replace(layout, views=[view]), {self.index: keys}, {self.index: values}, (self.group,))

    def store(self, tapped: Mapping[int, torch.Tensor], rows: StoredRows, planes: Planes, kernels: Kernels) -> None:
        feature, slots = kernels.norm(tapped[self.config.taps[0]], self._target.norm), rows.view.slots
        kernels.store_keys(planes[FEATURES], slots, feature[:, None])
        before = planes[FEATURES].index_select(0, rows.before)[:, 0].to(feature.dtype)
        x, turned = self.enter(rows.tokens, before, kernels), self.rope.at(rows.layout.positions)
        attention, norm = self.block.attention, self.block.attention_norm
        if isinstance(attention, LatentAttention):
            kernels.store_keys(planes[KEYS], slots, attention.keys(kernels.norm(x, norm), kernels, *turned))
        elif isinstance(attention, Attention):
            cache = self.context(rows.layout, rows.view, planes, kernels).cache(self.index)
            kernels.project(x, norm, attention.qkv.weight, attention.qkv.bias, attention.heads, *turned, cache, slots)

    def open(self, opened: Opened, planes: Planes, kernels: Kernels) -> TargetLayerRound:
        return TargetLayerRound(self, opened, planes, kernels)


class TargetLayerRound:
    def __init__(self, head: TargetLayerHead, opened: Opened, planes: Planes, kernels: Kernels) -> None:
        self._head, self._planes, self._kernels = head, planes, kernels
        self._passes: Iterator[Layout] = iter(opened.passes)
        kept = planes[FEATURES].index_select(0, opened.before)[:, 0]
        self._feature = kept.to(head.embed(opened.anchors[:1]).dtype)

    def logits(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        head, layout, kernels = self._head, next(self._passes), self._kernels
        view = replace(layout.views[0], first=1, scratch={})
        x = head.enter(previous, self._feature, kernels)
        turned = head.rope.at(layout.positions)
        x = head.block(x, head.context(layout, view, self._planes, kernels), *turned)
        self._feature = kernels.norm(x, head.norm)
        return head.lm_head(self._feature, kernels).float().contiguous(), None

    def slot(self, previous: torch.Tensor) -> DraftSlot:
        return DraftSlot(self.logits(previous)[0])

    def chain(self, previous: Sequence[int], least: Sequence[float],
              draws: Sequence[Draw] = ()) -> list[Best] | None:
        return None

    def fork(self, lines: torch.Tensor, layout: Layout | None) -> None:
        assert layout is not None
        self._feature = self._feature.index_select(0, lines)
        self._passes = iter((layout,))
