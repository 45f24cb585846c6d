"""Tiny model files for the loading tests, written with the reference tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file

TINY_METADATA: dict[str, Any] = {
    "block_count": 1, "context_length": 128, "embedding_length": 32, "feed_forward_length": 64,
    "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 5e4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def write_gguf(path: Path, architecture: str = "llama", metadata: Mapping[str, Any] | None = None,
               tensors: Mapping[str, tuple[np.ndarray, str]] | None = None) -> Path:
    """`metadata`: keys with a dot-free first part that equals the architecture may leave it out ("block_count");
    keys under "general." and "tokenizer." are taken as they are; None leaves a key out. `tensors`: name -> (float32
    array in torch order, type name); an array of uint8 holds finished blocks, a row of bytes for a row."""
    writer = GGUFWriter(path, architecture)
    for key, value in {**TINY_METADATA, **(metadata or {})}.items():
        if value is None:
            continue
        name = key if key.startswith(("general.", "tokenizer.")) else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, list(value))
    if tensors is None:
        tensors = {"token_embd.weight": (np.ones((8, 32), np.float32), "F32")}
    for name, (array, kind) in tensors.items():
        quantized = GGMLQuantizationType[kind]
        finished = array.dtype == np.uint8
        packed = array if finished else gguf.quants.quantize(array.astype(np.float32), quantized)
        writer.add_tensor(name, packed, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(folder: Path, config: Mapping[str, Any], shards: list[dict[str, torch.Tensor]]) -> Path:
    """config.json and one safetensors file, or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors")
        return folder
    index: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name)
        index.update(dict.fromkeys(shard, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder
