"""The decoder layers of a head as a Hugging Face config describes them, read and written."""

from __future__ import annotations

from typing import Any

from paceline.errors import ModelFormatError
from paceline.models.fields import MOST_LAYERS, MOST_POSITIONS
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.formats.fields import HeadFields

NORMED = ("qwen3",)
"""Model types whose queries and keys are normed head by head."""


def read_shape(fields: HeadFields, *, layers: bool = True) -> dict[str, Any]:
    """Arguments of a HeadConfig. layers: num_hidden_layers counts the head's."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelFormatError(f"{fields.where}: hidden_act {activation!r} is not supported in a draft head; only silu "
                               "is.")
    if fields.flag("mlp_bias"):
        raise ModelFormatError(f"{fields.where}: mlp_bias is not supported in a draft head.")
    _check_windows(fields)
    both = fields.part("rope_parameters"), fields.part("rope_scaling")
    rope = both[0].raw or both[1].raw
    theta = fields.positive("rope_theta", HeadFields(rope, fields.where).positive("rope_theta", 10000.0))
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if "mrope_section" in scaling and kind in ("default", "mrope"):
        scaling, kind = {}, "default"  # of texts alone it turns as usual
    found = {
        "hidden_size": hidden, "vocab_size": fields.count("vocab_size"), "num_heads": heads,
        "num_kv_heads": fields.count("num_key_value_heads", heads),
        "head_dim": fields.count("head_dim", hidden // heads),
        "intermediate_size": fields.count("intermediate_size"), "norm_eps": fields.positive("rms_norm_eps", 1e-6),
        "rope_theta": theta, "rope_scaling": None if kind == "default" else scaling,
        "max_position_embeddings": fields.count("max_position_embeddings", 2048, most=MOST_POSITIONS),
        "attention_bias": fields.flag("attention_bias"), "qk_norm": fields.text("model_type", "llama") in NORMED}
    number = fields.count("num_hidden_layers", 1, most=MOST_LAYERS)
    return found | ({"num_layers": number} if layers else {})


def _check_windows(fields: HeadFields) -> None:
    types, window = fields.texts("layer_types") or (), fields.count("sliding_window", 0)
    using = fields.flag("use_sliding_window")
    if "sliding_attention" in types or (using and window and not types):
        raise ModelFormatError(f"{fields.where}: this head's layers have a sliding window, which is not supported in a "
                               "draft head; take one with full attention.")


def write_shape(config: HeadConfig) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model_type": "qwen3" if config.qk_norm else "llama", "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size, "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_position_embeddings, "rms_norm_eps": config.norm_eps}
    if config.attends:
        found |= {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
                  "head_dim": config.head_dim, "intermediate_size": config.intermediate_size, "hidden_act": "silu",
                  "attention_bias": config.attention_bias, "rope_theta": config.rope_theta}
        if config.rope_scaling is not None:
            found["rope_scaling"] = dict(config.rope_scaling)
    return found
