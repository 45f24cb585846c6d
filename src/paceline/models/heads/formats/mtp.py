"""MTP layers that come with a model, in its own checkpoint."""

from __future__ import annotations

from typing import Any

from paceline.errors import ModelFormatError
from paceline.models.config import ModelConfig
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.formats.files import Tensors
from paceline.models.heads.tensors import MTP

DEEPSEEK = {"eh_proj": "input_proj", "enorm": "token_layernorm", "hnorm": "hidden_layernorm",
            "shared_head.norm": "final_layernorm"}
QWEN = {"fc": "input_proj", "pre_fc_norm_embedding": "token_layernorm", "pre_fc_norm_hidden": "hidden_layernorm",
        "norm": "final_layernorm"}
CENTRED = ("qwen3_next", "qwen3_5")
"""Model types whose norms are stored as what is added to 1."""


def belongs(name: str, layers: int) -> bool:
    """Whether a tensor of a model's checkpoint is of its MTP layer."""
    return name.startswith(("mtp.", f"model.layers.{layers}.", "model.mtp_layers."))


def read(raw: dict[str, Any], tensors: Tensors, target: ModelConfig, where: str) -> tuple[HeadConfig, Tensors]:
    """`tensors`: those that belong."""
    if not tensors:
        raise ModelFormatError(f"{where} holds no MTP layer (model.layers.{target.num_layers}.* or mtp.*): many "
                               "copies of a model leave it out. Download the original, or draft in another way.")
    renamed = {_renamed(name, target.num_layers): tensor for name, tensor in tensors.items()}
    own = {f"{MTP}.embed_tokens.weight": "embed_tokens.weight", f"{MTP}.shared_head.head.weight": "lm_head.weight",
           "mtp.embed_tokens.weight": "embed_tokens.weight", "mtp.lm_head.weight": "lm_head.weight"}
    renamed = {own.get(name, name): tensor for name, tensor in renamed.items()}
    own_kind = any("kv_a_proj" in name or ".experts." in name for name in renamed)
    if own_kind and target.latent is None and not target.num_experts:
        raise ModelFormatError(f"{where}: the MTP layer has latent attention or experts, and the model has neither: "
                               "they do not belong together.")
    if str(raw.get("model_type", "")).startswith(CENTRED):
        renamed = {name: tensor.float() + 1 if "norm" in name else tensor for name, tensor in renamed.items()}
    attention = f"{MTP}.self_attn"
    config = HeadConfig(
        kind="mtp", hidden_size=target.hidden_size, vocab_size=target.vocab_size, draft_vocab_size=target.vocab_size,
        taps=(target.num_layers,), num_heads=target.num_heads, num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim, intermediate_size=target.intermediate_size, norm_eps=target.norm_eps,
        rope_theta=target.rope.theta, max_position_embeddings=target.max_position_embeddings,
        rope_scaling=None if target.rope.kind == "default" else {"rope_type": target.rope.kind, **target.rope.settings},
        target_layer=own_kind, qk_norm=f"{attention}.q_norm.weight" in renamed,
        attention_bias=f"{attention}.q_proj.bias" in renamed,
        own_embedding="embed_tokens.weight" in renamed, own_lm_head="lm_head.weight" in renamed)
    return config, renamed


def _renamed(name: str, layers: int) -> str:
    if name.startswith("model.mtp_layers."):
        return name.removeprefix("model.")
    if name.startswith("mtp.layers.0."):
        return f"{MTP}.{name.removeprefix('mtp.layers.0.')}"
    start, names = ("mtp.", QWEN) if name.startswith("mtp.") else (f"model.layers.{layers}.", DEEPSEEK)
    rest, _, end = name.removeprefix(start).rpartition(".")
    if start == "mtp." and rest not in names:
        return name
    return f"{MTP}.{names.get(rest, rest)}.{end}"
