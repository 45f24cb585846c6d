"""Decoder: the frame every architecture here fills: embed, pre-norm blocks with a residual stream, norm, head."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from paceline.errors import ModelFormatError
from paceline.kernels.groups import CacheGroup
from paceline.kernels.interface import Kernels
from paceline.kernels.operands import Norm
from paceline.kernels.packed import PackedWeight
from paceline.models.config import ModelConfig
from paceline.models.forward import Forward
from paceline.models.interface import WeightSource
from paceline.models.layers import AttentionLayer, FeedForward, Linear, load_matrix
from paceline.models.packing import PackingWeights
from paceline.models.rope import Rope


class Block:
    """x + attention(norm x), then + feed_forward(norm x)."""

    def __init__(self, attention_norm: Norm, attention: AttentionLayer, mlp_norm: Norm, mlp: FeedForward) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: torch.Tensor, context: Forward, cos: torch.Tensor, sin: torch.Tensor,
                 rows: torch.Tensor | None = None) -> torch.Tensor:
        """`rows`: those that are wanted, where not all are."""
        x = self.attention(x, self.attention_norm, context, cos, sin, rows)
        return self.mlp(x, self.mlp_norm, context.kernels)

    def reduced(self, x: torch.Tensor, context: Forward, cos: torch.Tensor, sin: torch.Tensor, attention: bool,
                mlp: bool) -> torch.Tensor:
        """The same with a part, or both, left out."""
        if attention:
            x = self.attention(x, self.attention_norm, context, cos, sin)
        return self.mlp(x, self.mlp_norm, context.kernels) if mlp else x


class Decoder(ABC):
    """Implements CausalLM. An architecture says what its attention and its feed-forward are made of."""

    def __init__(self, config: ModelConfig, weights: WeightSource, max_model_len: int) -> None:
        """Takes the tensors out of `weights`; positions up to max_model_len - 1 can be run."""
        if max_model_len < 1:
            raise ModelFormatError(f"max_model_len must be at least 1, got {max_model_len}.")
        self.config = config
        self.cache_groups = cache_groups(config)
        size, width = config.vocab_size, config.hidden_size
        self.embedding = load_matrix(weights, ["model.embed_tokens.weight"], [size], width)
        factors = None
        if config.rope.kind == "factors":
            factors = weights.take(ROPE_FACTORS, (config.rope.rotary_dim // 2,), torch.float32)
        self.rope = Rope(config, max_model_len, self.embedding.device, factors)
        self.blocks = [self._block(weights, layer) for layer in range(config.num_layers)]
        self.norm = Norm(weights.take("model.norm.weight", (config.hidden_size,)), config.norm_eps)
        tied = config.tie_word_embeddings
        self.head = Linear(self.embedding if tied else load_matrix(weights, ["lm_head.weight"], [size], width),
                           modules=[("lm_head", size)])
        self.bits = weights.bits if isinstance(weights, PackingWeights) else 16
        """Of a weight in the layers; 16 stands for floats of any kind. Below 16 it is made for NativeKernels."""

    @abstractmethod
    def attention(self, weights: WeightSource, layer: int) -> AttentionLayer:
        """The attention of one layer, built from its tensors."""

    @abstractmethod
    def feed_forward(self, weights: WeightSource, layer: int) -> FeedForward:
        """The feed-forward part of one layer, built from its tensors."""

    def linears(self) -> list[Linear]:
        """Those through which all rows of a step go, by calls of kernels with the weight itself: adapters can add to
        them. A sublayer that has such names them by a method of the same name."""
        parts = [part for block in self.blocks for part in (block.attention, block.mlp)]
        return [linear for part in parts for linear in getattr(part, "linears", list)()] + [self.head]

    def _block(self, weights: WeightSource, layer: int) -> Block:
        def norm(name: str) -> Norm:
            weight = weights.take(f"model.layers.{layer}.{name}.weight", (self.config.hidden_size,))
            return Norm(weight, self.config.norm_eps)

        return Block(norm("input_layernorm"), self.attention(weights, layer),
                     norm("post_attention_layernorm"), self.feed_forward(weights, layer))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.embedding, PackedWeight):
            return self.embedding.rows(token_ids)
        return F.embedding(token_ids, self.embedding)

    def layers(self, hidden: torch.Tensor, context: Forward, first: int = 0, last: int | None = None) -> torch.Tensor:
        end = len(self.blocks) if last is None else last
        cos, sin = self.rope.at(context.layout.positions)
        taps = context.taps
        for index in range(first, end):
            if index in taps:
                context.tapped[index] = hidden.clone()
            block = self.blocks[index]
            if context.skip:
                hidden = block.reduced(hidden, context, cos, sin, (index, "attn") not in context.skip,
                                       (index, "mlp") not in context.skip)
            else:
                hidden = block(hidden, context, cos, sin, context.leaving if index + 1 == len(self.blocks) else None)
        if end == len(self.blocks) and end in taps:
            context.tapped[end] = hidden
        return hidden

    def logits(self, hidden: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return kernels.head(hidden, self.norm, self.head.weight, self.head.bias)

    def forward(self, token_ids: torch.Tensor, context: Forward) -> torch.Tensor:
        return self.layers(self.embed(token_ids), context)


ROPE_FACTORS = "rope_freqs.weight"
"""GGUF files of models with scaled rotary positions carry the divisors of their frequencies as this tensor."""


def cache_groups(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Layers with the same window share a block table; full attention first."""
    windows = sorted(set(config.windows), key=lambda window: window or 0)
    return tuple(
        CacheGroup(name="full" if window is None else f"window-{window}",
                   layers=tuple(layer for layer, own in enumerate(config.windows)
                                if own == window and config.kv_source(layer) == layer),
                   kv_heads=config.num_kv_heads, head_dim=config.head_dim, window=window,
                   latent=None if config.latent is None else config.latent.rank,
                   readers=tuple((layer, config.kv_source(layer)) for layer, own in enumerate(config.windows)
                                 if own == window and config.kv_source(layer) != layer))
        for window in windows)
