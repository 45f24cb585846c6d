"""OLMo 2: sublayers read the stream as it is, their results are normed; all queries, and all keys, are normed too."""

from __future__ import annotations

from paceline.models.decoder import Block, Decoder
from paceline.models.layers import Attention, GatedMLP
from paceline.models.weight_source import WeightSource


class Olmo2(Decoder):
    def block(self, weights: WeightSource, layer: int) -> Block:
        return Block(None, self.attention(weights, layer), None, self.feed_forward(weights, layer))

    def attention(self, weights: WeightSource, layer: int) -> Attention:
        config, prefix = self.config, f"model.layers.{layer}"
        bias, dim = config.attention_bias, config.head_dim
        return Attention(
            config, weights, layer, qkv_bias=bias, out_bias=bias,
            query_norm=self.load_norm(weights, f"{prefix}.self_attn.q_norm", config.num_heads * dim),
            key_norm=self.load_norm(weights, f"{prefix}.self_attn.k_norm", config.num_kv_heads * dim),
            after=self.load_norm(weights, f"{prefix}.post_attention_layernorm"))

    def feed_forward(self, weights: WeightSource, layer: int) -> GatedMLP:
        prefix = f"model.layers.{layer}"
        return GatedMLP(self.config, weights, f"{prefix}.mlp",
                        after=self.load_norm(weights, f"{prefix}.post_feedforward_layernorm"))
