"""Models with random weights in the shapes of real ones, made on the device: speed depends on shapes alone."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig

_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 500000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA | {
        "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072},
    "llama-3.2-1b": _LLAMA | {
        "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 8192, "max_position_embeddings": 131072, "head_dim": 64,
        "tie_word_embeddings": True},
    "smollm2-135m": _LLAMA | {
        "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "rope_theta": 100000.0},
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True},
}


def config_of(shape: str) -> ModelConfig:
    if shape not in SHAPES:
        raise ConfigError(f"No shape {shape!r}: use one of {', '.join(sorted(SHAPES))}.")
    return ModelConfig.from_dict(SHAPES[shape])


class RandomDeviceWeights:
    """WeightSource: normal values of a trained model's size, norms of one."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype or self._dtype, device=self._device)
        values = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        return values.normal_(0.0, shape[-1] ** -0.5, generator=self._generator)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What a step reads of the weights: all of them but the rows of the embedding that nobody asked for."""
    d, h = config.head_dim, config.hidden_size
    attention = h * d * (config.num_heads + 2 * config.num_kv_heads) + config.num_heads * d * h
    return (config.num_layers * (attention + 3 * h * config.intermediate_size) + config.vocab_size * h) * dtype.itemsize


def cache_bytes(config: ModelConfig, dtype: torch.dtype, tokens: int) -> int:
    """Keys and values of so many tokens, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize * tokens
