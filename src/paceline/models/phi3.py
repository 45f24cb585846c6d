"""Phi-3 and Phi-4: Llama whose checkpoints hold queries, keys and values, and gate and up, as one matrix each."""

from __future__ import annotations

from paceline.models.decoder import Decoder
from paceline.models.layers import Attention, GatedMLP
from paceline.models.weight_source import WeightSource


class Phi3(Decoder):
    def attention(self, weights: WeightSource, layer: int) -> Attention:
        return Attention(self.config, weights, layer, qkv_bias=False, out_bias=False, fused=True)

    def feed_forward(self, weights: WeightSource, layer: int) -> GatedMLP:
        return GatedMLP(self.config, weights, f"model.layers.{layer}.mlp", fused=True)
