"""What a config.json of DeepSeek's says beyond others: the shape of latent attention, and which layers are mixtures."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ModelFormatError
from paceline.models.fields import MOST_EXPERTS, Fields
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


def latent_config(read: Fields) -> LatentConfig | None:
    """None where config.json has no kv_lora_rank: the model's attention is another."""
    if read.get("kv_lora_rank") is None:
        return None
    rope_dim = read.count("qk_rope_head_dim")
    if rope_dim % 2:
        raise ModelFormatError(f"config.json: qk_rope_head_dim ({rope_dim}) must be even.")
    return LatentConfig(
        rank=read.count("kv_lora_rank"), rope_dim=rope_dim, nope_dim=read.count("qk_nope_head_dim"),
        value_dim=read.count("v_head_dim"),
        query_rank=None if read.get("q_lora_rank") is None else read.count("q_lora_rank"),
        interleaved=read.flag("rope_interleave", True))


def expert_layers(read: Fields) -> ExpertLayers | None:
    """None where config.json has no n_routed_experts: every layer is dense."""
    if not read.get("n_routed_experts"):
        return None
    count, chosen = read.count("n_routed_experts", most=MOST_EXPERTS), read.count("num_experts_per_tok")
    method = read.text("topk_method", "greedy")
    corrected = method == "noaux_tc"
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ModelFormatError(f"config.json: topk_method {method!r} is not supported; supported are greedy, "
                               "group_limited_greedy and noaux_tc.")
    scoring = read.text("scoring_func", "sigmoid" if corrected else "softmax")
    if scoring not in ("softmax", "sigmoid"):
        raise ModelFormatError(f"config.json: scoring_func {scoring!r} is not supported; supported are softmax and "
                               "sigmoid.")
    groups = 1 if method == "greedy" else read.count("n_group", 1)
    kept = 1 if method == "greedy" else read.count("topk_group", 1)
    if count % groups or not kept <= groups or not chosen <= count // groups * kept:
        raise ModelFormatError(
            f"config.json: {chosen} experts a token (num_experts_per_tok) cannot be chosen from {kept} (topk_group) of "
            f"{groups} (n_group) equal groups of {count} (n_routed_experts).")
    normalise = read.flag("norm_topk_prob")
    # DeepSeek-V2 scales what it does not normalise, V3 both.
    scale = read.number("routed_scaling_factor", 1.0) if corrected or not normalise else 1.0
    rule = RoutingRule(chosen, scoring == "sigmoid", groups, kept, min(2 if corrected else 1, count // groups),
                       normalise, scale)
    shared, inner = read.count("n_shared_experts", 0, most=MOST_EXPERTS), read.count("moe_intermediate_size")
    return ExpertLayers(count, shared, inner, read.count("first_k_dense_replace", 0),
                        read.count("moe_layer_freq", 1), rule, corrected)
