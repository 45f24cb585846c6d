"""Which architecture builds which model_type. A new one is a file of its own and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import ModelFormatError
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.deepseek import DeepSeek
from paceline.models.gemma import Gemma2, Gemma3
from paceline.models.gpt import GPT2, GPTNeoX
from paceline.models.interface import CausalLM
from paceline.models.llama import Llama
from paceline.models.mistral import Mistral
from paceline.models.mixtral import Mixtral
from paceline.models.olmo2 import Olmo2
from paceline.models.phi3 import Phi3
from paceline.models.qwen2 import Qwen2
from paceline.models.qwen3 import Qwen3
from paceline.models.qwen3_moe import Qwen3Moe
from paceline.models.weight_source import WeightSource

ARCHITECTURES: dict[str, type[Decoder]] = {
    "deepseek_v2": DeepSeek,
    "deepseek_v3": DeepSeek,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "gpt2": GPT2,
    "gpt_neox": GPTNeoX,
    "llama": Llama,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "olmo2": Olmo2,
    "phi3": Phi3,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
}
PARTS = ("gemma3",)
"""Models with other senses, whose text model is one of the above."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Of a config.json. An architecture that is not supported is named before anything about it is looked at."""
    found = raw.get("model_type")
    if isinstance(found, str) and found and found not in {*ARCHITECTURES, *PARTS}:
        raise _unsupported(found)
    return ModelConfig.from_dict(raw)


def _unsupported(model_type: str) -> ModelFormatError:
    return ModelFormatError(f"model_type {model_type!r} is not supported; supported are "
                            f"{', '.join(sorted({*ARCHITECTURES, *PARTS}))}.")


def build(config: ModelConfig, weights: WeightSource, max_model_len: int) -> CausalLM:
    """The model, its tensors taken out of `weights`, ready to run positions below max_model_len."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise _unsupported(config.model_type)
    return architecture(config, weights, max_model_len)
