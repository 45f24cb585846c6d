"""Qwen2 and Qwen2.5: biases on queries, keys and values; some layers may have a sliding window."""

from __future__ import annotations

from paceline.models.decoder import Decoder
from paceline.models.layers import Attention, GatedMLP
from paceline.models.weight_source import WeightSource


class Qwen2(Decoder):
    def attention(self, weights: WeightSource, layer: int) -> Attention:
        return Attention(self.config, weights, layer, qkv_bias=True, out_bias=False)

    def feed_forward(self, weights: WeightSource, layer: int) -> GatedMLP:
        return GatedMLP(self.config, weights, f"model.layers.{layer}.mlp")
