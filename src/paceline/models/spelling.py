"""How other families spell Llama's config.json, and what they mean by a key they leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """words: their key -> ours. assumed: our key -> what it is where a config does not have it. switches: those of
    assumed whose null says that there is none; any other null says nothing, as if the key were not there."""

    words: Mapping[str, str] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()


_GEMMA_WORDS = {"hidden_activation": "hidden_act"}
_GEMMA_SWITCHES = frozenset({"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"})
_EXPERT_SWITCHES = frozenset({"n_shared_experts", "norm_topk_prob"})
FAMILIES: dict[str, Family] = {
    # Sizes of tensors are not assumed: a config without them is broken, and says nothing about its files.
    "deepseek_v2": Family({"num_experts": "n_routed_experts"}, {"n_shared_experts": 2, "topk_method": "greedy"},
                          _EXPERT_SWITCHES),
    "deepseek_v3": Family({"num_local_experts": "n_routed_experts"}, {
        "num_experts_per_tok": 8, "n_shared_experts": 1, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "rope_interleave": True},
        _EXPERT_SWITCHES | {"rope_interleave"}),
    "gemma2": Family(_GEMMA_WORDS, {
        "hidden_act": "gelu_pytorch_tanh", "norm_offset": 1.0, "head_dim": 256, "num_key_value_heads": 4,
        "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _GEMMA_SWITCHES),
    "gemma3_text": Family(_GEMMA_WORDS, {
        "hidden_act": "gelu_pytorch_tanh", "norm_offset": 1.0, "head_dim": 256, "num_attention_heads": 8,
        "num_key_value_heads": 4, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "vocab_size": 262208,
        "max_position_embeddings": 131072}, _GEMMA_SWITCHES),
    "gpt2": Family({
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings", "n_inner": "intermediate_size",
        "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"},
        {"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
         "position_embedding_type": "learned", "attention_bias": True, "mlp_bias": True}),
    "gpt_neox": Family({
        "layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "attention_bias": True,
         "mlp_bias": True, "use_parallel_residual": True}),
    "olmo2": Family(assumed={"rms_norm_eps": 1e-5}),
    "phi3": Family(assumed={"rms_norm_eps": 1e-5}),
    "qwen3_moe": Family({"num_experts": "num_local_experts"}, {"num_key_value_heads": 4}),
}


def spelled(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json in Llama's words, complete as its family understands it."""
    if raw.get("model_type") == "gemma3" and isinstance(raw.get("text_config"), Mapping):
        raw = {"tie_word_embeddings": True, **raw["text_config"], "model_type": "gemma3_text"}
    family = FAMILIES.get(str(raw.get("model_type")), Family())
    known = {key: False if value is None and isinstance(family.assumed.get(key), bool) else value
             for key, value in raw.items() if value is not None or key in family.switches}
    known |= {ours: known.pop(theirs) for theirs, ours in family.words.items() if theirs in known}
    if known.get("model_type") == "gpt2" and "intermediate_size" not in known and isinstance(
            known.get("hidden_size"), int):
        known["intermediate_size"] = 4 * known["hidden_size"]
    return {**family.assumed, **known}
