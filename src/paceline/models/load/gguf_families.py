"""What GGUF files of other families than Llama's say otherwise: their tensors' names, and metadata that has no key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.models.load.dequant import dequantize
from paceline.models.load.gguf import GGUFFile

Values = Mapping[str, Any]
"""config.json keys as they are for every family."""


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """model_type of the architecture; the Hugging Face class; layer tensors that are called otherwise than Llama's;
    and further config.json keys, of the file and what is known of it already."""

    model_type: str
    class_name: str
    layer: Mapping[str, str] = field(default_factory=dict)
    expert: Mapping[str, str] = field(default_factory=dict)
    """Parts of an expert, where the experts lie under mlp.experts."""
    more: Callable[[GGUFFile, Values], dict[str, Any]] = lambda file, known: {}


def _gemma2(file: GGUFFile, known: Values) -> dict[str, Any]:
    return _gemma(file, known, "gemma2", largest=46) | {
        "attn_logit_softcapping": file.metadata.positive("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.metadata.positive("gemma2.final_logit_softcapping", 30.0)}


def _gemma3(file: GGUFFile, known: Values) -> dict[str, Any]:
    return _gemma(file, known, "gemma3", largest=62) | {
        "final_logit_softcapping": file.metadata.positive("gemma3.final_logit_softcapping", 0.0) or None,
        "rope_local_base_freq": file.metadata.positive("gemma3.rope.freq_base_swa", 10000.0)}


def _gemma(file: GGUFFile, known: Values, architecture: str, largest: int) -> dict[str, Any]:
    """Files do not say by what scores are scaled; of these families only the largest model has another scale."""
    per_head = known["hidden_size"] // known["num_attention_heads"]
    return {"hidden_act": "gelu_pytorch_tanh", "norm_offset": 0.0,
            "query_pre_attn_scalar": per_head if known["num_hidden_layers"] == largest else known["head_dim"]}


def _phi3(file: GGUFFile, known: Values) -> dict[str, Any]:
    factors = {}
    for kind in ("short", "long"):
        info = file.tensors.get(f"rope_factors_{kind}.weight")
        if info is None:
            return {}
        values = dequantize(file.data(info), info.format.name, info.shape, name=info.name)
        factors[f"{kind}_factor"] = values.tolist()
    return {"rope_scaling": factors | {
        "rope_type": "longrope",
        "original_max_position_embeddings": file.metadata.count("phi3.rope.scaling.original_context_length"),
        "attention_factor": file.metadata.positive("phi3.rope.scaling.attn_factor", 1.0)}}


def _qwen3_moe(file: GGUFFile, known: Values) -> dict[str, Any]:
    return {"moe_intermediate_size": file.metadata.count("qwen3moe.expert_feed_forward_length", 0) or None,
            "norm_topk_prob": True}


def _gpt2(file: GGUFFile, known: Values) -> dict[str, Any]:
    return {"hidden_act": "gelu_new"}


def _neox(file: GGUFFile, known: Values) -> dict[str, Any]:
    return {"hidden_act": "gelu", "use_parallel_residual": file.metadata.flag("gptneox.use_parallel_residual", True)}


_BOTH_SIDES = {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
               "post_ffw_norm": "post_feedforward_layernorm"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj"}
FAMILIES: dict[str, GGUFFamily] = {
    "llama": GGUFFamily("llama", "LlamaForCausalLM"),
    "qwen2": GGUFFamily("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GGUFFamily("qwen3", "Qwen3ForCausalLM"),
    "gemma2": GGUFFamily("gemma2", "Gemma2ForCausalLM", _BOTH_SIDES, more=_gemma2),
    "gemma3": GGUFFamily("gemma3_text", "Gemma3ForCausalLM", _BOTH_SIDES, more=_gemma3),
    "gpt2": GGUFFamily("gpt2", "GPT2LMHeadModel", _FUSED, more=_gpt2),
    "gptneox": GGUFFamily("gpt_neox", "GPTNeoXForCausalLM", _FUSED, more=_neox),
    "olmo2": GGUFFamily("olmo2", "Olmo2ForCausalLM", _BOTH_SIDES),
    "phi3": GGUFFamily("phi3", "Phi3ForCausalLM", _FUSED | {"ffn_up": "mlp.gate_up_proj"}, more=_phi3),
    "qwen3moe": GGUFFamily("qwen3_moe", "Qwen3MoeForCausalLM", {"ffn_gate_inp": "mlp.gate"},
                           {"ffn_gate": "gate_proj", "ffn_down": "down_proj", "ffn_up": "up_proj"}, _qwen3_moe),
}
"""By general.architecture."""
