"""Where a layer multiplies: the projections that share an input, and what that input comes from."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose layers are the four sites below."""


@dataclass(frozen=True)
class Site:
    """One input and the matrices [out, in] that are multiplied with it."""

    name: str
    consumers: tuple[str, ...]
    """Names of the projections, without ".weight"."""
    producer: str
    """The norm or projection whose output, feature by feature, the input is proportional to."""
    repeats: int = 1
    """Heads of the input that come from one head of the producer."""
    head_dim: int = 0


def sites(config: ModelConfig, layer: int) -> tuple[Site, Site, Site, Site]:
    """In the order in which a layer runs them."""
    prefix = f"model.layers.{layer}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return (
        Site("qkv", tuple(f"{attention}{part}_proj" for part in "qkv"), prefix + "input_layernorm"),
        Site("out", (attention + "o_proj",), attention + "v_proj", config.num_heads // config.num_kv_heads,
             config.head_dim),
        Site("gate_up", (mlp + "gate_proj", mlp + "up_proj"), prefix + "post_attention_layernorm"),
        Site("down", (mlp + "down_proj",), mlp + "up_proj"))


def known(config: ModelConfig) -> bool:
    return config.model_type in FAMILIES and not config.num_experts


def check_known(config: ModelConfig, what: str) -> None:
    if not known(config):
        raise ConfigError(f"{what} knows the layers of {', '.join(FAMILIES)}, not those of {config.model_type}: use "
                          "--to int8 or --to int4, which need no calibration.")
