"""ChainHead: EAGLE-1, EAGLE-3 and MTP, which draft one token a pass, each pass fed with what the one before gave.

Of every token two things are kept: its feature, made of the target's hidden states, and keys and values of the one
layer, made of the feature of the token BEFORE it and of the token itself. So a text's first token has no entry: no row
looks at it (GroupView.first).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from paceline.kernels.device.head_rounds import DraftSlot
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import Layout
from paceline.kernels.operands import Norm
from paceline.models.heads.base import BaseHead
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.further import linear
from paceline.models.heads.interface import Best, Draw, Opened, Pass, Plane, Planes, StoredRows
from paceline.models.heads.layer import DraftLayer, context_rows, key_planes, load_norm, load_rope
from paceline.models.heads.target import Target
from paceline.models.heads.tensors import MTP
from paceline.models.layers import load_linear
from paceline.models.weight_source import WeightSource

FEATURES = "features"


class ChainHead(BaseHead):
    prefix = "layers.0"
    reads_further = True
    inputs = 1
    """Streams that queries, keys and values are made of."""
    head_norm: Norm | None = None
    """Between the feature for the next pass and the target's head."""

    def __init__(self, config: HeadConfig, weights: WeightSource, target: Target, target_ids: torch.Tensor | None,
                 max_model_len: int) -> None:
        super().__init__(config, weights, target, target_ids)
        self.layer = DraftLayer(config, weights, self.prefix, 0, self.inputs)
        self.context = context_rows(config, weights, [self.prefix], [self.layer], self.inputs)
        self.rope = load_rope(config, max_model_len, self.device)

    @abstractmethod
    def feature(self, tapped: Mapping[int, torch.Tensor], kernels: Kernels) -> torch.Tensor:
        """What is kept of the target's rows: [N, h]."""

    @abstractmethod
    def enter(self, tokens: torch.Tensor, feature: torch.Tensor,
              kernels: Kernels) -> tuple[torch.Tensor, Norm | None, torch.Tensor]:
        """Tokens [N] and the features before them [N, h] -> what attention reads, a norm that it reads it through, and
        the stream that goes past it."""

    @abstractmethod
    def leave(self, x: torch.Tensor, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """What leaves the layer -> the feature for the next pass, and logits."""

    def planes(self, cache: torch.dtype, activations: torch.dtype) -> tuple[Plane, ...]:
        return (*key_planes(self.config, cache, activations),
                Plane(FEATURES, (1, self.config.hidden_size), activations))

    def passes(self, depth: int) -> tuple[Pass, ...]:
        return tuple(Pass(index, 1) for index in range(depth))

    def store(self, tapped: Mapping[int, torch.Tensor], rows: StoredRows, planes: Planes, kernels: Kernels) -> None:
        feature, slots = self.feature(tapped, kernels), rows.view.slots
        kernels.store_keys(planes[FEATURES], slots, feature[:, None])
        # After storing: the token before may be a row of this very step.
        before = self.kept(planes, rows.before, feature.dtype)
        x, norm, _ = self.enter(rows.tokens, before, kernels)
        kv = self.context(kernels.norm(x, norm), kernels)
        self.layer.keep(kv, self.rope.at(rows.layout.positions), slots, planes, kernels)

    def kept(self, planes: Planes, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return planes[FEATURES].index_select(0, slots)[:, 0].to(dtype)

    def open(self, opened: Opened, planes: Planes, kernels: Kernels) -> ChainRound:
        return ChainRound(self, opened, planes, kernels)


class ChainRound:
    def __init__(self, head: ChainHead, opened: Opened, planes: Planes, kernels: Kernels) -> None:
        self._head, self._planes, self._kernels = head, planes, kernels
        self._passes: Iterator[Layout] = iter(opened.passes)
        self._feature: torch.Tensor | None = None
        self._before = opened.before
        self._further = opened.further

    def logits(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        head, layout = self._head, next(self._passes)
        view = replace(layout.views[0], first=1, scratch={})
        feature = self._feature
        if feature is None:
            feature = head.kept(self._planes, self._before, head.embed(previous).dtype)
        x, norm, onto = head.enter(previous, feature, self._kernels)
        x = head.layer(x, norm, onto, layout, view, head.rope.at(layout.positions), self._planes, self._kernels)
        self._feature, logits = head.leave(x, self._kernels)
        if self._further is not None:
            read = self._kernels.norm(self._feature, head.head_norm)[:, None]
            more = self._further.logits(read.numpy(), linear(self._kernels))
            logits = torch.cat((logits, torch.from_numpy(more[:, 0])), dim=-1)
        return logits, None

    def slot(self, previous: torch.Tensor) -> DraftSlot:
        return DraftSlot(self.logits(previous)[0])

    def chain(self, previous: Sequence[int], least: Sequence[float],
              draws: Sequence[Draw] = ()) -> list[Best] | None:
        return None

    def fork(self, lines: torch.Tensor, layout: Layout | None) -> None:
        assert self._feature is not None and layout is not None
        self._feature = self._feature.index_select(0, lines)
        self._further = None if self._further is None else self._further.fork(lines.tolist())
        self._passes = iter((layout,))


class Eagle3Head(ChainHead):
    """The feature: fc over several streams of the target. The layer reads norm(embedding) and norm(feature) side by
    side; what goes past it is the feature. Later passes read the layer's own output."""

    inputs = 2

    def __init__(self, config: HeadConfig, weights: WeightSource, target: Target, target_ids: torch.Tensor | None,
                 max_model_len: int) -> None:
        super().__init__(config, weights, target, target_ids, max_model_len)
        wide = len(config.taps) * config.hidden_size
        self.input_norm = load_norm(config, weights, "input_norm", wide) if config.norm_before_fc else None
        self.fc = load_linear(weights, ["fc"], [config.hidden_size], wide, config.fc_bias)
        self.embed_norm = load_norm(config, weights, "layers.0.input_layernorm")
        self.hidden_norm = load_norm(config, weights, "layers.0.hidden_norm")
        self.head_norm = self.norm = load_norm(config, weights, "norm")

    def feature(self, tapped: Mapping[int, torch.Tensor], kernels: Kernels) -> torch.Tensor:
        streams = torch.cat([tapped[tap] for tap in self.config.taps], dim=-1)
        return self.fc(kernels.norm(streams, self.input_norm), kernels).contiguous()

    def enter(self, tokens: torch.Tensor, feature: torch.Tensor,
              kernels: Kernels) -> tuple[torch.Tensor, Norm | None, torch.Tensor]:
        normed = kernels.norm(feature, self.hidden_norm)
        x = torch.cat((kernels.norm(self.embed(tokens), self.embed_norm), normed), dim=-1)
        return x, None, normed if self.config.norm_before_residual else feature

    def leave(self, x: torch.Tensor, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        return x, kernels.head(x, self.norm, self.lm_head.weight, self.lm_head.bias)


class Eagle1Head(ChainHead):
    """The feature: what the target's head reads. fc over embedding and feature, a layer without its first norm, and the
    target's head on what leaves it, which is the next feature."""

    def __init__(self, config: HeadConfig, weights: WeightSource, target: Target, target_ids: torch.Tensor | None,
                 max_model_len: int) -> None:
        super().__init__(config, weights, target, target_ids, max_model_len)
        self.fc = load_linear(weights, ["fc"], [config.hidden_size], 2 * config.hidden_size, config.fc_bias)

    def feature(self, tapped: Mapping[int, torch.Tensor], kernels: Kernels) -> torch.Tensor:
        return kernels.norm(tapped[self.config.taps[0]], self._target.norm)

    def enter(self, tokens: torch.Tensor, feature: torch.Tensor,
              kernels: Kernels) -> tuple[torch.Tensor, Norm | None, torch.Tensor]:
        x = self.fc(torch.cat((self.embed(tokens), feature), dim=-1), kernels).contiguous()
        return x, None, x

    def leave(self, x: torch.Tensor, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.lm_head(x, kernels).float().contiguous()


class MtpHead(ChainHead):
    """The feature: what the target's head reads. A projection of norm(embedding) and norm(feature), a whole decoder
    layer, a norm; its output is the next feature, and the target's head reads it."""

    prefix = MTP

    def __init__(self, config: HeadConfig, weights: WeightSource, target: Target, target_ids: torch.Tensor | None,
                 max_model_len: int) -> None:
        super().__init__(config, weights, target, target_ids, max_model_len)
        self.project = load_linear(weights, [f"{MTP}.input_proj"], [config.hidden_size], 2 * config.hidden_size, False)
        self.embed_norm, self.hidden_norm, self.input_norm, self.norm = (
            load_norm(config, weights, f"{MTP}.{name}_layernorm") for name in ("token", "hidden", "input", "final"))

    def feature(self, tapped: Mapping[int, torch.Tensor], kernels: Kernels) -> torch.Tensor:
        return kernels.norm(tapped[self.config.taps[0]], self._target.norm)

    def enter(self, tokens: torch.Tensor, feature: torch.Tensor,
              kernels: Kernels) -> tuple[torch.Tensor, Norm | None, torch.Tensor]:
        both = (kernels.norm(self.embed(tokens), self.embed_norm), kernels.norm(feature, self.hidden_norm))
        x = self.project(torch.cat(both, dim=-1), kernels).contiguous()
        return x, self.input_norm, x

    def leave(self, x: torch.Tensor, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        feature = kernels.norm(x, self.norm)
        return feature, self.lm_head(feature, kernels).float().contiguous()
