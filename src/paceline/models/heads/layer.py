"""DraftLayer: a decoder layer of a head, over planes beside the target's cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.operands import Heads, KVCache, Norm
from paceline.kernels.packed import Weight
from paceline.models.config import ModelConfig
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.interface import Plane, Planes
from paceline.models.layers import Linear, load_linear, load_matrix
from paceline.models.rope import Rope
from paceline.models.weight_source import WeightSource


class DraftLayer:
    """Attention over the planes of layer `index`, then a gated feed-forward, each added to the stream. What is normed
    before the attention, and how, is up to the head."""

    def __init__(self, config: HeadConfig, weights: WeightSource, prefix: str, index: int, inputs: int = 1) -> None:
        """`inputs`: streams that queries, keys and values are made of."""
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        hidden, dim = config.hidden_size, config.head_dim
        query, keys = config.num_heads * dim, config.num_kv_heads * dim
        self.index = index
        self.scale = dim ** -0.5
        self.qkv = load_linear(weights, [f"{attention}.{part}_proj" for part in "qkv"], [query, keys, keys],
                               inputs * hidden, config.attention_bias)
        self.out = load_linear(weights, [f"{attention}.o_proj"], [hidden], query, False)
        query_norm, key_norm = (Norm(weights.take(f"{attention}.{part}_norm.weight", (dim,)), config.norm_eps)
                                if config.qk_norm else None for part in "qk")
        self.heads = Heads(config.num_heads, config.num_kv_heads, dim, query_norm, key_norm)
        self.mlp_norm = load_norm(config, weights, f"{prefix}.post_attention_layernorm")
        self.gate_up = load_linear(weights, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [config.intermediate_size] * 2,
                                   hidden, False)
        self.down = load_linear(weights, [f"{mlp}.down_proj"], [hidden], config.intermediate_size, False)

    def __call__(self, x: torch.Tensor, norm: Norm | None, onto: torch.Tensor, layout: Layout, view: GroupView,
                 turned: tuple[torch.Tensor, torch.Tensor], planes: Planes, kernels: Kernels) -> torch.Tensor:
        """onto + attention(norm x), then + feed-forward; keys and values go to the rows' slots. `onto` may be
        overwritten."""
        cache = cache_of(planes, self.index)
        q = kernels.project(x, norm, self.qkv.weight, self.qkv.bias, self.heads, *turned, cache, view.slots)
        mixed = kernels.attend(q, cache.keys, cache.values, layout, view, self.scale, cache.scales)
        onto = kernels.linear_add(mixed.reshape(x.shape[0], -1), self.out.weight, None, onto)
        inner = kernels.gated(onto, self.mlp_norm, self.gate_up.weight, None)
        return kernels.linear_add(inner, self.down.weight, None, onto)

    def keep(self, kv: torch.Tensor, turned: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor, planes: Planes,
             kernels: Kernels) -> None:
        """Store keys and values [N, 2 H_kv d] as they come of their projections."""
        heads = replace(self.heads, query=0, query_norm=self.heads.key_norm)
        kernels.rotate_and_store(kv, heads, *turned, cache_of(planes, self.index), slots)


def context_rows(config: HeadConfig, weights: WeightSource, prefixes: list[str], layers: list[DraftLayer],
                 inputs: int = 1) -> Linear:
    """The projections of keys and values of these layers, one below the other, for rows that only store."""
    dim, query = config.num_kv_heads * config.head_dim, config.num_heads * config.head_dim
    biases = [layer.qkv.bias[query:] for layer in layers if layer.qkv.bias is not None]
    bias = torch.cat(biases) if biases else None
    weight: Weight
    if isinstance(layers[0].qkv.weight, torch.Tensor) and len(layers) == 1:
        weight = layers[0].qkv.weight[query:]
    else:
        names = [f"{prefix}.self_attn.{part}_proj.weight" for prefix in prefixes for part in "kv"]
        weight = load_matrix(weights, names, [dim] * len(names), inputs * config.hidden_size)
    return Linear(weight, bias)


def load_norm(config: HeadConfig, weights: WeightSource, name: str, size: int | None = None) -> Norm:
    return Norm(weights.take(f"{name}.weight", (size or config.hidden_size,)), config.norm_eps)


def load_rope(config: HeadConfig, max_model_len: int, device: torch.device) -> Rope:
    """For all positions that a draft can reach, which may be a block beyond the text's."""
    shape = ModelConfig.from_dict({
        "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "num_hidden_layers": max(1, config.num_layers), "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size, "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "max_position_embeddings": config.max_position_embeddings})
    return Rope(shape, max_model_len + max(64, config.block_size), device)


def cache_of(planes: Planes, layer: int) -> KVCache:
    return KVCache(planes[f"layers.{layer}.keys"], planes[f"layers.{layer}.values"])


def key_planes(config: HeadConfig, cache: torch.dtype, activations: torch.dtype) -> tuple[Plane, ...]:
    """Keys and values in the cache's type. Where that has 8 bits, in 16: a head has few layers, and what is lost in
    one of them nothing evens out."""
    if cache.itemsize == 1:
        cache = activations if activations.itemsize == 2 else torch.float16
    shape = (config.num_kv_heads, config.head_dim)
    return tuple(Plane(f"layers.{layer}.{part}", shape, cache) for layer in range(config.num_layers)
                 for part in ("keys", "values"))
