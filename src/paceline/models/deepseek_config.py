"""What a config.json of DeepSeek's says beyond others: the shape of latent attention, and which layers are mixtures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ModelFormatError
from paceline.models.routing import RoutingRule


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes in features; `rank` + `rope_dim` of them are cached of a token."""

    rank: int
    """Of the latent that keys and values are made from (d_c)."""
    rope_dim: int
    """Rotated features, of a query head's and of the one key (d_r)."""
    nope_dim: int
    """Features of a head's queries and keys that are not rotated."""
    value_dim: int
    query_rank: int | None
    """Queries come from a latent of their own, of this size; None: from the residual stream."""
    interleaved: bool = True
    """The features of a rotated pair lie side by side, as DeepSeek stores them."""

    @property
    def width(self) -> int:
        """Elements a token takes in the cache of a layer."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Which layers are mixtures, and of what: experts routed by a rule, and experts that every row goes through."""

    count: int
    shared: int
    inner: int
    """Width of one expert."""
    first: int
    every: int
    rule: RoutingRule
    corrected: bool
    """The router has a correction that only decides who is chosen."""

    def at(self, layer: int) -> bool:
        return layer >= self.first and layer % self.every == 0


def latent_config(raw: Mapping[str, Any]) -> LatentConfig | None:
    """None where config.json has no kv_lora_rank: the model's attention is another."""
    if raw.get("kv_lora_rank") is None:
        return None
    rope_dim = _count(raw, "qk_rope_head_dim")
    if rope_dim % 2:
        raise ModelFormatError(f"config.json: qk_rope_head_dim ({rope_dim}) must be even.")
    return LatentConfig(
        rank=_count(raw, "kv_lora_rank"), rope_dim=rope_dim, nope_dim=_count(raw, "qk_nope_head_dim"),
        value_dim=_count(raw, "v_head_dim"),
        query_rank=None if raw.get("q_lora_rank") is None else _count(raw, "q_lora_rank"),
        interleaved=bool(raw.get("rope_interleave", True)))


def expert_layers(raw: Mapping[str, Any]) -> ExpertLayers | None:
    """None where config.json has no n_routed_experts: every layer is dense."""
    if not raw.get("n_routed_experts"):
        return None
    count, chosen = _count(raw, "n_routed_experts"), _count(raw, "num_experts_per_tok")
    method = raw.get("topk_method", "greedy")
    corrected = method == "noaux_tc"
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ModelFormatError(f"config.json: topk_method {method!r} is not supported; supported are greedy, "
                               "group_limited_greedy and noaux_tc.")
    scoring = raw.get("scoring_func", "sigmoid" if corrected else "softmax")
    if scoring not in ("softmax", "sigmoid"):
        raise ModelFormatError(f"config.json: scoring_func {scoring!r} is not supported; supported are softmax and "
                               "sigmoid.")
    groups = 1 if method == "greedy" else _count(raw, "n_group", 1)
    kept = 1 if method == "greedy" else _count(raw, "topk_group", 1)
    if count % groups or not kept <= groups or not chosen <= count // groups * kept:
        raise ModelFormatError(
            f"config.json: {chosen} experts a token (num_experts_per_tok) cannot be chosen from {kept} (topk_group) of "
            f"{groups} (n_group) equal groups of {count} (n_routed_experts).")
    normalise = bool(raw.get("norm_topk_prob"))
    # DeepSeek-V2 scales what it does not normalise, V3 both.
    scale = float(raw.get("routed_scaling_factor", 1.0)) if corrected or not normalise else 1.0
    if not math.isfinite(scale):
        raise ModelFormatError(f"config.json: routed_scaling_factor must be a finite number, got {scale!r}.")
    rule = RoutingRule(chosen, scoring == "sigmoid", groups, kept, min(2 if corrected else 1, count // groups),
                       normalise, scale)
    return ExpertLayers(count, int(raw.get("n_shared_experts") or 0), _count(raw, "moe_intermediate_size"),
                        int(raw.get("first_k_dense_replace") or 0), _count(raw, "moe_layer_freq", 1), rule, corrected)


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelFormatError(f"config.json has no {key}; the model cannot be built without it.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFormatError(f"config.json: {key} must be a positive whole number, got {value!r}.")
    return value
