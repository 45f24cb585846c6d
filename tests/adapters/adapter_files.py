"""PEFT adapters for tiny random models, and the same models with the adapters merged into their weights."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.tiny import BASE, SHAPES, RandomWeights, tiny_model
from paceline.models.config import ModelConfig
from paceline.models.registry import build

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def shapes_of(model: Any, targets: list[str]) -> dict[str, tuple[int, int]]:
    """module -> (outputs, inputs) of a model's linear layers whose names end like this."""
    return {module.name: (module.size, linear.weight.shape[1]) for linear in model.linears()
            for module in linear.modules if module.name.rpartition(".")[2] in targets}


def factors(shapes: dict[str, tuple[int, int]], seed: str, rank: Any = 4) -> dict[str, torch.Tensor]:
    """Tensors as adapter_model.safetensors holds them; `rank`: one for all, or a function of the module."""
    tensors = {}
    for module, (out, inputs) in shapes.items():
        r = rank(module) if callable(rank) else rank
        own = torch.Generator().manual_seed(random.Random(f"{seed} {module}").randrange(1 << 40))
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(r, inputs, generator=own) / inputs ** 0.5
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, r, generator=own)
    return tensors


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 2, "target_modules": ATTENTION + MLP, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class MergedWeights(RandomWeights):
    """W + scale * B A, for the modules that have factors."""

    def __init__(self, tensors: dict[str, torch.Tensor], alpha: float = 2.0, rslora: bool = False) -> None:
        super().__init__()
        self._tensors = tensors
        self._alpha = alpha
        self._rslora = rslora

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        weight = super().take(name, shape, dtype)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in self._tensors or not name.endswith(".weight"):
            return weight
        a, b = self._tensors[f"{module}.lora_A.weight"], self._tensors[f"{module}.lora_B.weight"]
        return weight + b @ a * (self._alpha / (math.sqrt(len(a)) if self._rslora else len(a)))


def merged_model(name: str, tensors: dict[str, torch.Tensor], changes: dict[str, Any] | None = None,
                 **scale: Any) -> Any:
    shape = ModelConfig.from_dict(BASE | SHAPES[name] | (changes or {}))
    return build(shape, MergedWeights(tensors, **scale), shape.max_position_embeddings)


__all__ = ["ATTENTION", "MLP", "MergedWeights", "factors", "merged_model", "shapes_of", "tiny_model", "write_adapter"]
