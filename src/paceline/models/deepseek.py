"""DeepSeek-V2 and V3: latent attention; dense layers first, then mixtures with shared experts."""

from __future__ import annotations

import torch

from paceline.models.decoder import Decoder
from paceline.models.layers import FeedForward, GatedMLP, MixtureOfExperts, load_experts
from paceline.models.mla import LatentAttention
from paceline.models.routing import GroupedRouter
from paceline.models.shard import shard_of
from paceline.models.weight_source import WeightSource


class DeepSeek(Decoder):
    def attention(self, weights: WeightSource, layer: int) -> LatentAttention:
        return LatentAttention(self.config, weights, layer)

    def feed_forward(self, weights: WeightSource, layer: int) -> FeedForward:
        config, mixtures = self.config, self.config.expert_layers
        prefix = f"model.layers.{layer}.mlp"
        if mixtures is None or not mixtures.at(layer):
            return GatedMLP(config, weights, prefix, bias=config.mlp_bias)
        scores = weights.take(f"{prefix}.gate.weight", (mixtures.count, config.hidden_size), torch.float32)
        correction = None
        if mixtures.corrected:
            correction = weights.take(f"{prefix}.gate.e_score_correction_bias", (mixtures.count,), torch.float32)
        experts = load_experts(weights, mixtures.count, lambda whole, expert: GatedMLP(
            config, whole, f"{prefix}.experts.{expert}", inner=mixtures.inner))
        shared = None
        if mixtures.shared:
            shared = GatedMLP(config, weights, f"{prefix}.shared_experts", bias=config.mlp_bias,
                              inner=mixtures.inner * mixtures.shared)
        return MixtureOfExperts(GroupedRouter(scores, correction, mixtures.rule), experts, shared, shard_of(weights))
