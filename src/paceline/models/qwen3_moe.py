"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the MLP, in all layers or some."""

from __future__ import annotations

from paceline.errors import ModelFormatError
from paceline.models.layers import FeedForward, GatedMLP, Linear, MixtureOfExperts, SoftmaxRouter, load_experts
from paceline.models.qwen3 import Qwen3
from paceline.models.shard import shard_of
from paceline.models.weight_source import WeightSource


class Qwen3Moe(Qwen3):
    def feed_forward(self, weights: WeightSource, layer: int) -> FeedForward:
        config, prefix = self.config, f"model.layers.{layer}.mlp"
        if not config.num_experts:
            raise ModelFormatError("config.json has no num_experts; a qwen3_moe model needs it.")
        if layer in config.dense_layers:
            return GatedMLP(config, weights, prefix)
        # Small, and a rounded score could send a row to another expert: never packed.
        scores = Linear(weights.take(f"{prefix}.gate.weight", (config.num_experts, config.hidden_size)))
        experts = load_experts(weights, config.num_experts, lambda whole, expert: GatedMLP(
            config, whole, f"{prefix}.experts.{expert}", inner=config.expert_size))
        router = SoftmaxRouter(scores, config.experts_per_token, renormalise=config.renormalise_experts)
        return MixtureOfExperts(router, experts, shard=shard_of(weights))
