"""Llama (and models of its shape: SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from paceline.models.decoder import Decoder
from paceline.models.layers import Attention, GatedMLP
from paceline.models.weight_source import WeightSource


class Llama(Decoder):
    def attention(self, weights: WeightSource, layer: int) -> Attention:
        bias = self.config.attention_bias
        return Attention(self.config, weights, layer, qkv_bias=bias, out_bias=bias)

    def feed_forward(self, weights: WeightSource, layer: int) -> GatedMLP:
        return GatedMLP(self.config, weights, f"model.layers.{layer}.mlp", bias=self.config.mlp_bias)
