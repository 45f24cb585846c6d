"""Mixtral: Mistral with a mixture of experts in place of the MLP."""

from __future__ import annotations

from paceline.errors import ModelFormatError
from paceline.models.decoder import Decoder
from paceline.models.layers import Attention, GatedMLP, Linear, MixtureOfExperts, SoftmaxRouter, load_experts
from paceline.models.shard import shard_of
from paceline.models.weight_source import WeightSource


class Mixtral(Decoder):
    def attention(self, weights: WeightSource, layer: int) -> Attention:
        return Attention(self.config, weights, layer, qkv_bias=False, out_bias=False)

    def feed_forward(self, weights: WeightSource, layer: int) -> MixtureOfExperts:
        config = self.config
        if not config.num_experts:
            raise ModelFormatError("config.json has no num_local_experts; a mixtral model needs it.")
        prefix = f"model.layers.{layer}.block_sparse_moe"
        # Small, and a rounded score could send a row to another expert: never packed.
        router = Linear(weights.take(f"{prefix}.gate.weight", (config.num_experts, config.hidden_size)))
        experts = load_experts(weights, config.num_experts, lambda whole, expert: GatedMLP(
            config, whole, f"{prefix}.experts.{expert}", names=("w1", "w3", "w2")))
        return MixtureOfExperts(SoftmaxRouter(router, config.experts_per_token, renormalise=True), experts,
                                shard=shard_of(weights))
