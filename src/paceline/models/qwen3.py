"""Qwen3 (dense): each head's queries and keys are normed before they are rotated."""

from __future__ import annotations

from paceline.models.decoder import Decoder
from paceline.models.layers import Attention, FeedForward, GatedMLP
from paceline.models.weight_source import WeightSource


class Qwen3(Decoder):
    def attention(self, weights: WeightSource, layer: int) -> Attention:
        bias = self.config.attention_bias
        return Attention(self.config, weights, layer, qkv_bias=bias, out_bias=bias, qk_norm=True)

    def feed_forward(self, weights: WeightSource, layer: int) -> FeedForward:
        return GatedMLP(self.config, weights, f"model.layers.{layer}.mlp")
