"""Tiny models in folders, and the folders that `paceline quantize` writes, expanded again by loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import DictWeights, Hand
from model_files import write_folder
from safetensors.torch import load_file
from small_tokenizers import byte_level

from engine.tiny import RandomWeights
from paceline.kernels.interface import Kernels
from paceline.kernels.reference import ReferenceKernels
from paceline.models.config import ModelConfig
from paceline.models.registry import build

TEXT = "The quick brown fox jumps over the lazy dog, and 12 more sit by the river. " * 12
AWQ_PLACE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
BASE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True}


def names_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    h, f, d = config["hidden_size"], config["intermediate_size"], config["hidden_size"] // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], h), "model.norm.weight": (h,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for part, rows, columns in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            shapes[f"{at}self_attn.{part}_proj.weight"] = (rows, columns)
            if config["model_type"] == "qwen2" and part != "o":
                shapes[f"{at}self_attn.{part}_proj.bias"] = (rows,)
        for part, rows, columns in (("gate", f, h), ("up", f, h), ("down", h, f)):
            shapes[f"{at}mlp.{part}_proj.weight"] = (rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{norm}.weight"] = (h,)
    return shapes


def tiny_folder(path: Path, *, loud: bool = False, **changes: Any) -> Path:
    """A random model with a tokenizer. `loud`: a few features of each layer's input are much larger than the others."""
    tokenizer = byte_level("gpt-2")
    config = BASE | {"vocab_size": tokenizer.get_vocab_size()} | changes
    source = RandomWeights(0.7)
    tensors = {name: source.take(name, shape).contiguous() for name, shape in names_of(config).items()}
    if loud:
        for name, tensor in tensors.items():
            if name.endswith("layernorm.weight"):
                tensor[[3, 17, 40]] *= 25.0
    folder = write_folder(path, config, [tensors])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def logits(config: dict[str, Any], weights: Any, tokens: list[int], kernels: Kernels | None = None) -> torch.Tensor:
    shape = ModelConfig.from_dict(config)
    kernels = kernels or ReferenceKernels()
    return Hand(build(shape, weights, 256), kernels).run(tokens)


def expanded(folder: Path) -> DictWeights:
    """Every tensor of a folder in floats, from the raw file, value by value."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    stored = load_file(folder / "model.safetensors")
    out: dict[str, torch.Tensor] = {}
    marker = ".weight_scale" if method in ("compressed-tensors", "int8-outliers") else ".qweight"
    modules = [name.removesuffix(marker) for name in stored if name.endswith(marker)]
    for name, tensor in stored.items():
        if not any(name.startswith(f"{module}.") and not name.endswith(".bias") for module in modules):
            out[name] = tensor.float()
    for module in modules:
        parts = {name.removeprefix(f"{module}."): tensor.numpy() for name, tensor in stored.items()
                 if name.startswith(f"{module}.")}
        weight = {"awq": _awq, "gptq": _gptq}.get(method, _rows)(parts)
        out[f"{module}.weight"] = torch.from_numpy(weight)
    return DictWeights(out)


def _bits(value: Any, place: int) -> int:
    return (int(value) & 0xFFFFFFFF) >> (4 * place) & 15


def _awq(parts: dict[str, np.ndarray]) -> np.ndarray:
    inputs, words = parts["qweight"].shape
    group = inputs // parts["scales"].shape[0]
    weight = np.zeros((8 * words, inputs), np.float32)
    for o in range(8 * words):
        place = AWQ_PLACE_OF_OUTPUT[o % 8]
        for i in range(inputs):
            code, zero = _bits(parts["qweight"][i, o // 8], place), _bits(parts["qzeros"][i // group, o // 8], place)
            weight[o, i] = np.float32(code - zero) * np.float32(parts["scales"][i // group, o])
    return weight


def _gptq(parts: dict[str, np.ndarray]) -> np.ndarray:
    words, outputs = parts["qweight"].shape
    weight = np.zeros((outputs, 8 * words), np.float32)
    for o in range(outputs):
        for i in range(8 * words):
            g = parts["g_idx"][i]
            zero = _bits(parts["qzeros"][g, o // 8], o % 8) + 1
            weight[o, i] = np.float32(_bits(parts["qweight"][i // 8, o], i % 8) - zero) * \
                np.float32(parts["scales"][g, o])
    return weight


def _rows(parts: dict[str, np.ndarray]) -> np.ndarray:
    weight = np.zeros(parts["weight"].shape, np.float32)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            weight[o, i] = np.float32(parts["weight"][o, i]) * parts["weight_scale"][o, 0]
        for place, column in enumerate(parts.get("outlier_columns", [])):
            weight[o, column] = parts["outlier_weight"][o, place]
    return weight
