"""write_head(): a folder in the speculators format, there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.errors import ConfigError
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.formats import speculators
from paceline.models.heads.tensors import MAPS, check, target_ids
from paceline.models.load.safetensors_folder import SINGLE

STORAGE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.float16}
"""Types of storage, and what tensors that are no matrices have in them."""
IN_FLOATS = ("fc.weight",)
"""Reads streams of very different sizes side by side, so that a row holds weights of very different sizes: with one
scale for all of them the smallest would be lost."""
LARGEST = 127


def write_head(folder: str | Path, config: HeadConfig, tensors: Mapping[str, torch.Tensor], *,
               storage: str = "float16", replace: bool = False) -> None:
    """Writes config.json and model.safetensors to a folder beside `folder`, then renames it: who reads `folder` never
    sees half a head. storage: float32, bfloat16, float16, or int8, where every matrix but `fc` becomes codes with a
    scale per row (`<name>` int8, `<name>_scale` float32 [rows, 1], as compressed-tensors has them). replace: `folder`
    may be there already."""
    path = Path(folder)
    if storage not in STORAGE:
        raise ConfigError(f"A draft head is stored as {', '.join(STORAGE)}, not as {storage!r}.")
    if path.exists() and not replace:
        raise ConfigError(f"{path} is there already: name another folder, or remove it.")
    if config.target_layer:
        raise ConfigError("An MTP layer of the target's own kind stays in the target's checkpoint: the speculators "
                          "format has no words for it.")
    check(config, tensors, "this head")
    stored: dict[str, torch.Tensor] = {}
    in_floats: list[str] = []
    for name, tensor in tensors.items():
        if name in MAPS:
            continue
        plain = tensor.detach().cpu()
        if storage == "int8" and _is_matrix(plain) and name.endswith(".weight") and name not in IN_FLOATS:
            stored[name], stored[f"{name}_scale"] = rounded(plain)
        else:
            stored[name] = plain.to(STORAGE[storage]).contiguous().clone()
            if name.endswith(".weight") and plain.dim() == 2:
                in_floats.append(name.removesuffix(".weight"))
    if config.reduced:
        d2t = tensors["d2t"].cpu().to(torch.int64)
        stored["d2t"] = d2t.clone()
        stored["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        stored["t2d"][target_ids(config, d2t, "this head")] = True
    raw = speculators.write(config) | {"torch_dtype": str(STORAGE[storage]).removeprefix("torch.")}
    if storage == "int8":
        raw["quantization_config"] = _quantization(in_floats)
    _write(path, raw, stored)


def rounded(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [rows, cols] and float32 scales [rows, 1]: a row's largest value becomes 127."""
    wide = matrix.float()
    scale = wide.abs().amax(1, keepdim=True) / LARGEST
    return (wide / scale.where(scale > 0, 1)).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def _is_matrix(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and tensor.shape[0] > 1


def _quantization(in_floats: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": in_floats,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}


def _write(path: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ConfigError(f"Cannot write to {path.parent}: {error.strerror}; name another folder.") from None
    try:
        save_file(tensors, new / SINGLE, metadata={"format": "pt"})
        (new / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        new.chmod(0o777 & ~_umask())
        _synced(new)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
            os.replace(path, old / "old")
            try:
                os.replace(new, path)
            except OSError:
                os.replace(old / "old", path)
                raise
            finally:
                shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(new, path)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror or error}; nothing was left there.") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _synced(folder: Path) -> None:
    """On the disk before it gets its name."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
