"""Gemma 2 and 3 (text): norms on both sides of a sublayer, scaled embeddings, windows in most layers."""

from __future__ import annotations

import math

import torch

from paceline.kernels.operands import Norm
from paceline.models.decoder import Block, Decoder
from paceline.models.layers import Attention, GatedMLP
from paceline.models.translate import translate
from paceline.models.weight_source import WeightSource

TEXT_PARTS = ("model.", "language_model.model.", "model.language_model.")
"""Where a checkpoint has its text model; the last two beside a vision model."""


class Gemma2(Decoder):
    @property
    def embedding_factor(self) -> float:
        return math.sqrt(self.config.hidden_size)

    def translated(self, weights: WeightSource) -> WeightSource:
        return translate(weights, {"model.": ""}, prefixes=TEXT_PARTS)

    def load_norm(self, weights: WeightSource, name: str, size: int | None = None) -> Norm:
        """Stored as the distance from one (but in GGUF files), and not rounded after that is added."""
        stored = weights.take(f"{name}.weight", (size or self.config.hidden_size,), torch.float32)
        return Norm(stored + self.config.norm_offset, self.config.norm_eps)

    def block(self, weights: WeightSource, layer: int) -> Block:
        prefix = f"model.layers.{layer}"
        return Block(self.load_norm(weights, f"{prefix}.input_layernorm"), self.attention(weights, layer),
                     self.load_norm(weights, f"{prefix}.pre_feedforward_layernorm"), self.feed_forward(weights, layer))

    def attention(self, weights: WeightSource, layer: int) -> Attention:
        bias = self.config.attention_bias
        after = self.load_norm(weights, f"model.layers.{layer}.post_attention_layernorm")
        return Attention(self.config, weights, layer, qkv_bias=bias, out_bias=bias, after=after)

    def feed_forward(self, weights: WeightSource, layer: int) -> GatedMLP:
        prefix = f"model.layers.{layer}"
        return GatedMLP(self.config, weights, f"{prefix}.mlp",
                        after=self.load_norm(weights, f"{prefix}.post_feedforward_layernorm"))


class Gemma3(Gemma2):
    """Each head's queries and keys are normed as well; layers with a window rotate by a theta of their own."""

    def attention(self, weights: WeightSource, layer: int) -> Attention:
        bias, prefix, dim = self.config.attention_bias, f"model.layers.{layer}", self.config.head_dim
        return Attention(self.config, weights, layer, qkv_bias=bias, out_bias=bias,
                         query_norm=self.load_norm(weights, f"{prefix}.self_attn.q_norm", dim),
                         key_norm=self.load_norm(weights, f"{prefix}.self_attn.k_norm", dim),
                         after=self.load_norm(weights, f"{prefix}.post_attention_layernorm"))
