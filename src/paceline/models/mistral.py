"""Mistral: Llama without biases, with a sliding window in every layer where the config names one."""

from __future__ import annotations

from paceline.models.decoder import Decoder
from paceline.models.layers import Attention, GatedMLP
from paceline.models.weight_source import WeightSource


class Mistral(Decoder):
    def attention(self, weights: WeightSource, layer: int) -> Attention:
        return Attention(self.config, weights, layer, qkv_bias=False, out_bias=False)

    def feed_forward(self, weights: WeightSource, layer: int) -> GatedMLP:
        return GatedMLP(self.config, weights, f"model.layers.{layer}.mlp")
